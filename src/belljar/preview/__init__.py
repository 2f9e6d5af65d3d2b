"""Previews: a server of the guest's, seen in a browser through a reverse proxy that keeps it apart from all else."""
