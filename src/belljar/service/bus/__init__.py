"""Lines and events for other processes: in memory, Redis, NATS."""
