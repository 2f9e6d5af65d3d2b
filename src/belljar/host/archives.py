"""Tar archives, piece by piece: of folders of this machine, and hostile ones that come out of sandboxes.

No archive is ever held in memory, or believed: names are judged, headers are bounded, and what is neither a file nor a
folder nor a link is refused. Content is read from an open descriptor, so that nobody can swap what is being packed.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Literal, NamedTuple, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from belljar.core.values import MIB, format_size
from belljar.host import files

T = TypeVar("T")
MAX_MEMBERS = 500_000
_BLOCK = 512
_PIECE_BYTES = MIB
_MAX_HEADER_BYTES = 64 * 1024  # of a long name, or of extended facts
_MAX_NAME_BYTES = 4096
_END = bytes(2 * _BLOCK)
_CAREFULLY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_KINDS: dict[bytes, Literal["file", "folder", "link", "twin"]] = {
    b"0": "file", b"\0": "file", b"7": "file", b"5": "folder", b"2": "link", b"1": "twin"
}  # fmt: skip
_TYPES = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "twin": tarfile.LNKTYPE}


class Member(NamedTuple):
    """One entry of an archive. Names are relative and climb nowhere; bytes that are not UTF-8 are surrogates."""

    name: str
    kind: Literal["file", "folder", "link", "twin"]
    mode: int = 0o644  # its permissions, and nothing else
    modified: float = 0.0
    size: int = 0
    target: str = ""  # of a link: any text; of a twin: the name of the same file, which came before

    def header(self) -> bytes:
        """Returns what stands before its content."""
        info = tarfile.TarInfo(self.name + ("/" if self.kind == "folder" else ""))
        info.type, info.mode, info.size = _TYPES[self.kind], self.mode, self.size
        info.mtime, info.linkname = int(self.modified), self.target  # as whole seconds, the header is one block
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    """Returns what stands behind content of so many bytes."""
    return bytes(-size % _BLOCK)


# --- reading what may be hostile ---


def members(pieces: Iterator[bytes]) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Gives the entries of an archive with their content, each to be read before the next is asked for.

    Raises:
        ValueError: it is no archive, it is cut, or it holds what must not leave a sandbox, or get into one.
    """
    source = _Source(pieces)
    facts: dict[str, str] = {}
    for _ in range(MAX_MEMBERS):
        block = source.exactly(_BLOCK)
        if not block.strip(b"\0"):
            source.drain()
            return
        size, kind = _size(block), block[156:157]
        if kind in b"LKxg":
            facts |= _extended(kind, source.header(size))
            continue
        size = int(facts.pop("size", size))
        member = _member(block, _KINDS.get(kind), size, facts)
        facts = {}
        content = source.content(member.size)
        yield member, content
        for _piece in content:  # what nobody wanted
            pass
        source.exactly(-member.size % _BLOCK)
    raise ValueError(f"it has more than {MAX_MEMBERS} entries")


