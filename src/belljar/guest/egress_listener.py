"""Opens the guest's way to the proxy: a socket that listens on its own loopback, handed to the host.

Then it becomes the guest. Arguments: the descriptor to hand it over by, the port, the guest's command.
"""

import os
import socket
import sys


def hand_over(fd: int, port: int) -> None:
    """Listens on a port of the loopback, and sends the socket through the descriptor."""
    with socket.socket(fileno=fd) as host, socket.create_server(("127.0.0.1", port)) as listener:
        socket.send_fds(host, [b"listener"], [listener.fileno()])


def become(argv: "list[str]") -> None:
    """Runs the guest's command in the place of this program, or ends as a shell does."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


hand_over(int(sys.argv[1]), int(sys.argv[2]))
become(sys.argv[3:])
