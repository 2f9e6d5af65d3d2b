"""Lists the processes of a living sandbox, by the kernel's word from outside."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from belljar.core.process import BoxProcess
from belljar.host import procfs
from belljar.host.process_table import described, link, namespace

_MOST = 10_000  # processes that are listed


def members(holder: int) -> list[int]:
    """Lists the pids of all processes in the machine of this first process, those that are ours among them."""
    if not (wanted := namespace(holder, "pid")):  # it has ended
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and namespace(int(name), "pid") == wanted]


def processes(holder: int, bubblewrap: str) -> tuple[BoxProcess, ...]:
    """Describes what runs in a machine, without what is ours.

    That is what is not in a user namespace of a guest's, and bubblewrap while it is about to become a guest's command.
    """
    found = []
    for pid in _guests(holder, bubblewrap):
        with suppress(OSError, ValueError, IndexError, KeyError):
            if one := described(pid):
                found.append(one)
    return tuple(sorted(found, key=lambda one: one.pid))


def largest(holder: int, bubblewrap: str) -> int | None:
    """Returns the guest's process that takes the most memory, as the host numbers it; None: there is none."""
    return max(_guests(holder, bubblewrap), key=lambda pid: procfs.private_memory((pid,)), default=None)


def end(pid: int, holder: int) -> None:
    """Ends a process of a machine, and nobody who got its number meanwhile."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if namespace(pid, "pid") == namespace(holder, "pid") != "":
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _guests(holder: int, bubblewrap: str) -> list[int]:
    ours, program = namespace(holder, "user"), os.path.realpath(bubblewrap)
    return [
        pid
        for pid in members(holder)[:_MOST]
        if namespace(pid, "user") not in ("", ours) and link(pid, "exe") != program
    ]
