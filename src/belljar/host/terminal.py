"""Opens pseudo-terminals of a sandbox, and says how large they are."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from belljar.core.process import PtySize
from belljar.host import files

_UNLOCK, _OPEN_OTHER_END = 0x40045431, 0x5441  # TIOCSPTLCK, TIOCGPTPEER: the same on every architecture we run on


def open_pair(multiplexer: str, size: PtySize, *, owner: int | None) -> tuple[int, int]:
    """Makes a new terminal; returns our end and the guest's.

    Args:
        multiplexer: the path of the `ptmx` of the file system that the terminal is to be in.
        size: its lines and columns.
        owner: whose it is to be, if not ours.
    """
    with files.acting_as(owner):
        near = os.open(multiplexer, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.ioctl(near, _UNLOCK, struct.pack("i", 0))
            far = fcntl.ioctl(near, _OPEN_OTHER_END, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            resize(near, size)
        except BaseException:
            os.close(near)
            raise
    return near, far


def resize(terminal: int, size: PtySize) -> None:
    """Changes the size; the programs in front are told by SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))
