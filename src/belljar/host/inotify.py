"""Watches folders by the kernel's inotify: what changes in them, and in the folders below."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Literal, NamedTuple

import anyio
import anyio.lowlevel

from belljar.core.process import FileChange
from belljar.host import files, syscalls

_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x4000, 0x8000
_IS_FOLDER, _ONLY_FOLDERS = 1 << 30, 1 << 24
_WANTED = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLY_FOLDERS
_KINDS = {_MODIFY: "changed", _MOVED_FROM: "moved", _MOVED_TO: "created", _CREATE: "created", _DELETE: "removed"}
_HEADER = struct.Struct("iIII")
_READ_BYTES = 1 << 16
_MOST_FOLDERS = 8192
_MOST_ENTRIES = 10_000  # of a folder that is new, or was moved here
_MAX_DEPTH = 64  # folders below the one that is watched
_AT_ONCE = 100  # changes, before others get their turn in the event loop
_DRAFT = re.compile(r"\.belljar-[0-9a-f]{12}")  # what `files.replace` writes before it gives a file its name


class _KernelEvent(NamedTuple):
    watch: int
    mask: int
    name: str


class _Appeared(NamedTuple):
    kind: Literal["created", "missed"]
    path: str
    is_folder: bool


class FolderWatch:
    """Folders that are watched. `opened` opens one of them by its path, with the guest's rights."""

    def __init__(self, path: str, opened: Callable[[str], int], *, recursive: bool) -> None:
        """Begins to watch; what happens from here on is told.

        Args:
            path: of the folder.
            opened: opens a folder by its path.
            recursive: whether the folders below are watched too.

        Raises:
            OSError: it is no folder, or may not be read.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        self._libc = libc
        self._opened = opened
        self._recursive = recursive
        self._paths: dict[int, str] = {}
        self._root = path
        self.fd: int = syscalls.checked(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            for _ in self._add(path):
                pass
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Ends it."""
        os.close(self.fd)

    async def changes(self) -> AsyncIterator[FileChange]:
        """Gives what happens, as it happens, until the folder itself is gone."""
        while self._paths:
            await anyio.wait_readable(self.fd)
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                continue
            last = None
            for number, change in enumerate(self._told(data), 1):
                if change != last:  # one write may be many
                    yield change
                last = change
                if number % _AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()

    def _add(self, path: str) -> Iterator[FileChange]:
        """Watches a folder, and those below it if so asked, and gives what is in them already.

        Raises:
            OSError: it is no folder, or may not be read.
        """
        yield from self._tell(self._watched(path))

    def _tell(self, waiting: list[_Appeared]) -> Iterator[FileChange]:
        """Gives what was found, the last first, and what is below it: guests make it as deep as they like."""
        while waiting:
            found = waiting.pop()
            yield FileChange(kind=found.kind, path=_text(found.path))
            if found.is_folder and self._recursive:
                if len(self._paths) >= _MOST_FOLDERS or found.path.count("/") - self._root.count("/") > _MAX_DEPTH:
                    yield FileChange(kind="missed", path=_text(found.path))
                    continue
                with suppress(OSError):
                    waiting += self._watched(found.path)

    def _watched(self, path: str) -> list[_Appeared]:
        """Watches one folder; returns what is in it."""
        found: list[_Appeared] = []
        folder = self._opened(path)
        try:
            watch = syscalls.checked(self._libc.inotify_add_watch(self.fd, _by(folder), _WANTED))
            self._paths[watch] = path
            with os.scandir(folder) as entries:
                for entry in islice(entries, _MOST_ENTRIES):
                    with suppress(OSError):
                        is_folder = entry.is_dir(follow_symlinks=False)
                        found.append(_Appeared("created", f"{path.rstrip('/')}/{entry.name}", is_folder))
                if next(entries, None) is not None:
                    found.insert(0, _Appeared("missed", path, is_folder=False))
        finally:
            os.close(folder)
        return found

    def _told(self, data: bytes) -> Iterator[FileChange]:
        for seen in _events(data):
            if seen.mask & _OVERFLOW:
                yield FileChange(kind="missed", path=_text(self._root))
            elif seen.mask & (_DELETE_SELF | _MOVE_SELF | _IGNORED):
                yield from self._lost(seen)
            elif (folder := self._paths.get(seen.watch)) is not None and not _DRAFT.fullmatch(seen.name):
                yield from self._happened(f"{folder.rstrip('/')}/{seen.name}", seen.mask)

    def _happened(self, path: str, mask: int) -> Iterator[FileChange]:
        if mask & (_CREATE | _MOVED_TO):
            yield from self._tell([_Appeared("created", path, bool(mask & _IS_FOLDER))])
        for bit in (_MODIFY, _MOVED_FROM, _DELETE):
            if mask & bit:
                yield FileChange(kind=_KINDS[bit], path=_text(path))

    def _lost(self, seen: _KernelEvent) -> Iterator[FileChange]:
        """A watched folder is gone, or has another name: one below is told of by the folder that held it."""
        path = self._paths.pop(seen.watch, None)
        if path == self._root and not seen.mask & _IGNORED:
            self._paths.clear()
            yield FileChange(kind="removed" if seen.mask & _DELETE_SELF else "moved", path=_text(path))
        elif path is not None and seen.mask & _MOVE_SELF and not self._stays(seen.watch, path):
            self._libc.inotify_rm_watch(self.fd, seen.watch)

    def _stays(self, watch: int, path: str) -> bool:
        """Whether a folder that was moved is watched under its new path already."""
        try:
            folder = self._opened(path)
        except OSError:
            return False
        try:
            there = syscalls.checked(self._libc.inotify_add_watch(self.fd, _by(folder), _WANTED))
            self._paths[there] = path
            return there == watch
        except OSError:
            return False
        finally:
            os.close(folder)


def _events(data: bytes) -> Iterator[_KernelEvent]:
    at = 0
    while at + _HEADER.size <= len(data):
        watch, mask, _, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        yield _KernelEvent(watch, mask, os.fsdecode(data[at : at + length].split(b"\0", 1)[0]))
        at += length


def _by(folder: int) -> bytes:
    return f"/proc/self/fd/{folder}".encode()


def _text(path: str) -> str:
    return path.encode("utf-8", "replace").decode()


def opener(root: int, owner: int | None) -> Callable[[str], int]:
    """Returns what opens a folder below a root, by its path, with the owner's rights."""

    def opened(path: str) -> int:
        with files.acting_as(owner), files.descended(root, [part for part in path.split("/") if part]) as folder:
            return os.dup(folder)

    return opened
