"""The files of a living sandbox, as whoever holds one asks for them: on this machine, or on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from belljar.core.process import FileChange, FileStat


class BoxTree(Protocol):
    """The files of a living box, by whole paths as the guest names them, and with the guest's rights.

    No link is followed. Each method raises the OSError that the guest would get.
    """

    async def stat(self, path: str) -> FileStat:
        """Tells what is there; of a link, the link itself."""
        ...

    async def list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        """Lists a folder, sorted by path: its entries (`depth` 1), those below them (2), and so on."""
        ...

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a regular file, and gives its content piece by piece."""
        ...

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        """Writes a file whole, and makes the folders above it. One that was there keeps its permissions."""
        ...

    async def make_dir(self, path: str) -> bool:
        """Makes a folder and those above it; False: it was there."""
        ...

    async def move(self, path: str, to: str) -> None:
        """Renames a file or a folder; a file that was there is replaced."""
        ...

    async def copy(self, path: str, to: str) -> None:
        """Copies a file, a folder with all that it holds, or a link as such."""
        ...

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds."""
        ...

    def watch(self, path: str, *, recursive: bool = False) -> AbstractAsyncContextManager[AsyncIterator[FileChange]]:
        """Tells changes below a folder as they happen (`watch` in `Capabilities.living`)."""
        ...

    def packing(self, paths: Sequence[str]) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Gives folders and files with all that they hold as one tar archive, piece by piece.

        Its names are whole paths without the leading slash. Links are kept as such; pipes, sockets and devices are
        left out. It is as hostile as the guest that wrote the files.
        """
        ...

    async def unpack(self, path: str, archive: AsyncIterator[bytes]) -> None:
        """Lays the files of a tar archive below a folder, with their modes and times, as the guest's own.

        A name that leads out of the folder, a device or a pipe is refused with the error of a bad archive (ValueError).
        """
        ...
