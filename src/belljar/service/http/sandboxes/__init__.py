"""Routes of living sandboxes, under /api/sandboxes, and their WebSockets."""
