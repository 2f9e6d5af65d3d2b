"""Packs files of a box into a tar archive, lays those of an archive down in it, and copies trees within it.

Both the box and the archive are hostile: no link is followed, and nothing but files, folders and links is taken.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import IO, Self

from belljar.core.values import MIB
from belljar.host import files

PIECE_BYTES = MIB
MAX_DEPTH = 256  # folders in each other
_BLOCK = tarfile.BLOCKSIZE
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_EXTENSIONS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_MOST_EXTENSION_BYTES = MIB  # of a header that tells more of the next one

Above = Callable[[str], AbstractContextManager[tuple[int, str]]]  # opens the folder that holds a path, for a change


def packed(folder: int, name: str, path: str) -> Iterator[bytes]:
    """Gives the archive's blocks for one entry and all below it.

    Args:
        folder: the open folder that holds it.
        name: its name there.
        path: its name in the archive.

    Raises:
        OSError: it cannot be read, or is too deep.
    """
    yield from _packed(folder, name, path, 0)


def _packed(folder: int, name: str, path: str, depth: int) -> Iterator[bytes]:
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISREG(facts.st_mode):
        yield from _file(folder, name, path)
    elif stat.S_ISLNK(facts.st_mode):
        with suppress(OSError):  # it is gone, or no link any more
            yield _header(path, facts, tarfile.SYMTYPE, link=os.readlink(name, dir_fd=folder))
    elif stat.S_ISDIR(facts.st_mode):
        if depth >= MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} folders in each other", path)
        yield _header(path, facts, tarfile.DIRTYPE)
        with files.descended(folder, [name]) as inner:
            for entry in sorted(os.listdir(inner)):
                with suppress(FileNotFoundError):
                    yield from _packed(inner, entry, f"{path}/{entry}", depth + 1)


def _file(folder: int, name: str, path: str) -> Iterator[bytes]:
    fd = os.open(name, _OPEN, dir_fd=folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return
        yield _header(path, facts, tarfile.REGTYPE, size=facts.st_size)
        left = facts.st_size
        while left > 0:
            piece = os.read(fd, min(left, PIECE_BYTES)) or bytes(min(left, PIECE_BYTES))  # it became shorter meanwhile
            left -= len(piece)
            yield piece
        yield bytes(-facts.st_size % _BLOCK)
    finally:
        os.close(fd)


def _header(path: str, facts: os.stat_result, kind: bytes, *, size: int = 0, link: str = "") -> bytes:
    entry = tarfile.TarInfo(path)
    entry.type, entry.size, entry.linkname = kind, size, link
    entry.mode, entry.mtime = stat.S_IMODE(facts.st_mode), facts.st_mtime
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


class _PieceFile(io.RawIOBase):
    """A file whose content comes piece by piece."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._rest:
            self._rest = self._more()
            if not self._rest:
                return b""
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


