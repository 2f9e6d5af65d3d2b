"""A daemon of its own between the service's container and a container engine: only Belljar's own calls pass."""
