"""Records in SQLite or PostgreSQL."""