class _Source:
    """Pieces of any size, as so many bytes as are wanted."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def some(self, most: int) -> memoryview:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                raise ValueError("it ends too early")
            self._rest = memoryview(piece)
        some, self._rest = self._rest[:most], self._rest[most:]
        return some

    def exactly(self, count: int) -> bytes:
        if len(self._rest) >= count:  # as nearly always
            whole, self._rest = bytes(self._rest[:count]), self._rest[count:]
            return whole
        parts = []
        while count:
            parts.append(bytes(self.some(count)))
            count -= len(parts[-1])
        return b"".join(parts)

    def header(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header has {format_size(size)}")
        content = self.exactly(size)
        self.exactly(-size % _BLOCK)
        return content

    def content(self, size: int) -> Iterator[bytes]:
        while size > 0:
            piece = self.some(min(size, _PIECE_BYTES))
            size -= len(piece)
            yield bytes(piece)

    def drain(self) -> None:
        for _ in self._pieces:
            pass


def _member(block: bytes, kind: str | None, size: int, facts: dict[str, str]) -> Member:
    written = _number(block[148:156])
    if written != sum(block[:148]) + sum(block[156:]) + 8 * 32:
        raise ValueError("a header is damaged")
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    short = _text(block[:100])
    name = relative(facts.get("path") or (f"{prefix}/{short}" if prefix else short))
    target = facts.get("linkpath") or _text(block[157:257])
    if kind not in ("file", "folder", "link", "twin"):
        raise ValueError(f"{name[:80]!r} is neither a file nor a folder nor a link")
    if kind == "twin":
        target = relative(target)
    if "\0" in target or len(target) > _MAX_NAME_BYTES or (kind == "link" and not target):
        raise ValueError(f"{name[:80]!r} is a link that leads nowhere")
    if kind != "file":
        size = 0 if kind == "folder" or not size else _no_size(name)
    mode = _number(block[100:108]) & 0o777
    return Member(name, kind, mode, _moment(block, facts), size, "" if kind in ("file", "folder") else target)  # type: ignore[arg-type]


def _no_size(name: str) -> int:
    raise ValueError(f"{name[:80]!r} is a link with content")


def relative(name: str) -> str:
    """Returns a name of an archive without its decoration, "." for the folder itself.

    Raises:
        ValueError: it leads out of the folder, or nothing can be called so.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"{name[:80]!r} leads out of the folder")
    if len(name) > _MAX_NAME_BYTES or any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts):
        raise ValueError(f"{name[:80]!r} is too long")
    return "/".join(parts) or "."


def _extended(kind: bytes, content: bytes) -> dict[str, str]:
    if kind in b"LK":
        return {"path" if kind == b"L" else "linkpath": _text(content)}
    if kind == b"g":
        return {}
    found: dict[str, str] = {}
    while content:
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(content):
            raise ValueError("its extended facts are damaged")
        name, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        if name in (b"path", b"linkpath", b"size", b"mtime"):
            found[name.decode()] = value.decode("utf-8", "surrogateescape")
        if name.startswith(b"GNU.sparse"):
            raise ValueError("it has a sparse file")
        content = content[int(length) :]
    if not found.get("size", "0").isdigit() or len(found.get("size", "0")) > 18:
        raise ValueError("a size is damaged")
    return found


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    digits = field.strip(b"\0 ")
    if not digits:
        return 0
    if any(digit not in b"01234567" for digit in digits):
        raise ValueError("a header is damaged")
    return int(digits, 8)


def _size(block: bytes) -> int:
    if block[124] == 0x80:  # GNU's way to write what is larger than 8 GB
        return int.from_bytes(block[125:136], "big")
    return _number(block[124:136])


def _moment(block: bytes, facts: dict[str, str]) -> float:
    with suppress(ValueError, OverflowError):
        moment = float(facts["mtime"]) if "mtime" in facts else float(_number(block[136:148]))
        return moment if 0 <= moment < 2**33 else 0.0
    return 0.0


# --- packing a folder of this machine ---


def packed(path: str, prefix: str = "") -> Iterator[bytes]:
    """Gives a folder of this machine, or one file of it, as an archive; pipes, sockets and devices are left out.

    Args:
        path: the folder; a link is followed, those in it are not.
        prefix: put before each name; for a file: its name.
    """
    with ExitStack() as stack:
        if os.path.isdir(path):
            root = stack.enter_context(files.opened(path))
            names: dict[tuple[int, int], str] = {}
            yield from _pack_folder(root, f"{prefix}/" if prefix else "", names)
        else:
            fd = os.open(path, _CAREFULLY & ~getattr(os, "O_NOFOLLOW", 0))
            stack.callback(os.close, fd)
            yield from _pack_file(fd, prefix)
    yield _END


