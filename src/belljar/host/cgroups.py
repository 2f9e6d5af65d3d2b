"""Control groups, version 1 and 2, behind one interface.

A `Group` is one sandbox: made with its limits, joined by the launcher, read at the end, killed, removed. A sandbox that
is kept has a group for its life, with one inside for each of its commands: what a command leaves in memory stays
charged to the outer one. `detect` finds where groups can be made.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from belljar.core.request import Limits
from belljar.core.result import Usage
from belljar.core.values import MIB
from belljar.host.cgroup_limits import limit_rows

PREFIX = "belljar-"
_LEAF = "belljar.own"  # not PREFIX: nobody's sandbox
_CONTROLLERS = {1: ("memory", "pids", "cpu", "cpuacct", "blkio", "freezer"), 2: ("memory", "pids", "cpu", "io")}
RESERVE_BYTES = 32 * MIB  # that a command has however full its box is, so that a full one can be cleared
_NO_LIMIT = (9223372036854771712, 9223372036854710272, 9223372036854775807)  # bytes, by the size of a page
_LIMIT_OF = {"memory": "memory", "pids": "pids", "cpu": "cpus", "blkio": "io", "io": "io"}


class GroupTotals(NamedTuple):
    """What a group counted since it was made; None: the kernel does not count that here."""

    memory_peak: int | None  # bytes
    cpu_ms: float | None
    oom_kills: int
    forks_refused: int


class Group:
    """One sandbox's control group: one directory (version 2) or one for each controller (version 1)."""

    def __init__(self, version: int, dirs: Mapping[str, Path]) -> None:
        self.version = version
        self._dirs = dirs
        self.paths: tuple[Path, ...] = tuple(dict.fromkeys(dirs.values()))

    @property
    def join_files(self) -> tuple[Path, ...]:
        """The files that a process writes "0" to, to join the group.

        Moving a whole process takes a kernel-wide lock that costs a grace period (12 ms here); a single
        thread moving itself does not, and the launcher is one. Version 2 can only move whole processes.
        """
        return tuple(path / ("tasks" if self.version == 1 else "cgroup.procs") for path in self.paths)

    def limit(self, limits: Limits, device: str | None = None) -> None:
        """Sets the limits; `device` is the disk (`major:minor`) whose traffic is limited.

        Raises:
            OSError: the kernel refused a limit that is promised.
        """
        for controller, name, value in limit_rows(self.version, limits, device):
            self._set(controller, name, value)
        if self.version == 2 and "cpu" in self._dirs:
            # No group above can now lose the cpu controller while this one lives: systemd would take it away.
            with suppress(OSError):
                _write(f"{self._dirs['cpu']}/cgroup.subtree_control", "+cpu")

    def hold(self, memory: int) -> None:
        """Limits the memory of all groups inside together; a limit that there is already can be raised.

        A little more is allowed, so that a sandbox that is full can be cleared.

        Raises:
            OSError: the kernel refused it.
        """
        rows = [
            row for row in limit_rows(self.version, Limits(memory=memory + RESERVE_BYTES), None) if row[0] == "memory"
        ]
        # On version 1 memory may never have a higher limit than memory and swap: a new group is limited in this order,
        # one that has a limit in the other.
        is_new = self._number("memory", "memory.limit_in_bytes") in (None, *_NO_LIMIT)
        for controller, name, value in rows if is_new else reversed(rows):
            if name != "memory.oom.group":  # the command is to die, and not what keeps its files
                self._set(controller, name, value)

    def bound(self, limits: Limits) -> None:
        """Limits what all groups inside use together: memory as `hold` does, processors, and processes.

        Raises:
            OSError: the kernel refused it.
        """
        self.hold(limits.memory)
        for controller, name, value in limit_rows(self.version, limits, None):
            if controller == "cpu":
                self._set(controller, name, value)
        self.allow(limits.pids)

    def allow(self, pids: int) -> None:
        """Sets how many processes all groups inside may have together.

        Raises:
            OSError: the kernel refused it.
        """
        self._set("pids", "pids.max", str(pids))

    def freeze(self, seconds: float = 10.0) -> None:
        """Stops everything in it and in groups inside, until `thaw`.

        Raises:
            TimeoutError: a process could not be stopped in time; nothing is stopped then.
        """
        self._set_frozen(True)
        deadline = time.monotonic() + seconds
        while not self.is_frozen():
            if time.monotonic() > deadline:
                self.thaw()
                raise TimeoutError("a process of the sandbox could not be stopped")
            time.sleep(0.002)

    def thaw(self) -> None:
        """Lets what was stopped go on."""
        self._set_frozen(False)

    def is_frozen(self) -> bool:
        """Whether everything in it is stopped."""
        if self.version == 2:
            return self._table("memory", "cgroup.events").get("frozen") == 1
        return (self._text("freezer", "freezer.state") or "").strip() == "FROZEN"

    def _set_frozen(self, frozen: bool) -> None:
        if self.version == 2:
            self._set("memory", "cgroup.freeze", "1" if frozen else "0")
        else:
            self._set("freezer", "freezer.state", "FROZEN" if frozen else "THAWED")

    def inside(self, name: str, limits: Limits, device: str | None = None) -> Group:
        """Makes a group inside this one, with limits of its own.

        Raises:
            OSError: it could not be made, or could not be given its limits; then nothing of it is left.
        """
        group = Group(self.version, {controller: path / name for controller, path in self._dirs.items()})
        return group.made(limits, device)

    def made(self, limits: Limits | None, device: str | None = None) -> Group:
        """Makes its directories, sets its limits, and returns it. Without limits, it is one for groups inside.

        Raises:
            OSError: it could not be made, or could not be given its limits; then nothing of it is left.
        """
        try:
            for path in self.paths:
                os.mkdir(path)
            if limits:
                self.limit(limits, device)
            elif self.version == 2:
                _write(f"{self.paths[0]}/cgroup.subtree_control", " ".join(f"+{name}" for name in self._dirs))
        except BaseException:
            self.destroy()
            raise
        return self

    def usage(self) -> GroupTotals:
        """Reads what was counted since the group was made."""
        if self.version == 2:
            cpu = self._table("memory", "cpu.stat").get("usage_usec")  # there without the cpu controller too
            return GroupTotals(
                self._number("memory", "memory.peak"),
                None if cpu is None else cpu / 1000,
                self._table("memory", "memory.events").get("oom_kill", 0),
                self._table("pids", "pids.events").get("max", 0),
            )
        cpu_ns = self._number("cpuacct", "cpuacct.usage")
        return GroupTotals(
            self._number("memory", "memory.max_usage_in_bytes"),
            None if cpu_ns is None else cpu_ns / 1e6,
            self._table("memory", "memory.oom_control").get("oom_kill", 0),
            self._table("pids", "pids.events").get("max", 0),
        )

    def figures(self) -> Usage:
        """Reads what is used now. The page cache of files is not counted: it is given back when memory is wanted."""
        if self.version == 2:
            cpu, held = self._table("memory", "cpu.stat").get("usage_usec"), self._number("memory", "memory.current")
            milliseconds, prefix = None if cpu is None else cpu / 1000, ""
        else:
            cpu, held = self._number("cpuacct", "cpuacct.usage"), self._number("memory", "memory.usage_in_bytes")
            milliseconds, prefix = None if cpu is None else cpu / 1e6, "total_"
        if held is not None:
            stat = self._table("memory", "memory.stat")
            held = max(0, held - stat.get(f"{prefix}inactive_file", 0) - stat.get(f"{prefix}active_file", 0))
        read, written = self._disk()
        return Usage(milliseconds, held, disk_read=read, disk_write=written)

    def _set(self, controller: str, name: str, value: str) -> None:
        """Sets one limit, where there is its controller."""
        if (folder := self._dirs.get(controller)) is None:
            return
        try:
            _write(f"{folder}/{name}", value)
        except OSError:
            # Swap and socket accounting are missing on many kernels; any other limit is a promise.
            if not name.startswith(("memory.swap", "memory.memsw", "memory.kmem", "memory.oom.group")):
                raise

    def _disk(self) -> tuple[int | None, int | None]:
        """Bytes from and to all disks; unknown without the controller."""
        if (text := self._text("io", "io.stat")) is not None:  # "8:0 rbytes=1 wbytes=2 …"
            return _sum(r"\brbytes=(\d+)", text), _sum(r"\bwbytes=(\d+)", text)
        if (text := self._text("blkio", "blkio.throttle.io_service_bytes")) is not None:  # "8:0 Read 1"
            return _sum(r" Read (\d+)", text), _sum(r" Write (\d+)", text)
        return None, None

    def pids(self) -> list[int]:
        """Lists the processes in it and in groups inside. They join all directories or none: the first one tells."""
        found: list[int] = []
        for path in (self.paths[0], *_inner(self.paths[0])):
            with suppress(OSError):
                found += map(int, (path / "cgroup.procs").read_text().split())
        return found

    def is_empty(self) -> bool:
        """Whether it is known that nothing runs in it; a group that is gone is empty."""
        try:
            return not (self.paths[0] / "cgroup.procs").read_text().split()
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENODEV)  # the second: it went while it was read

    def kill(self) -> None:
        """Ends everything in the group; called until `pids` is empty, since a fork may race one pass."""
        with suppress(OSError):
            if self.version == 2 and (switch := self.paths[0] / "cgroup.kill").exists():
                switch.write_text("1")
                return
        is_frozen = "freezer" in self._dirs and (self._text("freezer", "freezer.state") or "").strip() != "THAWED"
        for pid in self.pids():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            if is_frozen:  # on version 1 it would not die as long as it is stopped
                with suppress(OSError):
                    _write(f"{self._outside(self._dirs['freezer'])}/tasks", str(pid))

    @staticmethod
    def _outside(folder: Path) -> Path:
        """The folder in which the outermost group of ours was made."""
        while folder.name.startswith(PREFIX) or folder.parent.name.startswith(PREFIX):
            folder = folder.parent
        return folder

    def remove(self) -> bool:
        """Removes the group; False: something in it has not died yet, and it is to be tried again."""
        gone = [_remove(path) or (all(map(_remove, _inner(path))) and _remove(path)) for path in self.paths]
        return all(gone)

    def destroy(self, seconds: float = 15.0) -> bool:
        """Kills all that is in it and removes it, trying for so many seconds; returns whether it is gone."""
        deadline = time.monotonic() + seconds
        while not self.remove():
            if time.monotonic() > deadline:
                return False
            self.kill()
            time.sleep(0.002)
        return True

    def _text(self, controller: str, name: str) -> str | None:
        with suppress(OSError, KeyError):
            return _read(f"{self._dirs[controller]}/{name}")
        return None

    def _number(self, controller: str, name: str) -> int | None:
        with suppress(OSError, ValueError, KeyError):
            return int(_read(f"{self._dirs[controller]}/{name}"))
        return None

    def _table(self, controller: str, name: str) -> dict[str, int]:
        with suppress(OSError, ValueError, KeyError):
            rows = (line.split() for line in _read(f"{self._dirs[controller]}/{name}").splitlines())
            return {row[0]: int(row[1]) for row in rows if len(row) == 2}
        return {}


