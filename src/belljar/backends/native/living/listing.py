"""Lists the processes of a living sandbox, by the kernel's word from outside."""

from __future__ import annotations

import os
from contextlib import suppress

from belljar.core.process import BoxProcess
from belljar.host.process_table import described, link, namespace

_MOST = 10_000  # processes that are listed


def members(holder: int) -> list[int]:
    """Lists the pids of all processes in the machine of this first process, those that are ours among them."""
    wanted = namespace(holder, "pid")
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and namespace(int(name), "pid") == wanted]


def processes(holder: int, bubblewrap: str) -> tuple[BoxProcess, ...]:
    """Describes what runs in a machine, without what is ours.

    That is what is not in a user namespace of a guest's, and bubblewrap while it is about to become a guest's command.
    """
    ours = namespace(holder, "user")
    program = os.path.realpath(bubblewrap)
    found = []
    for pid in members(holder)[:_MOST]:
        if namespace(pid, "user") in ("", ours) or link(pid, "exe") == program:
            continue
        with suppress(OSError, ValueError, IndexError, KeyError):
            if one := described(pid):
                found.append(one)
    return tuple(sorted(found, key=lambda one: one.pid))
