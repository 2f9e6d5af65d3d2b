"""How much memory is left, for the host and for the control group that we are in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NAMES = {  # version -> limit, usage, and which line of memory.stat is cache that the kernel gives back when asked
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes; None where the kernel does not say."""
    found = [left for left in (_of_host(proc), *_of_groups(proc, root)) if left is not None]
    return max(0, min(found)) if found else None


def _of_host(proc: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_groups(proc: Path, root: Path) -> Iterator[int | None]:
    """Our own group's and that of each above it: the tightest counts."""
    version, base = (2, root) if (root / "cgroup.controllers").exists() else (1, root / "memory")
    group = base / _membership(proc, version).lstrip("/")
    for folder in (group, *group.parents):  # in a container the path may be the host's; its own group is then the base
        if folder.is_relative_to(base):
            yield _of_group(folder, *_NAMES[version])


def _membership(proc: Path, version: int) -> str:
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if (number == "0" if version == 2 else "memory" in controllers.split(",")) and ".." not in path:
                return path
    return ""


def _of_group(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    with suppress(OSError, ValueError):  # no limit is written "max", or is the largest number there is
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        return most - used + _stat(folder, cache)
    return None


def _stat(folder: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