class Cgroups:
    """The places where groups can be made on this host, as `detect` found them."""

    def __init__(self, version: int, bases: Mapping[str, Path], line: Sequence[Path] = ()) -> None:
        self.version = version
        self.bases = bases
        self._line = line  # version 2: the groups from the top down that hand controllers to ours

    @property
    def limits(self) -> frozenset[str]:
        """The limits that are really enforced: memory, pids, cpus, io."""
        return frozenset(_LIMIT_OF[name] for name in self.bases if name in _LIMIT_OF)

    def create(
        self, name: str, limits: Limits | None, device: str | None = None, *, freezer: bool = False
    ) -> Group:  # fmt: skip
        """Makes a group with its limits.

        Args:
            name: the owner's name, a dash, and what tells its groups apart.
            limits: of the sandbox; None: it is one for groups inside, to be limited by `hold`.
            device: the disk (`major:minor`) whose traffic is limited, if any.
            freezer: whether it may be stopped and go on.

        Raises:
            OSError: it could not be made, or could not be given its limits; then nothing of it is left.
        """
        try:
            return self._create(name, limits, device, freezer)
        except OSError:
            if not self._line:
                raise
            _hand_down(self._line)  # systemd takes back what none of its own units asked for
            return self._create(name, limits, device, freezer)

    def _create(self, name: str, limits: Limits | None, device: str | None, freezer: bool) -> Group:
        unused = {name for name, used in (("blkio", device), ("freezer", freezer)) if not used}
        bases = {kind: base for kind, base in self.bases.items() if kind not in unused}
        group = Group(self.version, {controller: base / (PREFIX + name) for controller, base in bases.items()})
        return group.made(limits, device)

    def orphans(self, is_dead: Callable[[str], bool]) -> list[Group]:
        """Lists the groups whose owner (the part of the name before the last dash) is dead."""
        found = {name for base in set(self.bases.values()) for name in _names(base) if name.startswith(PREFIX)}
        return [self._group(name) for name in sorted(found) if is_dead(name.removeprefix(PREFIX).rpartition("-")[0])]

    def _group(self, name: str) -> Group:
        return Group(self.version, {controller: base / name for controller, base in self.bases.items()})


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing if it is gone."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def detect(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Cgroups | str:
    """Finds where this process may make groups; returns a sentence saying why, if it may not."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError as error:
        return f"no control groups: {error}"
    if (root / "cgroup.controllers").exists():
        own = next((path for number, _, path in lines if number == "0"), "/")
        return _detect_v2(root, own)
    return _detect_v1(root, lines)


def _detect_v1(root: Path, lines: list[list[str]]) -> Cgroups | str:
    bases = {}
    for _, controllers, path in lines:
        for controller in controllers.split(","):
            base = root / controller / path.lstrip("/")
            if controller in _CONTROLLERS[1] and os.access(base, os.W_OK) and base.is_dir():
                bases[controller] = base
    if "memory" not in bases or "pids" not in bases:
        return "no right to make control groups (version 1 gives it to root only)"
    return Cgroups(1, bases)


def _detect_v2(root: Path, own: str) -> Cgroups | str:
    """Takes its own group if that may hand controllers down, else the nearest ancestor that may.

    If none may, our processes are moved out of the way into a leaf of our own group.
    """
    start = root / own.lstrip("/")
    line = [base for base in reversed((start, *start.parents)) if base.is_relative_to(root) and _is_ours(base)]
    if found := _nearest(line):
        return found
    if start in line and _make_room(start) and (found := _nearest(line)):
        return found
    return (
        "no control group was delegated to this process: start it with "
        "`systemd-run --user --scope -p Delegate=yes …`, or as root"
    )


def _is_ours(base: Path) -> bool:
    return os.access(base, os.W_OK) and os.access(base / "cgroup.procs", os.W_OK)


def _nearest(line: Sequence[Path]) -> Cgroups | None:
    _hand_down(line)
    for number, base in reversed(list(enumerate(line, 1))):
        given = set(_words(base / "cgroup.subtree_control")) & set(_words(base / "cgroup.controllers"))
        if {"memory", "pids"} <= given:
            return Cgroups(2, {name: base for name in _CONTROLLERS[2] if name in given}, line[:number])
    return None


def _hand_down(line: Sequence[Path]) -> None:
    """From the top: a group can hand down only what it was given, and systemd gives no cpu and no io unasked.

    Memory goes first, and without it nothing: a group that holds processes refuses it, but would take pids and
    cpu and turn into the root of a threaded tree, in which no process can enter any group below.
    """
    for base in line:
        given = _words(base / "cgroup.controllers")
        for controller in _CONTROLLERS[2]:
            with suppress(OSError):
                if controller in given and controller not in _words(base / "cgroup.subtree_control"):
                    (base / "cgroup.subtree_control").write_text(f"+{controller}")
            if "memory" not in _words(base / "cgroup.subtree_control"):
                break


def _make_room(base: Path) -> bool:
    """Moves a delegated group's processes (us among them) into a leaf of it, so that it may hand controllers down.

    So it is in a service with Delegate=yes and in a container, where all that is ours is the group we are in.
    """
    is_root = not (base / "cgroup.type").exists()
    if is_root or not {"memory", "pids"} <= set(_words(base / "cgroup.controllers")):
        return False
    leaf = base / _LEAF / "cgroup.procs"
    with suppress(OSError):
        for _ in range(10):  # one that forks meanwhile has its child still here
            pids = _words(base / "cgroup.procs")
            if not pids or "0" in pids:  # 0: of a pid namespace that we do not see
                return not pids
            leaf.parent.mkdir(exist_ok=True)
            for pid in pids:
                with suppress(ProcessLookupError):
                    leaf.write_text(pid)
    return False


def _inner(path: Path) -> list[Path]:
    with suppress(OSError), os.scandir(path) as entries:
        return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _remove(path: Path) -> bool:
    """Removes one directory; False: there is something in it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


# Plain system calls: these run a dozen times in every run, and pathlib would double its own cost.
def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def _sum(pattern: str, text: str) -> int:
    return sum(map(int, re.findall(pattern, text)))


def _words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().split()
    return []


def group_of(pid: int, name: str, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Group | None:
    """Finds the group that a container engine made for a process; None unless `name` is part of the group's name."""
    with suppress(OSError, ValueError):
        rows = [row.split(":", 2) for row in (proc / str(pid) / "cgroup").read_text().splitlines()]
        if (root / "cgroup.controllers").exists():
            found = {
                kind: root / path.lstrip("/") for number, _, path in rows if number == "0" for kind in _CONTROLLERS[2]
            }
            version = 2
        else:
            found = {kind: root / kind / path.lstrip("/") for _, kinds, path in rows for kind in kinds.split(",")}
            version = 1
        ours = {kind: path for kind, path in found.items() if name in str(path) and path.is_dir()}
        return Group(version, ours) if "memory" in ours else None
    return None
