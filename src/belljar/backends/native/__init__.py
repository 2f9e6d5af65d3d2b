"""The native backend: Linux namespaces through bubblewrap."""
