"""Programs that run inside a sandbox. They trust nothing of the host's and import nothing of Belljar."""
