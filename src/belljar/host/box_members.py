"""Reads whole folders of a box whose files the host can open, for snapshots and forks, and lays them into another box.

All of it is read, also what its owner locked away from himself: a copy is to be whole. Folders are opened one name at a
time, no link is followed, and what lies on another file system, such as a granted folder, is not entered. What is laid
is written with the guest's rights, into a box in which nothing runs yet.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from belljar.core.box_snapshot import MOST_LEFT_OUT
from belljar.core.values import MIB
from belljar.host import files
from belljar.host.archives import Member

_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_PIECE_BYTES = MIB
_BATCH, _BATCH_BYTES = 64, 64 * MIB  # entries, and their bytes, that are laid in one go
_MOST_SENT = 1 << 30
_MAX_DEPTH = 256
_MAX_NAME_BYTES = 4096
_OTHER = "it lies on another file system"


class FoundMember(NamedTuple):
    """An entry, and for a file its open descriptor, which is closed when the next one is asked for.

    Attributes:
        member: the entry, named by its whole path without the first slash.
        fd: of a file.
        digest: what the SHA-256 of its content must be; empty: nobody knows.
    """

    member: Member
    fd: int = -1
    digest: str = ""

    def pieces(self) -> Iterator[bytes]:
        """Gives its content: so many bytes as it had. What is written to it meanwhile changes nothing of that."""
        at, size = 0, self.member.size if self.fd >= 0 else 0
        while at < size:
            most = min(size - at, _PIECE_BYTES)
            piece = os.pread(self.fd, most, at) or bytes(most)
            at += len(piece)
            yield piece

    def checked(self) -> Iterator[bytes]:
        """Gives its content.

        Raises:
            ValueError: in the end, if it is not what it was.
        """
        seen = hashlib.sha256()
        for piece in self.pieces():
            seen.update(piece)
            yield piece
        if self.digest and seen.hexdigest() != self.digest:
            raise ValueError(f"the content of {self.member.name[:80]!r} is damaged")


def found_members(root: int, folders: Sequence[str], left_out: list[str]) -> Iterator[FoundMember]:
    """Gives folders and all that they hold; a folder comes before what is in it.

    Args:
        root: the root of the box, open.
        folders: whole paths.
        left_out: is told what was not read, and why. Pipes, sockets and devices are none of its business.
    """
    names: dict[tuple[int, int], str] = {}
    for folder in folders:
        parts = [part for part in folder.split("/") if part]
        with suppress(FileNotFoundError, NotADirectoryError), files.descended(root, parts) as top:
            facts = os.fstat(top)
            yield FoundMember(Member("/".join(parts), "folder", stat.S_IMODE(facts.st_mode), facts.st_mtime))
            yield from _below(top, "/".join(parts), 1, facts.st_dev, names, left_out)


def _below(
    folder: int, path: str, depth: int, device: int, names: dict[tuple[int, int], str], left_out: list[str]
) -> Iterator[FoundMember]:
    for name in sorted(os.listdir(folder)):
        where = f"{path}/{name}"
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if len(os.fsencode(where)) > _MAX_NAME_BYTES:
                _leave_out(left_out, f"/{where[:80]}…: its name is too long")
            elif facts.st_dev != device:
                _leave_out(left_out, f"/{where}: {_OTHER}")
            elif stat.S_ISDIR(facts.st_mode):
                yield from _folder(folder, name, where, depth, device, names, left_out)
            elif stat.S_ISLNK(facts.st_mode):
                target = os.readlink(name, dir_fd=folder)
                yield FoundMember(Member(where, "link", 0o777, facts.st_mtime, target=target))
            elif stat.S_ISREG(facts.st_mode):
                if first := names.get((facts.st_dev, facts.st_ino), ""):
                    yield FoundMember(Member(where, "twin", stat.S_IMODE(facts.st_mode), facts.st_mtime, target=first))
                else:
                    yield from _file(folder, name, where, device, names)
        except FileNotFoundError:  # it is gone by now
            continue
        except OSError as error:
            _leave_out(left_out, f"/{where}: {error.strerror}")


def _leave_out(left_out: list[str], what: str) -> None:
    """Notes what was not read: a guest can make any number of such entries, and so not all are."""
    if len(left_out) <= MOST_LEFT_OUT:
        left_out.append(what if len(left_out) < MOST_LEFT_OUT else "and more")


def _folder(
    folder: int, name: str, where: str, depth: int, device: int, names: dict[tuple[int, int], str], left_out: list[str]
) -> Iterator[FoundMember]:
    with files.descended(folder, [name]) as inner:
        facts = os.fstat(inner)
        if facts.st_dev != device:
            _leave_out(left_out, f"/{where}: {_OTHER}")
            return
        yield FoundMember(Member(where, "folder", stat.S_IMODE(facts.st_mode), facts.st_mtime))
        if depth >= _MAX_DEPTH:
            _leave_out(left_out, f"/{where}: lies {_MAX_DEPTH} folders deep, what is in it was left out")
            return
        yield from _below(inner, where, depth + 1, device, names, left_out)


def _file(
    folder: int, name: str, where: str, device: int, names: dict[tuple[int, int], str]
) -> Iterator[FoundMember]:  # fmt: skip
    fd = os.open(name, _OPEN, dir_fd=folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_dev != device:
            return
        if facts.st_nlink > 1:
            names[facts.st_dev, facts.st_ino] = where
        yield FoundMember(Member(where, "file", stat.S_IMODE(facts.st_mode), facts.st_mtime, facts.st_size), fd)
    finally:
        os.close(fd)


# --- laying ---


def lay(root: int, entries: Iterable[FoundMember], *, owner: int | None, check: Callable[[], object]) -> None:
    """Lays entries into a box in which nothing runs.

    Args:
        root: its root, open.
        entries: what to lay; the first folder of each is there, and those that are mounted stay as they are.
        owner: the guest's uid, if it is not ours.
        check: is called now and then, and raises if it is to stop.

    Raises:
        OSError: it cannot be written: no room is left, perhaps.
        ValueError: a content is not what it was.
    """
    made: list[Member] = []
    batch: list[FoundMember] = []
    size = 0
    try:
        for one in entries:
            batch.append(one._replace(fd=os.dup(one.fd)) if one.fd >= 0 else one)
            size += one.member.size
            if len(batch) >= _BATCH or size >= _BATCH_BYTES:
                check()
                _lay_batch(root, batch, made, owner)
                size = 0
        _lay_batch(root, batch, made, owner)
    finally:
        _close(batch)
    with files.acting_as(owner):
        for member in reversed(made):  # only now: what was laid into them has changed their times
            _finish(root, member)


def _lay_batch(root: int, batch: list[FoundMember], made: list[Member], owner: int | None) -> None:
    with files.acting_as(owner), ExitStack() as stack:
        above, parent = "", root
        for one in batch:
            folder, _, name = one.member.name.rpartition("/")
            if folder != above:
                stack.close()
                parent = stack.enter_context(files.descended(root, folder.split("/"))) if folder else root
                above = folder
            if _lay_one(root, parent, name, one):
                made.append(one.member)
    _close(batch)


def _close(batch: list[FoundMember]) -> None:
    for one in batch:
        if one.fd >= 0:
            os.close(one.fd)
    batch.clear()


def _lay_one(root: int, parent: int, name: str, one: FoundMember) -> bool:
    """Lays an entry; returns whether that made a folder."""
    member = one.member
    if member.kind == "folder":
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
            return False
        return True
    if member.kind == "link":
        os.symlink(member.target, name, dir_fd=parent)
        os.utime(name, (member.modified, member.modified), dir_fd=parent, follow_symlinks=False)
    elif member.kind == "twin":
        *folders, first = member.target.split("/")
        with files.descended(root, folders) as other:
            os.link(first, name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
    else:
        _lay_file(parent, name, one)
    return False


def _lay_file(parent: int, name: str, one: FoundMember) -> None:
    fd = os.open(name, _NEW, 0o600, dir_fd=parent)
    try:
        if one.digest:
            for piece in one.checked():
                _write(fd, piece)
        else:
            _copy(one.fd, fd, one.member.size)
        os.fchmod(fd, one.member.mode & 0o777)
        os.utime(fd, (one.member.modified, one.member.modified))
    finally:
        os.close(fd)


def _copy(source: int, target: int, size: int) -> None:
    """Copies so many bytes inside the kernel, without what was never written; less if there is less by now."""
    at = _data_after(source, 0)
    while 0 <= at < size:
        end = min(os.lseek(source, at, os.SEEK_HOLE), size)
        os.lseek(source, at, os.SEEK_SET)
        os.lseek(target, at, os.SEEK_SET)
        at = _data_after(source, _send(source, target, at, end))
    os.ftruncate(target, size)


def _data_after(source: int, at: int) -> int:
    """Where the next bytes are that were written; -1: there are none."""
    try:
        return os.lseek(source, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return -1
        raise


def _send(source: int, target: int, at: int, end: int) -> int:
    while at < end and (count := os.sendfile(target, source, None, min(end - at, _MOST_SENT))):
        at += count
    return max(at, end)


def _write(fd: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def _finish(root: int, member: Member) -> None:
    *folders, name = member.name.split("/")
    with suppress(PermissionError), files.descended(root, [*folders, name]) as folder:
        os.utime(folder, (member.modified, member.modified))
        os.fchmod(folder, member.mode & 0o777)
