"""Commands for living sandboxes: a shell here or on a server, and all that is done to those of a server."""
