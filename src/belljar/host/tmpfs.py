"""Limits the number of files of a folder in memory that was mounted without such a limit, as bubblewrap mounts them."""

from __future__ import annotations

import ctypes
import os

# Numbers of system calls, the same on every architecture.
_FSCONFIG = 431
_FSPICK = 433
_CLOEXEC_AND_EMPTY_PATH = 0x1 | 0x8
_SET_STRING = 1
_RECONFIGURE = 7


def limit_files(folder: int, number: int) -> None:
    """Lets a tmpfs hold so many files and folders.

    Args:
        folder: a descriptor of its root.
        number: how many.

    Raises:
        OSError: the kernel refused it (only root may, on Linux 5.2 and later).
    """
    config = _call(_FSPICK, folder, b"", _CLOEXEC_AND_EMPTY_PATH)
    try:
        _call(_FSCONFIG, config, _SET_STRING, b"nr_inodes", str(number).encode(), 0)
        _call(_FSCONFIG, config, _RECONFIGURE, None, None, 0)
    finally:
        os.close(config)


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    value = int(libc.syscall(ctypes.c_long(number), *given))
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value
