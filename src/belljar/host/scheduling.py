"""Lets a thread that does little run soon after it wakes, though sandboxes compute beside it."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from belljar.host import syscalls

SLICE_NANOSECONDS = 200_000
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RESET_ON_FORK = 1  # a guest must not inherit it


def run_soon_after_waking() -> bool:
    """Asks the kernel for short slices for this thread; its share of the CPU stays what it was.

    A thread with shorter slices than the one that runs takes its place when it wakes (Linux 6.12 and later).

    Returns:
        Whether the kernel took it: older ones, and systems other than Linux, do not.
    """
    numbers = _NUMBERS.get(platform.machine())
    if not numbers or not hasattr(os, "sched_getscheduler"):
        return False
    set_number, get_number = numbers
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NANOSECONDS, 0, 0)
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    try:
        syscalls.call(set_number, 0, wanted, 0)
        syscalls.call(get_number, 0, found, _ATTRIBUTES.size, 0)
    except OSError:
        return False
    return bool(_ATTRIBUTES.unpack(found.raw)[5] == SLICE_NANOSECONDS)
