"""Who owns what on this host: so that a Belljar that was killed can be told from one that is alive.

Every process that opens sandboxes holds a locked file in the state directory; the kernel drops the lock
with the process. A uid is claimed by binding an abstract socket, which the kernel drops likewise.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import random
import socket
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from belljar import errors
from belljar.backends import cgroups

UIDS = 65_536


class Owner:
    """This process as an owner of sandboxes."""

    def __init__(self, state_dir: Path, groups: cgroups.Cgroups | None) -> None:
        self.pid = os.getpid()
        self.name = f"{self.pid}.{random.randbytes(4).hex()}"
        self._numbers = count(1)
        self._lock = state_dir / f"{self.name}.lock"
        bases = {"version": groups.version, "bases": {k: str(v) for k, v in groups.bases.items()}} if groups else {}
        # Locked before it has its final name, so that nobody ever sees it unlocked while we live.
        draft = state_dir / f"{self.name}.new"
        self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, json.dumps(bases).encode())
        draft.rename(self._lock)
        atexit.register(self.resign)

    def next_name(self) -> str:
        return f"{self.name}-{next(self._numbers)}"

    def resign(self) -> None:
        if os.getpid() == self.pid:
            with suppress(OSError):
                self._lock.unlink()
            with suppress(OSError):
                os.close(self._fd)


def prepare(state_dir: Path) -> None:
    """Makes the state directory, or refuses one that somebody else could have prepared for us."""
    try:
        state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        info = state_dir.lstat()
    except OSError as error:
        raise errors.StartFailed(f"the state directory {state_dir} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise errors.StartFailed(
            f"the state directory {state_dir} is not ours alone",
            fix="remove it, or set BELLJAR_STATE_DIR to a private directory",
        )
    for name in ("workspace", "tmp"):  # where each box mounts its own writable space, unseen by all others
        with suppress(FileExistsError):
            (state_dir / name).mkdir(mode=0o755)


def reap(state_dir: Path, groups: cgroups.Cgroups | None) -> int:
    """Ends and removes what dead owners left; returns how many sandboxes that were."""
    alive: set[str] = set()
    dead: list[tuple[Path, dict[str, str], int]] = []
    for lock in [*state_dir.glob("*.lock"), *state_dir.glob("*.new")]:
        with suppress(OSError):
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                record = json.loads(os.read(fd, 1 << 16) or b"{}")
                dead.append((lock, record.get("bases", {}), record.get("version", 0)))
            except BlockingIOError:
                alive.add(lock.stem)
            except ValueError:
                dead.append((lock, {}, 0))
            finally:
                os.close(fd)
    trees = [cgroups.Cgroups(version, {k: Path(v) for k, v in bases.items()}) for _, bases, version in dead if bases]
    trees += [groups] if groups else []
    orphans = [group for tree in trees for group in tree.orphans(alive)]
    removed = sum(group.destroy() for group in orphans)
    for lock, _, _ in dead:
        lock.unlink(missing_ok=True)
    return removed


def private_uids(first: int, mapping: Path = Path("/proc/self/uid_map")) -> range:
    """The uids to run guests as: the private range or, in a container that maps only some, the last it maps.

    Empty where root is the only one there is; then a guest keeps our uid, behind its own user namespace.
    """
    rows = [[int(number) for number in line.split()] for line in mapping.read_text().splitlines()]
    mapped = [range(inside, inside + count) for inside, _, count in rows]
    if any(first in uids and first + UIDS - 1 in uids for uids in mapped):
        return range(first, first + UIDS)
    last = mapped[-1]
    return last[-min(4096, len(last) // 2) :] if len(last) > 1 else range(0)


def claim_uid(uids: range) -> tuple[int, socket.socket]:
    """A uid of the private range that no other sandbox on this host is using, and the claim to close."""
    start = random.randrange(len(uids))
    for step in range(len(uids)):
        uid = uids[(start + step) % len(uids)]
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0belljar-uid-{uid}")
        except OSError:
            claim.close()
            continue
        return uid, claim
    raise errors.StartFailed(f"all {len(uids)} uids from {uids[0]} on are in use")
