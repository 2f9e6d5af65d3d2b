"""Checkpoints on disk: a zip file with what a session was. What it holds came from a guest, and is read as hostile.

`session.json` is small, `memory` holds the pages, and files and folders are entries below `files/`. How much all of it
takes is known from the zip file's own directory, and judged before anything is unpacked.
"""

from __future__ import annotations

import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, overload

from pydantic import Field, ValidationError

from belljar.backends.snapshot import Snapshot
from belljar.core import errors
from belljar.core.model import Model
from belljar.core.result import File
from belljar.core.values import GIB, format_size, guest_path
from belljar.host.files import MANY, opened, seal, unnamed

_FORMAT = 2
_PAGE_BYTES, _NUMBER_BYTES = 4096, 4
_CHUNK_BYTES = 1 << 20
_MAX_BYTES = 4 * GIB  # of memory, and of files: more cannot have been saved
_MAX_HEAD_BYTES = 4096
_PLACES = ("workspace", "tmp")  # the folders of a box
_HEAD, _MEMORY, _FILES = "session.json", "memory", "files/"
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValidationError, KeyError, EOFError, ValueError, RuntimeError)


class _Head(Model):
    format: int = _FORMAT
    binary: str = Field(max_length=200)
    size: int = Field(ge=0, le=_MAX_BYTES)
    count: int = Field(ge=0, le=_MAX_BYTES // _PAGE_BYTES)
    turns: int = Field(0, ge=0, le=2**53)


def save(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """The whole file or nothing."""
    head = _Head(binary=snapshot.binary, size=snapshot.size, count=snapshot.count, turns=snapshot.turns)
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        with _drafted(draft) as output, zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(_HEAD, head.model_dump_json())
            with archive.open(_MEMORY, "w", force_zip64=True) as memory:
                for piece in _pieces(snapshot.pages):
                    memory.write(piece)
            for folder in snapshot.folders:
                archive.writestr(_entry(f"{folder}/", stat.S_IFDIR | 0o755), b"")
            for file in snapshot.files:
                archive.writestr(_entry(file.path, stat.S_IFREG | (0o755 if file.executable else 0o644)), file.content)
        draft.replace(target)
    except OSError as error:
        raise errors.ExecutionFailed(f"{path}: {error.strerror}", fix="choose another place") from None
    finally:
        draft.unlink(missing_ok=True)


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(f"{_FILES}{name}")
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = mode << 16
    return entry


@contextmanager
def _drafted(draft: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is whole, where the file system can do that: who is killed leaves nothing."""
    try:
        fd = os.open(draft.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):
        with draft.open("xb") as file:
            yield file
        return
    with open(fd, "w+b") as file:
        yield file
        file.flush()
        with opened(str(draft.parent)) as folder:  # only with a folder does `link` follow the link that /proc has
            os.link(f"/proc/self/fd/{fd}", draft.name, dst_dir_fd=folder)


def _pieces(fd: int) -> Iterator[bytes]:
    offset = 0
    while piece := os.pread(fd, _CHUNK_BYTES, offset):
        yield piece
        offset += len(piece)


def check(path: str | os.PathLike[str]) -> None:
    """Raises `InvalidRequest` if this is no saved session; its contents are left for `load`."""
    with _opened(path) as archive:
        _head(archive)


def load(path: str | os.PathLike[str], *, memory: int = _MAX_BYTES, disk: int = _MAX_BYTES) -> Snapshot:
    """Reads a checkpoint from a file. Its files are read when they are used, one at a time.

    Args:
        path: the file.
        memory: bytes of memory that the session may have; one that needs more is refused before it is unpacked.
        disk: bytes that its files may have together; the same.

    Raises:
        InvalidRequest: it is no saved session, a damaged one, or too large.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(_opened(path))
        snapshot = _read(archive, memory, disk)
        assert isinstance(snapshot.files, _SavedFiles)
        snapshot.files.hold(stack.pop_all())
    return snapshot


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    with _blaming(path), zipfile.ZipFile(path) as archive:
        yield archive


@contextmanager
def _blaming(path: object) -> Iterator[None]:
    """Turns what is wrong with a file into `InvalidRequest`."""
    try:
        yield
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error.strerror or error}", fix="check the path") from None
    except _DAMAGE as error:
        raise errors.InvalidRequest(
            f"{path} is no saved session, or a damaged one: {str(error).splitlines()[0]}", fix="save it anew"
        ) from None


def _head(archive: zipfile.ZipFile) -> _Head:
    entries = archive.infolist()
    if len(entries) > MANY or len({entry.filename for entry in entries}) != len(entries):
        raise ValueError("it has too many entries, or one twice")
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        raise ValueError("it is compressed in another way than Belljar does")
    entry = archive.getinfo(_HEAD)
    if entry.file_size > _MAX_HEAD_BYTES:
        raise ValueError(f"{_HEAD} is too large")
    head = _Head.model_validate_json(_content(archive, entry))
    if head.format != _FORMAT:
        raise ValueError(f"its format is {head.format}, and this version reads {_FORMAT}")
    if head.count * _PAGE_BYTES > head.size:
        raise ValueError("it has more pages than memory")
    return head


def _in_box(path: str) -> str:
    """The name of something that a box can hold; `guest_path` has no objection to it."""
    if guest_path(path) != path or path.split("/", maxsplit=1)[0] not in _PLACES:
        raise ValueError(f"{path[:80]!r} is no name of a box")
    return path


def _read(archive: zipfile.ZipFile, memory: int, disk: int) -> Snapshot:
    head = _head(archive)
    if head.size > memory:
        raise ValueError(f"it needs {format_size(head.size)} of memory, and there is {format_size(memory)}")
    pages, expected = archive.getinfo(_MEMORY), head.count * (_PAGE_BYTES + _NUMBER_BYTES)
    if pages.file_size != expected:
        raise ValueError("its memory is not whole")
    files, folders = _tree(archive, disk)
    snapshot = Snapshot(head.binary, head.size, head.count, unnamed(), _SavedFiles(archive, files), folders)
    with archive.open(pages) as source:
        _copy(source, snapshot.pages, expected)
    seal(snapshot.pages)
    snapshot.turns = head.turns
    return snapshot


def _tree(archive: zipfile.ZipFile, disk: int) -> tuple[list[zipfile.ZipInfo], tuple[str, ...]]:
    """The entries of files, and the names of folders; the files are no larger than the disk."""
    inside = [entry for entry in archive.infolist() if entry.filename.startswith(_FILES)]
    files = [entry for entry in inside if not entry.is_dir()]
    size = sum(entry.file_size for entry in files)
    if size > disk:
        raise ValueError(f"its files have {format_size(size)}, and there is {format_size(disk)}")
    for entry in files:
        if "/" not in _in_box(_name(entry)):
            raise ValueError(f"{_name(entry)!r} is a folder")
    return files, tuple(_in_box(_name(entry)) for entry in inside if entry.is_dir())


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removeprefix(_FILES).removesuffix("/")


class _SavedFiles(Sequence[File]):
    """The files of a saved session. Each is read anew when it is asked for: never are all of them in memory."""

    def __init__(self, archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo]) -> None:
        self._archive = archive
        self._entries = entries
        self._open = ExitStack()

    def hold(self, archive: ExitStack) -> None:
        """Takes over what keeps the archive open; it is closed with this object."""
        self._open = archive

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> File: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[File]: ...
    def __getitem__(self, index: int | slice) -> File | Sequence[File]:
        if isinstance(index, slice):
            return [self._file(entry) for entry in self._entries[index]]
        return self._file(self._entries[index])

    def _file(self, entry: zipfile.ZipInfo) -> File:
        with _blaming(self._archive.filename):
            content = _content(self._archive, entry)
        return File(path=_name(entry), content=content, executable=bool(entry.external_attr >> 16 & 0o100))


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as member:
        return member.read(entry.file_size)


def _copy(memory: IO[bytes], fd: int, expected: int) -> None:
    written = 0
    while piece := memory.read(_CHUNK_BYTES):
        written += os.write(fd, piece)
    if written != expected:
        raise ValueError("its memory is not whole")
