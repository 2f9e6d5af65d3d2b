"""Living sandboxes on bubblewrap: one machine for all commands of a box."""