class _BoundedEntry(tarfile.TarInfo):
    """An entry that cannot have us hold an unlimited name."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in _EXTENSIONS and entry.size > _MOST_EXTENSION_BYTES:
            raise tarfile.ReadError("a name is too long")
        return entry


def unpack(folder: str, more: Callable[[], bytes], above: Above) -> None:
    """Lays the entries of an archive below a folder.

    Args:
        folder: its whole path.
        more: gives the next piece of the archive; empty at its end.
        above: opens the folder that holds a whole path.

    Raises:
        ValueError: it is no archive, or an entry leads out of the folder or is no file, folder or link.
        OSError: what the guest would get.
    """
    folders: list[tuple[str, tarfile.TarInfo]] = []
    source: IO[bytes] = _PieceFile(more)  # type: ignore[assignment]
    try:
        with tarfile.open(fileobj=source, mode="r|", tarinfo=_BoundedEntry, encoding="utf-8") as archive:
            for entry in archive:
                path = _target(folder, entry.name)
                with above(path) as (parent, name):
                    if name:
                        _lay(archive, entry, folder, parent, name, above)
                if entry.isdir():
                    folders.append((path, entry))
    except (tarfile.TarError, RecursionError, OverflowError) as error:  # headers without end, and times beyond all
        raise ValueError(f"not an archive that can be unpacked: {error}") from None
    while more():  # what comes after the archive's end
        pass
    for path, entry in reversed(folders):  # only now: what was laid into them has changed their times
        _finish(path, entry, above)


def _target(folder: str, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"the archive's entry {name!r} leads out of the folder")
    return "/".join([folder.rstrip("/"), *parts])


def _lay(archive: tarfile.TarFile, entry: tarfile.TarInfo, root: str, parent: int, name: str, above: Above) -> None:
    if entry.isdir():
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
        return
    if not (entry.isreg() or entry.issym() or entry.islnk()):
        raise ValueError(f"the archive's entry {entry.name!r} is no file, folder or link")
    draft = f".belljar-{os.urandom(6).hex()}"
    try:
        if entry.issym():
            os.symlink(entry.linkname, draft, dir_fd=parent)
        elif entry.islnk():
            with above(_target(root, entry.linkname)) as (folder, first):
                os.link(first, draft, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        else:
            _write(archive, entry, parent, draft)
        _take_place(draft, name, parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=parent)
        raise


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, parent: int, draft: str) -> None:
    content = archive.extractfile(entry)
    fd = os.open(draft, _NEW, 0o600, dir_fd=parent)
    try:
        while content and (piece := memoryview(content.read(PIECE_BYTES))):
            while piece:
                piece = piece[os.write(fd, piece) :]
        os.fchmod(fd, entry.mode & 0o777)
        os.utime(fd, (entry.mtime, entry.mtime))
    finally:
        os.close(fd)


def _take_place(draft: str, name: str, parent: int) -> None:
    """Renames over what was there; an empty folder gives way."""
    with suppress(NotADirectoryError, FileNotFoundError):
        os.rmdir(name, dir_fd=parent)
    os.rename(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
    with suppress(OSError):  # of the same file: then the rename has done nothing
        os.unlink(draft, dir_fd=parent)


def _finish(path: str, entry: tarfile.TarInfo, above: Above) -> None:
    with suppress(OSError, OverflowError, ValueError), above(path) as (parent, name):
        if name:
            with files.descended(parent, [name]) as folder:
                os.fchmod(folder, entry.mode & 0o777)
                os.utime(folder, (entry.mtime, entry.mtime))


def copy(source: int, name: str, target: int, new: str) -> None:
    """Copies a file, a link, or a folder with all that it holds; pipes, sockets and devices are left out.

    Raises:
        OSError: it cannot be read or written; a folder of the new name is there.
    """
    _copy(source, name, target, new, 0)


def _copy(source: int, name: str, target: int, new: str, depth: int) -> None:
    facts = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISDIR(facts.st_mode):
        _copy_folder(source, name, target, new, depth)
    elif stat.S_ISLNK(facts.st_mode):
        draft = f".belljar-{os.urandom(6).hex()}"
        os.symlink(os.readlink(name, dir_fd=source), draft, dir_fd=target)
        _take_place(draft, new, target)
    elif stat.S_ISREG(facts.st_mode):
        _copy_file(source, name, target, new)
    elif depth == 0:
        raise OSError(errno.EINVAL, f"{files.kind(facts.st_mode)}, not a file, folder or link", name)


def _copy_folder(source: int, name: str, target: int, new: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} folders in each other", name)
    with ExitStack() as stack:
        old = stack.enter_context(files.descended(source, [name]))
        os.mkdir(new, 0o700, dir_fd=target)
        made = stack.enter_context(files.descended(target, [new]))
        for entry in os.listdir(old):
            _copy(old, entry, made, entry, depth + 1)
        os.fchmod(made, stat.S_IMODE(os.fstat(old).st_mode) & 0o777)


def _copy_file(source: int, name: str, target: int, new: str) -> None:
    draft = f".belljar-{os.urandom(6).hex()}"
    with ExitStack() as fds:
        old = os.open(name, _OPEN, dir_fd=source)
        fds.callback(os.close, old)
        facts = os.fstat(old)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        made = os.open(draft, _NEW, 0o600, dir_fd=target)
        fds.callback(os.close, made)
        try:
            while piece := memoryview(os.read(old, PIECE_BYTES)):
                while piece:
                    piece = piece[os.write(made, piece) :]
            os.fchmod(made, stat.S_IMODE(facts.st_mode) & 0o777)
            _take_place(draft, new, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=target)
            raise
