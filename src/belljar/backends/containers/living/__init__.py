"""Living sandboxes on a container engine: one container, in which the engine starts each command."""
