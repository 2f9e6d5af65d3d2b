"""The files of a living sandbox on a server: a `BoxTree` over HTTP, with the errors that its programs would get."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

from pydantic import ValidationError

from belljar.client.connections import Unanswered
from belljar.client.runs import parse
from belljar.client.transport import Transport
from belljar.client.web_socket import WebSocket, WebSocketClosed
from belljar.core import errors
from belljar.core.process import FileChange, FileStat
from belljar.core.values import MIB
from belljar.protocol import file_errors
from belljar.protocol.living import FilePage, Made

_WHOLE_BYTES = 8 * MIB  # that are sent at once; more goes piece by piece
_PIECE_BYTES = 256 * 1024
_PAGE_ENTRIES = 10_000
_SLOW_SECONDS = 600.0  # that copying or removing a large folder may take


class RemoteTree:
    """The files of one sandbox of a server, by whole paths."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        """`sandbox`: the path of its API."""
        self._transport = transport
        self._path = f"{sandbox}/files"

    async def stat(self, path: str) -> FileStat:
        """Tells what is there; of a link, the link itself."""
        return parse(FileStat, await self._ask("GET", "/stat", path, params={"path": path}))

    async def list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        """Lists a folder, sorted by path: its entries (`depth` 1), those below them (2), and so on."""
        found: list[FileStat] = []
        asked: dict[str, Any] = {"path": path, "depth": depth, "limit": _PAGE_ENTRIES}
        while True:
            page = parse(FilePage, await self._ask("GET", "", path, params=asked))
            found += page.files
            if not (page.more and page.files):
                return tuple(found)
            asked["after"] = page.files[-1].path

    @asynccontextmanager
    async def reading(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Opens a regular file, and gives its content piece by piece."""
        with file_errors.raised(path):
            async with self._transport.download(f"{self._path}/content", {"path": path}) as pieces:
                yield pieces

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        """Writes a file whole, and makes the folders above it. One that was there keeps its permissions."""
        params = {"path": path} | ({} if mode is None else {"mode": f"{mode:o}"})
        if len(content) <= _WHOLE_BYTES:
            await self._ask("PUT", "/content", path, params=params, content=content)
            return
        with file_errors.raised(path):
            await self._transport.upload(f"{self._path}/content", _pieces(content), params, size=len(content))

    async def make_dir(self, path: str) -> bool:
        """Makes a folder and those above it; False: it was there."""
        return parse(Made, await self._ask("POST", "/make_dir", path, again=True, json={"path": path})).made

    async def move(self, path: str, to: str) -> None:
        """Renames a file or a folder; a file that was there is replaced."""
        await self._ask("POST", "/move", path, json={"path": path, "to": to})

    async def copy(self, path: str, to: str) -> None:
        """Copies a file, a folder with all that it holds, or a link as such."""
        await self._ask("POST", "/copy", path, json={"path": path, "to": to}, read=_SLOW_SECONDS)

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that it holds."""
        await self._ask("DELETE", "", path, again=False, params={"path": path}, read=_SLOW_SECONDS)

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[FileChange]]:
        """Tells changes below a folder; after a connection that broke, that some were missed."""
        follower = _Watch(self._transport, f"{self._path}/watch", path, recursive)
        await follower.open()
        try:
            async with aclosing(follower.changes()) as changes:
                yield changes
        finally:
            await follower.close()

    def packing(self, paths: Sequence[str]) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Gives folders and files with all that they hold as one tar archive, piece by piece."""
        return self._packing(list(paths))

    @asynccontextmanager
    async def _packing(self, paths: list[str]) -> AsyncIterator[AsyncIterator[bytes]]:  # type: ignore[valid-type]
        with file_errors.raised(", ".join(paths)):
            async with self._transport.download(f"{self._path}/archive", {"path": paths}) as pieces:
                yield pieces

    async def unpack(self, path: str, archive: AsyncIterator[bytes]) -> None:
        """Lays the files of a tar archive below a folder, with their modes and times, as the guest's own."""
        with file_errors.raised(path):
            await self._transport.upload(f"{self._path}/archive", archive, {"path": path})

    async def _ask(self, method: str, what: str, path: str, **options: Any) -> bytes:
        with file_errors.raised(path):
            return await self._transport.ask(method, self._path + what, **options)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    view = memoryview(content)
    for start in range(0, len(view), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


class _Watch:
    """Follows the changes of a folder; a connection that breaks is opened again."""

    def __init__(self, transport: Transport, api: str, path: str, recursive: bool) -> None:
        self._transport = transport
        self._api = api
        self._path = path
        self._asked: Mapping[str, str] = {"path": path, "recursive": "true" if recursive else "false"}
        self._socket: WebSocket | None = None

    async def open(self) -> None:
        """Returns when changes are told from now on."""
        with file_errors.raised(self._path):
            self._socket = await self._transport.web_socket(self._api, self._asked)
        try:
            await self._socket.receive()  # which says what is watched
        except WebSocketClosed as end:
            raise Unanswered(f"{self._transport.url}: {end}", sent=True) from None

    async def changes(self) -> AsyncGenerator[FileChange, None]:
        while self._socket is not None:
            try:
                message = await self._socket.receive()
            except WebSocketClosed as end:
                if end.code == 1000:
                    return
                await self.close()
                await self.open()
                yield FileChange(kind="missed", path=self._path)
                continue
            try:
                yield FileChange.model_validate_json(message, extra="ignore")
            except ValidationError:
                raise errors.NotAvailable(f"{self._transport.url} sent no change of a file") from None

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
