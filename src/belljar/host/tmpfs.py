"""Limits the number of files of a folder in memory that was mounted without such a limit, as bubblewrap mounts them."""

from __future__ import annotations

import os

from belljar.host import syscalls

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
    config = syscalls.call(_FSPICK, folder, b"", _CLOEXEC_AND_EMPTY_PATH)
    try:
        syscalls.call(_FSCONFIG, config, _SET_STRING, b"nr_inodes", str(number).encode(), 0)
        syscalls.call(_FSCONFIG, config, _RECONFIGURE, None, None, 0)
    finally:
        os.close(config)
