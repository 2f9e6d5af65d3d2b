"""What a living sandbox has beside runs: processes that go on, its files, ports, interpreters and snapshots."""