def _pack_folder(folder: int, prefix: str, names: dict[tuple[int, int], str]) -> Iterator[bytes]:
    for name in sorted(os.listdir(folder)):
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        path = prefix + name
        mode, moment = stat.S_IMODE(facts.st_mode) & 0o777, facts.st_mtime
        if stat.S_ISLNK(facts.st_mode):
            yield Member(path, "link", 0o777, moment, target=os.readlink(name, dir_fd=folder)).header()
        elif stat.S_ISDIR(facts.st_mode):
            yield Member(path, "folder", mode, moment).header()
            with files.below(folder, name) as inner:
                yield from _pack_folder(inner, f"{path}/", names)
        elif stat.S_ISREG(facts.st_mode):
            first = names.setdefault((facts.st_dev, facts.st_ino), path) if facts.st_nlink > 1 else path
            if first != path:
                yield Member(path, "twin", mode, moment, target=first).header()
                continue
            fd = os.open(name, _CAREFULLY, dir_fd=folder)
            try:
                yield from _pack_file(fd, path)
            finally:
                os.close(fd)


def _pack_file(fd: int, path: str) -> Iterator[bytes]:
    """One regular file; what is written to it meanwhile changes nothing of its length."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        return
    size = left = facts.st_size
    yield Member(path, "file", stat.S_IMODE(facts.st_mode) & 0o777, facts.st_mtime, size).header()
    while left:
        piece = os.read(fd, min(left, _PIECE_BYTES)) or bytes(min(left, _PIECE_BYTES))
        left -= len(piece)
        yield piece
    yield padding(size)


# --- unpacking on this machine ---


def unpacked(pieces: Iterator[bytes], path: str, prefix: str, limit: int) -> tuple[str, ...]:
    """Writes the files and folders of a hostile archive below a folder of this machine, which is made.

    Nothing but regular files and folders is made, no link is followed, and permissions are ordinary ones.

    Args:
        pieces: the archive.
        path: the folder.
        prefix: the folder of the archive that is wanted.
        limit: bytes in all.

    Returns:
        What was left out, and why.

    Raises:
        ValueError: it is no archive, or too large.
    """
    left_out: list[str] = []
    os.makedirs(path, exist_ok=True)
    with files.opened(path) as root:
        for member, content in members(pieces):
            below = member.name.removeprefix(f"{prefix}/") if prefix else member.name
            if member.name == prefix or below == "." or (prefix and below == member.name):
                continue
            limit -= member.size
            if limit < 0:
                raise ValueError("it has more bytes than it may have")
            if (reason := _unpack(root, member, below, content)) and len(left_out) < files.MAX_ENTRIES:
                left_out.append(f"{below}: {reason}")
    return tuple(left_out)


def _unpack(root: int, member: Member, below: str, content: Iterator[bytes]) -> str:
    """Writes one entry; returns why it was not."""
    *folders, name = below.split("/")
    if member.kind in ("link", "twin"):
        return f"{'a link' if member.kind == 'link' else 'another name of a file'}, only regular files leave a sandbox"
    if not below.isprintable() or "\\" in below:
        return "an unusable name"
    if member.kind == "folder":
        with files.descended(root, (*folders, name), make=True):
            return ""
    draft = f".belljar-{os.urandom(6).hex()}"
    with files.descended(root, folders, make=True) as folder:
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
            try:
                for piece in content:
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(fd, view) :]
                if member.mode & 0o100:
                    os.fchmod(fd, 0o755)
            finally:
                os.close(fd)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise
    return ""


# --- between the event loop and a thread ---


async def in_thread(work: Callable[[Iterator[bytes]], T], pieces: AsyncIterator[bytes]) -> T:
    """Runs blocking work on what comes in pieces, in a thread; who is cancelled waits until it has stopped."""

    async def following() -> bytes | None:
        return await anext(pieces, None)

    def pulled() -> Iterator[bytes]:
        while True:
            anyio.from_thread.check_cancelled()
            if (piece := anyio.from_thread.run(following)) is None:
                return
            yield piece

    return await anyio.to_thread.run_sync(lambda: work(pulled()))
