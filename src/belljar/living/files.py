"""The files of a living sandbox, by whole paths, with its programs' rights and errors. No link is followed."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import BinaryIO, Protocol, cast

import anyio.to_thread

from belljar.control.box_tree import BoxTree
from belljar.core import errors
from belljar.core.options import StrPath
from belljar.core.process import Feature, FileChange, FileStat
from belljar.core.values import whole_path
from belljar.host import archives, portal

_READ_BYTES = 64 * 1024  # that a blocking reader asks for at once
_MAX_DEPTH = 64
_DISKS = 4  # that a sandbox has: /workspace, its home, /tmp, /var/tmp; what is downloaded is no more than all of them


class FileHolder(Protocol):
    """What has files: an open living sandbox, here or on a server."""

    @property
    def tree(self) -> BoxTree:
        """Its files; raises where they cannot be reached now."""
        ...

    @property
    def home(self) -> str:
        """The home of its programs."""
        ...

    @property
    def disk(self) -> int:
        """The bytes that each of its folders may hold."""
        ...

    def require(self, feature: Feature, what: str) -> None:
        """Raises NotAvailable where it lacks a feature; `what`: that in words."""
        ...


class AsyncFiles:
    """The files of a living sandbox: `await box.files.read("notes.txt")`.

    A relative path is below /workspace, `~/` is the sandbox' home. Everything is done with the rights of the sandbox'
    programs, and what goes wrong is the `OSError` that they would get. No link is followed.
    """

    def __init__(self, machine: Callable[[], FileHolder]) -> None:
        """`machine`: returns the open sandbox, or raises the reason why there is none."""
        self._machine = machine

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. For one that is too large to be held, see `open`.

        Raises:
            OSError: what the sandbox' programs would get; EFBIG: it says to be larger than all disks of the sandbox.
        """
        async with self.open(path) as pieces:
            return b"".join([piece async for piece in bounded(pieces, self._most, path)])

    async def read_text(self, path: str) -> str:
        """Returns the content of a file as text; what is not UTF-8 is replaced."""
        return (await self.read(path)).decode("utf-8", "replace")

    async def write(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """Writes a file whole, and makes the folders above it. One that was there keeps its permissions.

        Args:
            path: its name.
            content: text, or bytes.
            mode: its permissions, such as 0o755.
        """
        if not isinstance(content, bytes | str):
            raise errors.InvalidRequest(f"content: must be bytes or text, not {type(content).__name__}")
        if mode is not None and not 0 <= mode <= 0o777:
            raise errors.InvalidRequest(f"mode: must be permissions, 0 to 0o777 (got {mode:#o})")
        await self._tree.write(self._whole(path), content.encode() if isinstance(content, str) else content, mode)

    def open(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file, and gives its content piece by piece: `async with box.files.open("big") as pieces`."""
        return self._tree.reading(self._whole(path))

    async def list(self, path: str = ".", depth: int = 1) -> tuple[FileStat, ...]:
        """Lists a folder, sorted by path: its entries (`depth` 1), those below them (2), and so on."""
        if not 1 <= depth <= _MAX_DEPTH:
            raise errors.InvalidRequest(f"depth: must be 1 to {_MAX_DEPTH} (got {depth})")
        return await self._tree.list(self._whole(path), depth)

    async def stat(self, path: str) -> FileStat:
        """Tells what is there: its kind, size, permissions and time; of a link, the link itself."""
        return await self._tree.stat(self._whole(path))

    async def exists(self, path: str) -> bool:
        """Tells whether there is something of that name."""
        try:
            await self._tree.stat(self._whole(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def make_dir(self, path: str) -> bool:
        """Makes a folder and those above it; False: it was there."""
        return await self._tree.make_dir(self._whole(path))

    async def move(self, path: str, to: str) -> None:
        """Renames a file or a folder; a file that was there is replaced."""
        await self._tree.move(self._whole(path), self._whole(to))

    async def copy(self, path: str, to: str) -> None:
        """Copies a file, a folder with all that it holds, or a link as such."""
        await self._tree.copy(self._whole(path), self._whole(to))

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds."""
        await self._tree.remove(self._whole(path))

    def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[FileChange]]:  # fmt: skip
        """Tells what changes in a folder from now on: `async with box.files.watch() as changes`.

        Args:
            path: the folder.
            recursive: whether changes in the folders below it are told, too.
        """
        self._machine().require("watch", "does not tell changes of files")
        return self._tree.watch(self._whole(path), recursive=recursive)

    def pack(self, *paths: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Gives files and folders as one tar archive, piece by piece. It is as hostile as whoever wrote the files."""
        return self._tree.packing([self._whole(path) for path in paths or (".",)])

    async def unpack(self, path: str, archive: AsyncIterator[bytes]) -> None:
        """Lays the files of a tar archive below a folder.

        Raises:
            InvalidRequest: a name in it leads out of the folder, or it holds a device or a pipe.
        """
        try:
            await self._tree.unpack(self._whole(path), archive)
        except ValueError as error:
            raise errors.InvalidRequest(f"archive: {error}", fix="pack plain files and folders") from None

    async def upload(self, local: StrPath, path: str = ".") -> None:
        """Copies a file of this machine to `path`, or all that is in a folder of it into the folder `path`.

        Links are copied as links; pipes, sockets and devices are left out.

        Raises:
            OSError: it cannot be read here, or not written there.
        """
        whole, place = self._whole(path), os.fspath(local)
        if await anyio.to_thread.run_sync(os.path.isdir, place):
            await self.unpack(whole, portal.in_threads(archives.packed(place)))
            return
        folder, _, name = whole.rpartition("/")
        if await self.exists(whole) and (await self.stat(whole)).kind == "folder":
            folder, name = whole, os.path.basename(place)
        await self.unpack(folder or "/", portal.in_threads(archives.packed(place, name)))

    async def download(self, path: str, local: StrPath) -> tuple[str, ...]:
        """Copies a file of the sandbox to `local`, or all that is in a folder of it into the folder `local`.

        Only regular files and folders leave a sandbox, with ordinary permissions.

        Returns:
            What was left out, and why.

        Raises:
            OSError: it cannot be read there, or not written here.
        """
        whole, place = self._whole(path), os.fspath(local)
        if (await self.stat(whole)).kind != "folder":
            async with self.open(whole) as pieces:
                some = bounded(pieces, self._most, path)
                await archives.in_thread(partial(_save, place, whole.rpartition("/")[2]), some)
            return ()
        most = self._most
        try:
            async with self.pack(whole) as pieces:
                return await archives.in_thread(
                    lambda packed: archives.unpacked(packed, place, whole.strip("/"), most), pieces
                )
        except ValueError as error:
            raise errors.ExecutionFailed(f"{path}: the sandbox gave a bad archive: {error}") from None

    @property
    def _tree(self) -> BoxTree:
        return self._machine().tree

    @property
    def _most(self) -> int:
        """Bytes that all its disks have together: a file of more is a sparse one."""
        return _DISKS * self._machine().disk

    def _whole(self, path: str) -> str:
        if not isinstance(path, str):
            raise errors.InvalidRequest(f"path: must be text, not {type(path).__name__}")
        try:
            return whole_path(path, self._machine().home)
        except ValueError as error:
            raise errors.InvalidRequest(f"path: {error}") from None


class Files:
    """The files of a living sandbox: `box.files.read("notes.txt")`. See `AsyncFiles`."""

    def __init__(self, core: AsyncFiles) -> None:
        """Wraps the async one: `Sandbox.files` makes it."""
        self._core = core

    def read(self, path: str) -> bytes:
        """Returns the content of a file. For one that is too large to be held, see `open`."""
        return portal.call(self._core.read, path)

    def read_text(self, path: str) -> str:
        """Returns the content of a file as text; what is not UTF-8 is replaced."""
        return portal.call(self._core.read_text, path)

    def write(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """Writes a file whole, and makes the folders above it: see `AsyncFiles.write`."""
        portal.call(self._core.write, path, content, mode)

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Opens a file for reading, however large it is: `with box.files.open("big") as file: file.read(100)`."""
        with portal.reading(self._core.open(path)) as pieces, io.BufferedReader(_Pieces(pieces), _READ_BYTES) as file:
            yield cast(BinaryIO, file)

    def list(self, path: str = ".", depth: int = 1) -> tuple[FileStat, ...]:
        """Lists a folder, sorted by path: its entries (`depth` 1), those below them (2), and so on."""
        return portal.call(self._core.list, path, depth)

    def stat(self, path: str) -> FileStat:
        """Tells what is there: its kind, size, permissions and time; of a link, the link itself."""
        return portal.call(self._core.stat, path)

    def exists(self, path: str) -> bool:
        """Tells whether there is something of that name."""
        return portal.call(self._core.exists, path)

    def make_dir(self, path: str) -> bool:
        """Makes a folder and those above it; False: it was there."""
        return portal.call(self._core.make_dir, path)

    def move(self, path: str, to: str) -> None:
        """Renames a file or a folder; a file that was there is replaced."""
        portal.call(self._core.move, path, to)

    def copy(self, path: str, to: str) -> None:
        """Copies a file, a folder with all that it holds, or a link as such."""
        portal.call(self._core.copy, path, to)

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds."""
        portal.call(self._core.remove, path)

    @contextmanager
    def watch(self, path: str = ".", *, recursive: bool = False) -> Iterator[Iterator[FileChange]]:
        """Tells what changes in a folder from now on: `with box.files.watch() as changes: for change in changes`."""
        with portal.enter(self._core.watch(path, recursive=recursive)) as changes:
            yield portal.iterating(changes)

    def pack(self, *paths: str) -> AbstractContextManager[Iterator[bytes]]:
        """Gives files and folders as one tar archive, piece by piece. It is as hostile as whoever wrote the files."""
        return portal.reading(self._core.pack(*paths))

    def unpack(self, path: str, archive: Iterator[bytes]) -> None:
        """Lays the files of a tar archive below a folder: see `AsyncFiles.unpack`."""
        portal.call(self._core.unpack, path, portal.in_threads(archive))

    def upload(self, local: StrPath, path: str = ".") -> None:
        """Copies a file or a folder of this machine into the sandbox: see `AsyncFiles.upload`."""
        portal.call(self._core.upload, local, path)

    def download(self, path: str, local: StrPath) -> tuple[str, ...]:
        """Copies a file or a folder to this machine; returns what was left out: see `AsyncFiles.download`."""
        return portal.call(self._core.download, path, local)


async def bounded(pieces: AsyncIterator[bytes], most: int, path: str) -> AsyncIterator[bytes]:
    """Gives the pieces of a file; a guest can make one that is endless and takes no room.

    Raises:
        OSError: EFBIG: there are more bytes than it may have.
    """
    async for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise OSError(errno.EFBIG, "larger than all disks of the sandbox: open() it, and read what you need", path)
        yield piece


def _save(place: str, name: str, pieces: Iterator[bytes]) -> None:
    """Writes a file of this machine, whole or not at all."""
    target = os.path.join(place, name) if os.path.isdir(place) else place
    draft = os.path.join(os.path.dirname(target), f".belljar-{os.urandom(6).hex()}")
    try:
        with open(draft, "xb") as file:
            for piece in pieces:
                file.write(piece)
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


class _Pieces(io.RawIOBase):
    """Reads what comes in pieces as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
