"""Reads from /proc what processes use: where there is no control group, and what control groups do not count.

Everything is read as it is at this moment; a process that ends meanwhile counts for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path

from belljar.core.result import Usage
from belljar.host.cgroups import Group

_READERS = 64  # processes of one guest that are looked at one by one; a fork bomb must not cost us more


def children(pid: int) -> list[int]:
    """Lists the processes that a process started, from any of its threads."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """Lists the processes below a process, at any depth."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def family_of(roots: Set[int], among: Iterable[int]) -> list[int]:
    """Lists the processes that some others have started, at any depth, or that are of their sessions; not those."""
    parents = {pid: above for pid in among if pid not in roots and (above := _above(pid))}
    found = set(roots)
    while new := {pid for pid, above in parents.items() if pid not in found and found & above}:
        found |= new
    return sorted(found - roots)


def is_alive(pid: int) -> bool:
    """Whether a process has not ended, whoever still has to be told of that."""
    return bool(_above(pid))


def _above(pid: int) -> set[int]:
    """The parent of a process and the leader of its session; nothing for one that has ended."""
    with suppress(OSError, ValueError, IndexError):
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return set() if fields[0] in "ZX" else {int(fields[1]), int(fields[3])}
    return set()


def of_group(group: Group) -> Usage | None:
    """Reads what a group counts, and for disks that no controller watches, what its processes say; None: it is gone."""
    figures = group.figures()
    if figures.memory is None and figures.cpu_ms is None:
        return None
    if figures.disk_read is None:
        read, written = disk(group.pids())
        figures = figures._replace(disk_read=read, disk_write=written)
    return figures


def of_processes(pids: Sequence[int], memory: int | None = None) -> Usage | None:
    """Adds up what processes use, where there is no group.

    Args:
        pids: the processes.
        memory: their memory in bytes, if the caller knows better than the sum of their private pages.
    """
    if not pids or (used := cpu_ms(pids)) is None:
        return None
    read, written = disk(pids)
    return Usage(used, private_memory(pids) if memory is None else memory, disk_read=read, disk_write=written)


def network(pid: int, proc: str = "/proc") -> tuple[int | None, int | None]:
    """Reads bytes received and sent in a process's network namespace, loopback aside; None if the namespace is ours."""
    with suppress(OSError, ValueError, IndexError):
        if os.stat(f"{proc}/{pid}/ns/net").st_ino == os.stat(f"{proc}/self/ns/net").st_ino:
            return None, None
        rows = [line.split(":", 1) for line in _read(f"{proc}/{pid}/net/dev").splitlines()[2:]]
        counts = [row[1].split() for row in rows if row[0].strip() != "lo"]
        return sum(int(row[0]) for row in counts), sum(int(row[8]) for row in counts)
    return None, None


def disk(pids: Iterable[int]) -> tuple[int | None, int | None]:
    """Adds up bytes from and to disks by processes and by those of their children that have ended; None: unknown.

    One that may not be looked at makes the sum unknown: half of a figure is no figure.
    """
    read = written = seen = 0
    for pid in list(pids)[:_READERS]:
        try:
            rows = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
            read, written, seen = read + int(rows["read_bytes"]), written + int(rows["write_bytes"]), seen + 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except (OSError, ValueError, KeyError):
            return None, None
    return (read, written) if seen else (None, None)


def cpu_ms(pids: Iterable[int]) -> float | None:
    """Adds up the CPU time of processes and of those of their children that have ended."""
    ticks, seen = 0, False
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            ticks, seen = ticks + sum(map(int, fields[11:15])), True
    return ticks * 1000 / os.sysconf("SC_CLK_TCK") if seen else None


def private_memory(pids: Iterable[int]) -> int:
    """Adds up the bytes of memory that processes share with no file."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            fields = _read(f"/proc/{pid}/statm").split()
            total += max(0, int(fields[1]) - int(fields[2]))
    return total * os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    return Path(path).read_text()
