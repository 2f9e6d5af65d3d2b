"""Lists the processes of a living sandbox, by the kernel's word from outside."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from belljar.core.display import neutralise
from belljar.core.process import BoxProcess
from belljar.host import procfs

_COMMAND_BYTES = 4096
_MOST = 10_000  # processes that are listed


def members(holder: int) -> list[int]:
    """Lists the pids of all processes in the machine of this first process, those that are ours among them."""
    wanted = _namespace(holder, "pid")
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _namespace(int(name), "pid") == wanted]


def processes(holder: int, bubblewrap: str) -> tuple[BoxProcess, ...]:
    """Describes what runs in a machine, without what is ours.

    That is what is not in a user namespace of a guest's, and bubblewrap while it is about to become a guest's command.
    """
    found = []
    for pid in _guests(holder, bubblewrap):
        with suppress(OSError, ValueError, IndexError, KeyError):
            if one := _describe(pid):
                found.append(one)
    return tuple(sorted(found, key=lambda one: one.pid))


def largest(holder: int, bubblewrap: str) -> int | None:
    """Returns the guest's process that takes the most memory, as the host numbers it; None: there is none."""
    return max(_guests(holder, bubblewrap), key=lambda pid: procfs.private_memory((pid,)), default=None)


def _guests(holder: int, bubblewrap: str) -> list[int]:
    ours, program = _namespace(holder, "user"), os.path.realpath(bubblewrap)
    return [
        pid
        for pid in members(holder)[:_MOST]
        if _namespace(pid, "user") not in ("", ours) and _link(pid, "exe") != program
    ]


def _describe(pid: int) -> BoxProcess | None:
    """None: it has ended, and only its number is left."""
    status = dict(line.split(":", 1) for line in _read(pid, "status").splitlines() if ":" in line)
    name, _, rest = _read(pid, "stat").partition("(")[2].rpartition(")")
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    ticks, pages = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    with Path(f"/proc/{pid}/cmdline").open("rb") as file:
        line = file.read(_COMMAND_BYTES).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    return BoxProcess(
        pid=int(status["NSpid"].split()[-1]), parent=_parent(int(fields[1]), pid),
        command=neutralise(line or f"[{name}]"),
        started=time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(fields[19]) / ticks,
        cpu_ms=(int(fields[11]) + int(fields[12])) * 1000 / ticks, memory=int(_read(pid, "statm").split()[1]) * pages,
    )  # fmt: skip


def _parent(pid: int, child: int) -> int:
    """The number of the parent inside; 0 for one that is outside, or in another namespace."""
    if _namespace(pid, "pid") != _namespace(child, "pid"):
        return 0
    with suppress(OSError, ValueError, IndexError, KeyError):
        rows = dict(line.split(":", 1) for line in _read(pid, "status").splitlines() if ":" in line)
        return int(rows["NSpid"].split()[-1])
    return 0


def _namespace(pid: int, kind: str) -> str:
    return _link(pid, f"ns/{kind}")


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
