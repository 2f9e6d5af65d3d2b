"""Small files that one process of a user leaves for the next: believed only if nobody else could have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Makes the folder; raises OSError where it is not ours alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} is not ours alone")


def read(path: Path, most: int) -> bytes:
    """Reads a file of at most `most` bytes; raises OSError or ValueError where it is missing, or not ours alone."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
        if not ours or facts.st_nlink != 1 or facts.st_size > most:
            raise ValueError(f"{path} is not ours alone")
        return file.read(most)


def write(path: Path, data: bytes) -> None:
    """Writes it whole or not at all: two processes may keep the same at once."""
    draft = path.with_suffix(f".{os.getpid()}.draft")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
