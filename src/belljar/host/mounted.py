"""Changes what is mounted already, by the kernel's own calls: a program for that costs as much as a command."""

from __future__ import annotations

import errno
import os
from functools import cache

from belljar.host import syscalls

_FSCONFIG, _FSPICK = 431, 433  # on every architecture
_CLOEXEC, _EMPTY_PATH = 0x1, 0x8
_SET_STRING, _RECONFIGURE = 1, 7


@cache
def can_limit_files() -> bool:
    """Whether `limit_files` works for this process: it is root, on Linux 5.2 or later."""
    if os.geteuid() != 0:
        return False
    try:
        os.close(syscalls.call(_FSPICK, -1, b"", _EMPTY_PATH | _CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBADF  # and not that there is no such call, or that a filter refuses it
    return False


def limit_files(folder: int, most: int) -> None:
    """Sets how many files and folders a tmpfs may have, in whatever mount namespace it is.

    Args:
        folder: its topmost folder, open.
        most: how many.

    Raises:
        OSError: the kernel refused it.
    """
    fd = syscalls.call(_FSPICK, folder, b"", _EMPTY_PATH | _CLOEXEC)
    try:
        syscalls.call(_FSCONFIG, fd, _SET_STRING, b"nr_inodes", str(most).encode(), 0)
        syscalls.call(_FSCONFIG, fd, _RECONFIGURE, None, None, 0)
    finally:
        os.close(fd)
