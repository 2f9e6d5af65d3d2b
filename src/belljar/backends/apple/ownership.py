"""Whose virtual machines these are. An owner is a process that holds a lock on a file; the file's name is a label.

The kernel drops the lock with the process, on every system that has locks, so anyone who shares the state directory
can tell a dead owner from a living one. Machines of another state directory are none of our business.
"""

from __future__ import annotations

import atexit
import os
import secrets
from contextlib import suppress
from pathlib import Path

_SUFFIX = ".apple"


class MachineOwner:
    """This process as an owner."""

    def __init__(self, state_dir: Path) -> None:
        self.pid: int = os.getpid()
        self._record = state_dir / f"{self.pid}-{secrets.token_hex(6)}{_SUFFIX}"
        self._fd = os.open(self._record, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _lock(self._fd)
        atexit.register(self.resign)

    @property
    def name(self) -> str:
        return str(self._record)

    def resign(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0 and os.getpid() == self.pid:
            self._record.unlink(missing_ok=True)
            os.close(fd)


def is_dead(name: str, state_dir: Path) -> bool:
    """Whether an owner of this state directory is gone; of any other nothing can be said."""
    path = Path(name)
    if path.parent != state_dir or path.suffix != _SUFFIX:
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # it resigned, and what it had should be gone
    except OSError:
        return False
    try:
        _lock(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def forget_dead(state_dir: Path) -> None:
    """Removes the records of owners that died without resigning."""
    for path in state_dir.glob(f"*{_SUFFIX}"):
        if is_dead(str(path), state_dir):
            with suppress(OSError):
                path.unlink()


def _lock(fd: int) -> None:
    import fcntl  # not on Windows, where this module need only be importable

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
