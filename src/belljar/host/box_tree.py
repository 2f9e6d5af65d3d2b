"""The files of a living box by whole paths, as its guest would come to them: with its rights and its errors.

The guest may swap anything at any moment: folders are opened one name at a time, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import ParamSpec, TypeVar

import anyio.from_thread
import anyio.to_thread

from belljar.core.process import FileChange, FileStat
from belljar.host import box_archive, box_files, files
from belljar.host.box_members import FoundMember, found_members, lay
from belljar.host.inotify import FolderWatch, opener

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST_LISTED = 100_000
_MAX_DEPTH = 256
_KERNELS = ("/proc", "/dev", "/sys")  # what is there are no files of the box
_SHARED_MEMORY = "/dev/shm"


class HostTree:
    """A `BoxTree` whose root the host can open."""

    def __init__(self, root: int, writable: Sequence[str], *, owner: int | None) -> None:
        """Remembers where the files are.

        Args:
            root: the root of the box, open.
            writable: the folders that its guest may write to.
            owner: the guest's uid, if it is not ours.
        """
        self._root = root
        self._writable = (*writable, _SHARED_MEMORY)
        self._owner = owner

    async def held(self) -> int:
        """Returns the bytes that are taken of the file systems that the guest may write to."""
        return await self._do(self._held)

    def _held(self) -> int:
        found: dict[int, int] = {}
        for folder in self._writable:
            with suppress(OSError), files.descended(self._root, [part for part in folder.split("/") if part]) as fd:
                space = os.fstatvfs(fd)
                found[os.fstat(fd).st_dev] = (space.f_blocks - space.f_bfree) * space.f_frsize
        return sum(found.values())

    @contextmanager
    def found(self, folders: Sequence[str], left_out: list[str]) -> Iterator[Iterator[FoundMember]]:
        """Gives folders and all that they hold, to be read in a thread; see `box_members.found_members`.

        It is safe to read on while the box is closed: the numbers of its descriptors may be others' by then.
        """
        with self._held_open() as root:
            yield found_members(root, folders, left_out)

    async def lay(self, entries: Iterable[FoundMember]) -> None:
        """Lays entries, as the guest's own; nothing may run in the box yet."""
        check = anyio.from_thread.check_cancelled
        with self._held_open() as root:
            await anyio.to_thread.run_sync(lambda: lay(root, entries, owner=self._owner, check=check))

    @contextmanager
    def _held_open(self) -> Iterator[int]:
        fd = os.dup(self._root)
        try:
            yield fd
        finally:
            os.close(fd)

    async def stat(self, path: str) -> FileStat:
        """Tells what is there."""
        return await self._do(self._stat, path)

    async def list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        """Lists a folder, sorted by path."""
        return await self._do(self._list, path, depth)

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a regular file, and gives its content piece by piece."""
        return box_files.reading(self._root, "/".join(self._parts(path)), owner=self._owner, named=path)

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        """Writes a file whole, and makes the folders above it."""
        await self._do(self._write, path, content, mode)

    async def make_dir(self, path: str) -> bool:
        """Makes a folder and those above it; False: it was there."""
        return await self._do(self._make_dir, path)

    async def move(self, path: str, to: str) -> None:
        """Renames a file or a folder."""
        await self._do(self._move, path, to)

    async def copy(self, path: str, to: str) -> None:
        """Copies a file, a folder with all that it holds, or a link as such."""
        await self._do(self._copy, path, to)

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds."""
        await self._do(self._remove, path)

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[FileChange]]:
        """Tells changes below a folder as they happen."""
        whole = "/" + "/".join(self._parts(path))
        with _named(path):
            watch = await anyio.to_thread.run_sync(
                lambda: FolderWatch(whole, opener(self._root, self._owner), recursive=recursive)
            )
        try:
            yield watch.changes()
        finally:
            watch.close()

    @asynccontextmanager
    async def packing(self, paths: Sequence[str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Gives folders and files with all that they hold as one tar archive."""
        blocks = self._packed([self._contents(path) for path in paths])

        async def pieces() -> AsyncIterator[bytes]:
            while piece := await self._do(_gathered, blocks):
                yield piece

        try:
            yield pieces()
        finally:
            blocks.close()

    async def unpack(self, path: str, archive: AsyncIterator[bytes]) -> None:
        """Lays the files of a tar archive below a folder."""
        whole = "/" + "/".join(self._parts(path))

        async def following() -> bytes:
            async for piece in archive:
                if piece:
                    return piece
            return b""

        await self._do(box_archive.unpack, whole, lambda: anyio.from_thread.run(following), self._place)

    # --- in a thread, with the guest's rights ---

    async def _do(self, work: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
        def do() -> _T:
            with files.acting_as(self._owner):
                return work(*args, **named)

        return await anyio.to_thread.run_sync(do)

    def _parts(self, path: str) -> tuple[str, ...]:
        whole = posixpath.normpath(path)
        if not whole.startswith("/") or "\0" in whole:
            raise OSError(errno.EINVAL, "not a whole path", path)
        whole = f"/{whole.lstrip('/')}"
        if any(whole.startswith(f"{folder}/") for folder in _KERNELS) and not _within(whole, _SHARED_MEMORY):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return tuple(part for part in whole.split("/") if part)

    def _contents(self, path: str) -> tuple[str, ...]:
        """The parts of a path whose contents are looked at."""
        parts = self._parts(path)
        if len(parts) == 1 and f"/{parts[0]}" in _KERNELS:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return parts

    @contextmanager
    def _above(self, path: str, *, make: bool = False, change: bool = False) -> Iterator[tuple[int, str]]:
        """Opens the folder that holds a name; errors name the whole path."""
        parts = self._parts(path)
        if not parts:
            raise OSError(errno.EBUSY if change else errno.EISDIR, "it is the root", path)
        whole = f"/{'/'.join(parts)}"
        if change and (whole in self._writable or not any(_within(whole, one) for one in self._writable)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        with _named(path), files.descended(self._root, parts[:-1], make=make) as folder:
            yield folder, parts[-1]

    def _stat(self, path: str) -> FileStat:
        parts = self._parts(path)
        if not parts:
            return _described("/", self._root, ".")
        with self._above(path) as (folder, name):
            return _described(f"/{'/'.join(parts)}", folder, name)

    def _list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        parts = self._contents(path)
        found: MutableSequence[FileStat] = []
        with _named(path), files.descended(self._root, parts) as folder:
            self._look_into(folder, "".join(f"/{part}" for part in parts), depth, found)
        return tuple(sorted(found, key=lambda one: one.path))

    def _look_into(self, folder: int, prefix: str, depth: int, found: MutableSequence[FileStat]) -> None:
        for name in os.listdir(folder):
            if len(found) >= _MOST_LISTED:
                raise OSError(errno.EOVERFLOW, f"there are more than {_MOST_LISTED} entries: list a part of it")
            try:
                facts = _described(f"{prefix}/{name}", folder, name)
            except OSError:
                continue  # it has gone meanwhile
            found.append(facts)
            if facts.kind == "folder" and depth > 1 and facts.path not in _KERNELS:
                try:
                    with files.descended(folder, [name]) as inner:
                        self._look_into(inner, facts.path, min(depth - 1, _MAX_DEPTH), found)
                except PermissionError:
                    continue

    def _write(self, path: str, content: bytes, mode: int | None) -> None:
        with self._above(path, make=True, change=True) as (folder, name):
            box_files.put_one(folder, name, content, mode=mode)

    def _make_dir(self, path: str) -> bool:
        whole = "/" + "/".join(self._parts(path))
        if whole in (*self._writable, "/"):
            return False
        with self._above(path, make=True, change=True) as (folder, name):
            try:
                os.mkdir(name, 0o755, dir_fd=folder)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise
                return False
            return True

    def _move(self, path: str, to: str) -> None:
        with self._above(path, change=True) as (source, name), self._above(to, change=True) as (target, new):
            try:
                os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                box_archive.copy(source, name, target, new)  # a granted folder, or shared memory: as `mv` does
                _unlink(source, name)

    def _copy(self, path: str, to: str) -> None:
        if _within(posixpath.normpath(to), posixpath.normpath(path)):
            raise OSError(errno.EINVAL, "a copy cannot be inside of what is copied", to)
        self._contents(path)
        with self._above(path) as (source, name), self._above(to, change=True) as (target, new):
            box_archive.copy(source, name, target, new)

    def _packed(self, paths: Sequence[Sequence[str]]) -> Generator[bytes, None, None]:
        for parts in paths:
            if not parts:
                raise OSError(errno.EINVAL, "name the folders below the root", "/")
            with files.descended(self._root, parts[:-1]) as folder:
                yield from box_archive.packed(folder, parts[-1], "/".join(parts))
        yield bytes(2 * tarfile.BLOCKSIZE)

    @contextmanager
    def _place(self, path: str) -> Iterator[tuple[int, str]]:
        """Opens the folder that holds an entry of an archive; no name: it is one that is always there."""
        whole = "/" + "/".join(self._parts(path))
        if any(_within(one, whole) for one in self._writable):
            yield self._root, ""
            return
        with self._above(whole, make=True, change=True) as found:
            yield found

    def _remove(self, path: str) -> None:
        with self._above(path, change=True) as (folder, name):
            _unlink(folder, name)


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except (IsADirectoryError, PermissionError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise
        if not files.erase(folder, name):
            raise OSError(errno.ENOTEMPTY, "not all of it could be removed") from None


def _gathered(blocks: Iterator[bytes]) -> bytes:
    """The next blocks, as many as make a piece that is worth passing on."""
    found = bytearray()
    for block in blocks:
        found += block
        if len(found) >= box_archive.PIECE_BYTES:
            break
    return bytes(found)


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _described(path: str, folder: int, name: str) -> FileStat:
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kind = files.kind(facts.st_mode)
    return FileStat(
        path=path.encode("utf-8", "replace").decode(), kind=kind, size=facts.st_size if kind == "file" else 0,
        mode=stat.S_IMODE(facts.st_mode), modified=facts.st_mtime,
        target=os.readlink(name, dir_fd=folder).encode("utf-8", "replace").decode() if kind == "link" else "",
    )  # fmt: skip


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
