"""Connects to a port of the loopback of the sandbox that this runs in, and passes on what comes and goes, in frames.

Both ways a frame is four bytes that say how long it is, and so many bytes; an empty one: no more will come from there.
Before the first frame comes a line: 0, or the number of the error. When stdin ends without an empty frame, all is over.
"""

import os
import socket
import struct
import sys
import threading

FAMILIES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
PIECE_BYTES = 65536


def connected(port: int) -> "socket.socket | int":
    """Returns the connection, or the number of the first error."""
    number = 0
    for family, address in FAMILIES:
        try:
            line = socket.socket(family)
            line.connect((address, port))
            return line
        except OSError as error:
            number = number or error.errno or 5
    return number


def tell(data: bytes) -> None:
    """Writes all of it to stdout."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def take(count: int) -> bytes:
    """Reads so many bytes from stdin; ends the program if they do not come."""
    found = bytearray()
    while len(found) < count:
        piece = os.read(0, count - len(found))
        if not piece:
            os._exit(0)
        found += piece
    return bytes(found)


def hear(line: socket.socket) -> None:
    """Passes on what comes from the port."""
    try:
        while piece := line.recv(PIECE_BYTES):
            tell(struct.pack(">I", len(piece)) + piece)
    except OSError:
        pass
    tell(struct.pack(">I", 0))


line: "socket.socket | int" = connected(int(sys.argv[1]))
if isinstance(line, int):
    tell(b"%d\n" % line)
    sys.exit()
tell(b"0\n")
threading.Thread(target=hear, args=(line,), daemon=True).start()
while True:
    length: int = struct.unpack(">I", take(4))[0]
    try:
        if length:
            line.sendall(take(length))
        else:
            line.shutdown(socket.SHUT_WR)
    except OSError:
        pass
