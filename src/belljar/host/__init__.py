"""What Belljar does to the host: processes, files, control groups, sockets. Everything dangerous is in this folder."""
