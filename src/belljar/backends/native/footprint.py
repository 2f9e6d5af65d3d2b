"""How much memory a guest holds, added up from /proc: for hosts where no control group counts it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.host import procfs

_INODE_BYTES = 1024  # what an empty file costs the kernel, about


def footprint(monitor: int, folders: Sequence[str], limit: int) -> int:
    """Adds up private memory of the guest's processes, its files in memory, and what waits in its sockets.

    The monitor's child is the init, whose root is still the host's while it builds the jail; what it
    forks is the guest, inside.

    Args:
        monitor: the pid of bubblewrap on the host.
        folders: the guest's folders that are kept in memory, such as "tmp".
        limit: a sum above this is counted again, more exactly, before it is returned.

    Returns:
        The bytes.
    """
    guests = [pid for init in procfs.children(monitor) for pid in procfs.descendants(init)]
    total = procfs.private_memory(guests)
    if total > limit and len(guests) > 1:  # forked processes share most pages: ask again, dearly and exactly
        total = sum(map(_fair_share, guests))
    for guest in guests[:1]:
        total += held_in_folders(f"/proc/{guest}/root/{folder}" for folder in folders)
        if _has_sockets(f"/proc/{guest}/net/sockstat"):
            total += sum(_in_sockets(f"/proc/{guest}/net/{kind}") for kind in ("tcp", "tcp6"))
    return total


def _fair_share(pid: int) -> int:
    """Private memory, and of shared pages one part for each process that shares them."""
    with suppress(OSError):
        rows = re.findall(r"^Pss_Anon:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return sum(map(int, rows)) * 1024
    return 0


def held_in_folders(paths: Iterable[str]) -> int:
    """Adds up the bytes that folders in memory take, each the root of its file system."""
    return sum(map(_in_folder, paths))


def _in_folder(path: str) -> int:
    with suppress(OSError):
        space = os.statvfs(path)
        return (space.f_blocks - space.f_bfree) * space.f_frsize + (space.f_files - space.f_ffree) * _INODE_BYTES
    return 0


def _has_sockets(path: str) -> bool:
    """Listing connections takes milliseconds, so it is done only for a guest that has more than a few."""
    with suppress(OSError):
        return any(int(n) > 8 for n in re.findall(r"TCP6?: inuse (\d+)", Path(path).read_text()))
    return False


def _in_sockets(path: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        queues = [line.split()[4].split(":") for line in Path(path).read_text().splitlines()[1:]]
        return sum(int(sent, 16) + int(received, 16) for sent, received in queues)
    return 0
