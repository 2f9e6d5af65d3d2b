"""Says which process owns which sandbox, so that those of a killed Belljar can be found and removed.

An owner is a process that opens sandboxes. Its name (pid namespace, pid, start time) is part of the name
of each of its control groups, so anyone can tell whether it still lives. A uid is claimed by binding an
abstract socket, which the kernel drops with the process.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import socket
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from belljar.core import errors
from belljar.core.settings import PRIVATE_UIDS
from belljar.host import cgroups

PLACES: tuple[str, ...] = (
    "workspace",
    "tmp",
    "machine",
)  # folders where each box mounts its own writable space, unseen by all others


class Owner:
    """This process as an owner of sandboxes. A file says where its control groups are, for a later cleanup."""

    def __init__(self, state_dir: Path, groups: cgroups.Cgroups | None) -> None:
        self.pid: int = os.getpid()
        self.name: str = name_of(self.pid)
        self._numbers = count(1)
        self._record = state_dir / f"{self.name}.owner"
        where = {"version": groups.version, "bases": {k: str(v) for k, v in groups.bases.items()}} if groups else {}
        self._record.write_text(json.dumps(where))
        atexit.register(self.resign)

    def next_name(self) -> str:
        """Returns a name for one more sandbox of this owner."""
        # Two backends of one process are one owner, and must not take the same name.
        return f"{self.name}-{next(self._numbers)}.{random.randbytes(3).hex()}"

    def resign(self) -> None:
        """Removes its file: nothing of this process is left to clean up."""
        if os.getpid() == self.pid:
            self._record.unlink(missing_ok=True)


def name_of(pid: int) -> str:
    """Returns the name of a process as an owner, which no other process ever has."""
    return f"{_namespace()}.{pid}.{_started(pid)}"


def is_dead(name: str) -> bool:
    """Whether an owner is gone. One of another pid namespace cannot be judged from here, and is left alone."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != _namespace():
        return False
    return _started(int(parts[1])) != parts[2]


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _started(pid: int) -> str:
    """When a process started, in ticks since boot: with its pid, a name nobody else ever has."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def prepare(state_dir: Path) -> None:
    """Makes the state directory, or refuses one that somebody else could have prepared for us."""
    try:
        state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        facts = state_dir.lstat()
    except OSError as error:
        raise errors.StartFailed(f"the state directory {state_dir} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise errors.StartFailed(
            f"the state directory {state_dir} is not ours alone",
            fix="remove it, or set BELLJAR_STATE_DIR to a private directory",
        )
    for name in PLACES:
        with suppress(FileExistsError):
            (state_dir / name).mkdir(mode=0o755)


def reap(state_dir: Path, groups: cgroups.Cgroups | None) -> int:
    """Ends and removes what dead owners left; returns how many sandboxes that were."""
    trees = [groups] if groups else []
    records = [path for path in state_dir.iterdir() if path.suffix == ".owner" and is_dead(path.stem)]
    for record in records:
        with suppress(OSError, ValueError, KeyError):
            where = json.loads(record.read_text())
            trees.append(cgroups.Cgroups(where["version"], {k: Path(v) for k, v in where["bases"].items()}))
    removed = sum(group.destroy() for tree in trees for group in tree.orphans(is_dead))
    for record in records:
        record.unlink(missing_ok=True)
    return removed


def private_uids(first: int, mapping: Path = Path("/proc/self/uid_map"), *, most: int = PRIVATE_UIDS) -> range:
    """Returns the uids to run guests as: the private range or, in a container that maps only some, the last it maps.

    Empty where root is the only one there is; then a guest keeps our uid, behind its own user namespace.
    """
    rows = [[int(number) for number in line.split()] for line in mapping.read_text().splitlines()]
    mapped = [range(inside, inside + count) for inside, _, count in rows]
    if any(first in uids and first + most - 1 in uids for uids in mapped):
        return range(first, first + most)
    last = mapped[-1]
    return last[-min(4096, len(last) // 2) :] if len(last) > 1 else range(0)


def claim_uid(uids: range) -> tuple[int, socket.socket]:
    """Claims a uid of the private range that no other sandbox on this host is using.

    A range of one is an administrator's word that all sandboxes share it: then there is nothing to claim.

    Returns:
        The uid, and the socket that is the claim: closing it gives the uid back.

    Raises:
        StartFailed: all are in use.
    """
    if len(uids) == 1:
        return uids[0], socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    start = random.randrange(len(uids))
    for step in range(len(uids)):
        uid = uids[(start + step) % len(uids)]
        if claim := _claimed(uid):
            return uid, claim
    raise errors.StartFailed(f"all {len(uids)} uids from {uids[0]} on are in use")


def claim_again(uid: int, uids: range) -> socket.socket:
    """Claims the uid of a sandbox that goes on though the process that had claimed it has ended.

    Raises:
        StartFailed: another sandbox has it by now.
    """
    if len(uids) == 1 or uid not in uids:  # it was not claimed: all share it, or it is a granted folder's
        return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if claim := _claimed(uid):
        return claim
    raise errors.StartFailed(f"another sandbox has the uid {uid} by now")


def _claimed(uid: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0belljar-uid-{uid}")
    except OSError:
        claim.close()
        return None
    return claim
