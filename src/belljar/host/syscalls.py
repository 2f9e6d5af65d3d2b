"""Calls the kernel by number, for what neither Python nor the C library offers."""

from __future__ import annotations

import ctypes
import os


def call(number: int, *arguments: object) -> int:
    """Returns what the kernel answers.

    Args:
        number: of the system call, on this architecture.
        *arguments: whole numbers, bytes, None, or what ctypes takes as a pointer.

    Raises:
        OSError: the kernel refused it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return checked(int(libc.syscall(ctypes.c_long(number), *given)))


def checked(answer: int) -> int:
    """Returns an answer of the C library (loaded with `use_errno`), or raises the OSError that it stands for."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer
