"""What tests look at on the host: what sandboxes leave behind, who is whose child, and whether something comes true."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belljar.host import cgroups, ownership


@contextmanager
def counting() -> Iterator[None]:
    """No two tests count leftovers, or kill a Belljar, at the same time, in whatever process they are.

    What a killed Belljar leaves does not say which test killed it.
    """
    with (Path(tempfile.gettempdir()) / "belljar-tests-counting.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Traces:
    """All that sandboxes of one test can leave on the host, found by a word that only they contain."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.word = f"trace{uuid.uuid4().hex[:12]}"
        self._before: set[str] = set()
        self._before = set(self.groups())  # workers that earlier tests left idle, on purpose

    def processes(self) -> list[int]:
        found, words = [], (self.word.encode(), os.fsencode(self.state_dir))
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    line = file.read()
            except OSError:
                continue
            if any(word in line for word in words) and int(name) != os.getpid():
                found.append(int(name))
        return found

    def groups(self) -> list[str]:
        """Control groups of this process and of dead ones; those of other living Belljars are none of our business."""
        tree = cgroups.detect()
        if isinstance(tree, str):
            return []
        mine = f"{cgroups.PREFIX}{ownership._namespace()}.{os.getpid()}."
        names = {path.name for base in set(tree.bases.values()) for path in base.glob(f"{cgroups.PREFIX}*")}
        dead = {path.name for group in tree.orphans(ownership.is_dead) for path in group.paths}
        return [name for name in names - self._before if name.startswith(mine) or name in dead]

    def mounts(self) -> list[str]:
        """Mounts with our name, except those in folders of tests that run beside this one."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line for line in lines if "belljar" in line and ("belljar-test-" not in line or self._is_mine(line))]

    def _is_mine(self, line: str) -> bool:
        return str(self.state_dir.parent) in line

    def files(self) -> list[str]:
        if not self.state_dir.exists():
            return []
        expected = {
            *ownership.PLACES,
            f"{ownership._namespace()}.{os.getpid()}.{ownership._started(os.getpid())}.owner",
        }
        return [path.name for path in self.state_dir.rglob("*") if path.name not in expected]

    def all(self) -> dict[str, list[object]]:
        found = {"processes": self.processes(), "groups": self.groups(), "mounts": self.mounts(), "files": self.files()}
        return {kind: list(what) for kind, what in found.items() if what}


def descendants(root: int) -> set[int]:
    """Every process below one, dead ones that nobody waited for included."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if stat:
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> object:
    """Polls until the condition holds; returns its last value, for an assertion that can show it.

    A look may read all of /proc: it is taken less often the longer it takes, and leaves the core to what it waits for.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if (value := condition()) or began > deadline:
            return value
        time.sleep(min(0.5, max(0.01, 3 * (time.monotonic() - began))))


def interpreter_for(uid: int, what: str) -> str:
    """A Python of our version that a user without rights may run, or a loud skip."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            subprocess.run([python, "-c", ""], user=uid, group=uid, extra_groups=[], cwd="/", check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    pytest.skip(f"NOTHING of {what} was checked: install Python 3.{sys.version_info.minor} system-wide")


def give(owner: int, *paths: Path) -> None:
    """Gives files to a user; a loud skip where only root could."""
    if os.geteuid() not in (0, owner):
        pytest.skip("only root can give files away: run the tests as root")
    for path in paths:
        os.chown(path, owner, owner)
