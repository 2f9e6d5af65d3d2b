"""Living sandboxes that callers hold open: their lives, processes, files, and what is told of the ended."""
