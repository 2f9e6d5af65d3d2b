"""Reads and writes a file of a box as its guest would: with the guest's rights, and with the errors it would get.

The guest may swap anything at any moment: folders are opened one name at a time, no link is followed, and nothing but a
regular file is read or replaced. A pipe that nobody writes to blocks nobody.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import anyio.to_thread

from belljar.core.plan import FIGURES
from belljar.core.result import Collected, File
from belljar.core.values import MIB
from belljar.host import files

CHUNK_BYTES = MIB
_MAX_FIGURES = 64
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def figures(tmp: int, limit: int, *, owner: int | None = None) -> Collected:
    """Reads the pictures that a program left below /tmp, in the order in which they were drawn.

    Args:
        tmp: the guest's /tmp.
        limit: bytes in all; what is over it is named in `left_out`.
        owner: with whose rights, if not with ours.
    """
    try:
        with files.below(tmp, FIGURES) as folder:
            return files.collect(folder, ("*.png",), owner=owner, most=_MAX_FIGURES, limit=limit)
    except OSError:  # it drew nothing, or put something else in its place
        return Collected(())


def put(root: int, given: Sequence[File], *, owner: int | None = None) -> None:
    """Writes files below an open folder; one that was there keeps its permissions, and one that is read-only stays.

    Args:
        root: the folder.
        given: the files.
        owner: with whose rights, if not with ours.

    Raises:
        OSError: as the guest would get it: PermissionError, IsADirectoryError, NotADirectoryError, no space left.
    """
    with files.acting_as(owner):
        for file in given:
            *folders, name = file.path.split("/")
            with _named(file.path), files.descended(root, folders, make=True) as folder:
                _put(folder, name, file)


def _put(folder: int, name: str, file: File) -> None:
    put_one(folder, name, file.content, mode=None, executable=file.executable)


def put_one(folder: int, name: str, content: bytes, *, mode: int | None, executable: bool = False) -> None:
    """Writes a file whole or not at all; one of several names in place, so that they stay names of one file.

    Args:
        folder: the open folder that holds it.
        name: of the file.
        content: its bytes.
        mode: its permissions; None: those that it has, and of a new one the usual.
        executable: whether it can be run by all who may read it, where there is no `mode`.
    """
    try:
        fd = _open_regular(folder, name, os.O_WRONLY)
    except FileNotFoundError:
        usual = 0o755 if executable else 0o644
        files.replace(folder, name, content, mode=usual if mode is None else mode, exactly=mode is not None)
        return
    try:
        facts = os.fstat(fd)
        wanted = _mode(facts, executable) if mode is None else mode
        if facts.st_nlink > 1:
            _overwrite(fd, content)
            if wanted != stat.S_IMODE(facts.st_mode):
                os.fchmod(fd, wanted)
            return
    finally:
        os.close(fd)
    files.replace(folder, name, content, mode=wanted, exactly=True)


def _overwrite(fd: int, content: bytes) -> None:
    """Puts other content into an open file. What goes wrong on the way, such as a full disk, leaves it half written."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.ftruncate(fd, len(content))


def open_file(root: int, path: str, *, owner: int | None = None, named: str = "") -> int:
    """Opens a regular file below an open folder for reading, and returns its descriptor.

    Raises:
        OSError: as the guest would get it: FileNotFoundError, PermissionError, IsADirectoryError; ELOOP for a link.
    """
    *folders, name = path.split("/")
    with files.acting_as(owner), _named(named or path), files.descended(root, folders) as folder:
        return _open_regular(folder, name, os.O_RDONLY)


@asynccontextmanager
async def reading(
    root: int, path: str, *, owner: int | None = None, named: str = ""
) -> AsyncIterator[AsyncIterator[bytes]]:  # fmt: skip
    """Opens a file as `open_file` does, and gives its content piece by piece. Errors call it as `named` does."""
    fd = await anyio.to_thread.run_sync(lambda: open_file(root, path, owner=owner, named=named))
    try:
        yield _pieces(fd)
    finally:
        os.close(fd)


async def _pieces(fd: int) -> AsyncIterator[bytes]:
    while piece := await anyio.to_thread.run_sync(os.read, fd, CHUNK_BYTES):
        yield piece


def _mode(facts: os.stat_result, executable: bool) -> int:
    """The permissions for what replaces a file: those that it has."""
    mode = stat.S_IMODE(facts.st_mode) & 0o777
    return mode | ((mode & 0o444) >> 2 if executable else 0)


def _open_regular(folder: int, name: str, flags: int) -> int:
    fd = os.open(name, flags | _CAREFULLY, dir_fd=folder)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, f"{files.kind(mode)}, not a regular file")


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors name the file as the caller did."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
