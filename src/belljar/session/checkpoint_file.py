"""Checkpoints on disk: a zip file with what a session was. What it holds came from a guest, and is read as hostile."""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic import Field, ValidationError

from belljar.backends.snapshot import Snapshot
from belljar.core import errors
from belljar.core.model import Model
from belljar.core.result import File
from belljar.core.values import GIB, GuestPath, format_size, guest_path
from belljar.host.files import opened, seal, unnamed

_FORMAT = 1
_PAGE = 4096
_CHUNK = 1 << 20
_MOST = 4 * GIB  # of memory, and of files: more cannot have been saved
_PLACES = ("workspace", "tmp")  # the folders of a box
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, ValidationError, KeyError, EOFError, ValueError, RuntimeError,
)  # fmt: skip


class _Head(Model):
    format: int = _FORMAT
    binary: str = Field(max_length=200)
    size: int = Field(ge=0, le=_MOST)
    count: int = Field(ge=0, le=_MOST // _PAGE)
    turns: int = Field(0, ge=0, le=2**53)
    folders: tuple[GuestPath, ...] = Field((), max_length=1_000_000)
    executable: frozenset[str] = frozenset()


def save(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """The whole file or nothing."""
    head = _Head(
        binary=snapshot.binary, size=snapshot.size, count=snapshot.count, turns=snapshot.turns,
        folders=snapshot.folders,
        executable=frozenset(file.path for file in snapshot.files if file.executable),
    )  # fmt: skip
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        with _drafted(draft) as output, zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("session.json", head.model_dump_json())
            with archive.open("memory", "w", force_zip64=True) as memory:
                for piece in _pieces(snapshot.pages):
                    memory.write(piece)
            for file in snapshot.files:
                archive.writestr(f"files/{file.path}", file.content)
        draft.replace(target)
    except OSError as error:
        raise errors.ExecutionFailed(f"{path}: {error.strerror}", fix="choose another place") from None
    finally:
        draft.unlink(missing_ok=True)


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
    while piece := os.pread(fd, _CHUNK, offset):
        yield piece
        offset += len(piece)


def check(path: str | os.PathLike[str]) -> None:
    """Raises `InvalidRequest` if this is no saved session; its contents are left for `load`."""
    with _opened(path) as archive:
        _head(archive)


def load(path: str | os.PathLike[str], *, memory: int = _MOST, disk: int = _MOST) -> Snapshot:
    """The checkpoint in a file; one that would take more than this is refused before it is unpacked."""
    with _opened(path) as archive:
        return _read(archive, memory, disk)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error.strerror or error}", fix="check the path") from None
    except _DAMAGE as error:
        raise errors.InvalidRequest(
            f"{path} is no saved session, or a damaged one: {str(error).splitlines()[0]}", fix="save it anew"
        ) from None


def _head(archive: zipfile.ZipFile) -> _Head:
    head = _Head.model_validate_json(_member(archive, "session.json", 64 << 20))
    if head.format != _FORMAT:
        raise ValueError(f"its format is {head.format}, and this version reads {_FORMAT}")
    if head.count * _PAGE > head.size:
        raise ValueError("it has more pages than memory")
    for folder in head.folders:
        _in_box(folder)
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
    files, room = [], 2 * disk
    for name in archive.namelist():
        if name.startswith("files/"):
            inside = _in_box(name.removeprefix("files/"))
            if "/" not in inside:
                raise ValueError(f"{inside!r} is a folder")
            content = _member(archive, name, room)
            room -= len(content)
            files.append(File(path=inside, content=content, executable=inside in head.executable))
    snapshot = Snapshot(head.binary, head.size, head.count, unnamed(), tuple(files), head.folders)
    with archive.open("memory") as pages:
        _copy(pages, snapshot.pages, head.count * (_PAGE + 4))
    seal(snapshot.pages)
    snapshot.turns = head.turns
    return snapshot


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    with archive.open(name) as member:
        content = member.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{name} is too large")
    return content


def _copy(memory: IO[bytes], fd: int, expected: int) -> None:
    written = 0
    while piece := memory.read(_CHUNK):
        written += len(piece)
        if written > expected:
            break
        os.write(fd, piece)
    if written != expected:
        raise ValueError("its memory is not whole")
