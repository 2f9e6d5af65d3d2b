"""The Apple backend: Apple's `container`, by its command line."""
