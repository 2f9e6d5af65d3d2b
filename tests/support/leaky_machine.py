"""Living sandboxes without walls: their files, ports and processes are the host's, and pausing does nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from belljar.backends import inputs
from belljar.core.process import BoxProcess, FileChange, FileStat
from belljar.core.result import Usage
from belljar.core.values import WORKSPACE
from belljar.host.process_table import described

if TYPE_CHECKING:
    from leaky import LeakyBox


class LeakyTree:
    """Files by their names on the host, through whatever links there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _at(self, path: str) -> Path:
        return Path(f"{self._folder}{path.removeprefix(WORKSPACE)}" if path.startswith(WORKSPACE) else path)

    async def stat(self, path: str) -> FileStat:
        facts = self._at(path).stat()
        kind = "folder" if self._at(path).is_dir() else "file"
        return FileStat(path=path, kind=kind, size=facts.st_size, mode=facts.st_mode & 0o7777, modified=facts.st_mtime)

    async def list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        found = []
        for entry in sorted(os.listdir(self._at(path))):
            try:
                found.append(await self.stat(f"{path}/{entry}"))
            except OSError:
                continue
            if found[-1].kind == "folder" and depth > 1 and len(found) < 1000:
                found += await self.list(f"{path}/{entry}", depth - 1)
        return tuple(found)

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return inputs.whole(self._at(path).read_bytes())

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        self._at(path).parent.mkdir(parents=True, exist_ok=True)
        self._at(path).write_bytes(content)

    async def make_dir(self, path: str) -> bool:
        self._at(path).mkdir(parents=True)
        return True

    async def move(self, path: str, to: str) -> None:
        os.rename(self._at(path), self._at(to))

    async def copy(self, path: str, to: str) -> None:
        copy = shutil.copytree if self._at(path).is_dir() else shutil.copy
        copy(self._at(path), self._at(to))  # type: ignore[operator]

    async def remove(self, path: str) -> None:
        self._at(path).unlink()

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[FileChange]]:
        raise OSError(0, "nothing is watched")
        yield

    @asynccontextmanager
    async def packing(self, paths: Sequence[str]) -> AsyncIterator[AsyncIterator[bytes]]:
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w", dereference=True) as archive:
                for path in paths:
                    archive.add(self._at(path), path.strip("/"))
            file.seek(0)
            async with inputs.whole(file.read()) as pieces:
                yield pieces

    async def unpack(self, path: str, archive: AsyncIterator[bytes]) -> None:
        with tempfile.TemporaryFile() as file:
            async for piece in archive:
                file.write(piece)
            file.seek(0)
            self._at(path).mkdir(parents=True, exist_ok=True)
            try:
                with tarfile.open(fileobj=file) as packed:
                    packed.extractall(self._at(path), filter="fully_trusted")
            except (tarfile.TarError, KeyError) as error:
                raise OSError(0, str(error)) from None


class LeakyLife:
    """What makes a leaky box a living one."""

    own_folders: tuple[str, ...] = ()
    tree: LeakyTree

    async def processes(self: LeakyBox) -> tuple[BoxProcess, ...]:  # type: ignore[misc]
        found = (described(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return tuple(one for one in found if one)

    async def listens(self, port: int) -> bool:
        try:
            async with await anyio.connect_tcp("127.0.0.1", port):
                return True
        except OSError:
            return False

    async def dial(self, port: int) -> ByteStream:
        return await anyio.connect_tcp("127.0.0.1", port)

    async def pause(self) -> None:
        """Says that it did."""

    async def resume(self) -> None:
        """Says that it did."""

    async def measure(self) -> Usage | None:
        return None


async def signalled(pid: int, number: int) -> None:
    os.kill(pid, signal.Signals(number))


async def resized(size: object) -> None:
    await asyncio.sleep(0)
