"""Describes processes of a sandbox by the kernel's word, from outside: with the numbers that they have inside."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from belljar.core.display import neutralise
from belljar.core.process import BoxProcess

_COMMAND_BYTES = 4096


def described(pid: int) -> BoxProcess | None:
    """Describes a process; None: it has ended, and only its number is left.

    Raises:
        OSError, ValueError, IndexError, KeyError: it is gone, or going.
    """
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
    if namespace(pid, "pid") != namespace(child, "pid"):
        return 0
    return number_inside(pid)


def number_inside(pid: int) -> int:
    """Returns the number of a process in the innermost PID namespace that it is in; 0: it has ended."""
    with suppress(OSError, ValueError, IndexError, KeyError):
        rows = dict(line.split(":", 1) for line in _read(pid, "status").splitlines() if ":" in line)
        return int(rows["NSpid"].split()[-1])
    return 0


def namespace(pid: int, kind: str) -> str:
    """Names the namespace of a kind that a process is in; empty: it is gone, or not ours to see."""
    return link(pid, f"ns/{kind}")


def link(pid: int, name: str) -> str:
    """Tells where a link of a process leads; empty: it is gone, or not ours to see."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
