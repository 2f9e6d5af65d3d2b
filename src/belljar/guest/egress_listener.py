"""Opens the guest's way to the proxy: a socket that listens on its own loopback, handed to the host.

Then it becomes the guest. Arguments: the descriptor to hand it over by, the port, the guest's command.
"""

import os
import socket
import sys

with socket.socket(fileno=int(sys.argv[1])) as host, socket.create_server(("127.0.0.1", int(sys.argv[2]))) as listener:
    socket.send_fds(host, [b"listener"], [listener.fileno()])
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    print(f"{sys.argv[3]}: {error.strerror}", file=sys.stderr)
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
