"""Which servers are alive: each holds a lock on a file of its own, which the kernel drops with the process."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from belljar.protocol.records import new_id


class ServerInstance:
    """This server. Others that share the folder can tell whether it lives, whatever pid namespace they are in."""

    def __init__(self, data_dir: Path) -> None:
        self.name: str = new_id("server")
        self._folder = data_dir / "servers"
        self._fd = -1
        self.owes = False  # the end of a run is not in the records: the next start has to find us dead

    def __enter__(self) -> Self:
        self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents that are made get another mode
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._fd = os.open(self._folder / self.name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.owes:
            (self._folder / self.name).unlink(missing_ok=True)
        os.close(self._fd)

    def is_dead(self, name: str) -> bool:
        """One that signed in here and has let go of its lock; one of another machine cannot be judged from here."""
        if name == self.name or "/" in name:
            return False
        try:
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def clear(self) -> int:
        """Forgets the dead, once their runs are seen to; returns how many they were."""
        dead = [path for path in self._folder.iterdir() if self.is_dead(path.name)]
        for path in dead:
            with suppress(OSError):
                path.unlink()
        return len(dead)
