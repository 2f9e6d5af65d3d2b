"""A WebSocket to a server, read and written as one likes: by wsproto, over the same streams as all requests.

One task of its own reads ahead, a few messages at most, so that the server's pings are answered while nobody receives;
nothing else of it is bound to a task, so a message may be received in another one than the last.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlencode

import anyio
import anyio.abc
import wsproto
from wsproto import events

from belljar.client.address import Address, open_stream
from belljar.client.connections import Unanswered
from belljar.client.framing import Answer
from belljar.core.values import MIB
from belljar.host.lifetime import LifetimeTask
from belljar.host.loops import lone_errors

_READ_BYTES = 64 * 1024
_MAX_MESSAGE_BYTES = MIB
_MAX_REFUSAL_BYTES = 64 * 1024
_AHEAD_MESSAGES = 16
_CLOSING_SECONDS = 2.0  # for the server to take what was sent, and say goodbye
_NORMAL = 1000
_LOST = (
    OSError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    wsproto.utilities.ProtocolError,
)


class Refused(Exception):
    """The server answered, and opened no WebSocket."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class WebSocketClosed(Exception):
    """No more messages come. `code` is what the server closed it with; None: the connection broke."""

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class WebSocket:
    """One open WebSocket."""

    def __init__(self, stream: anyio.abc.ByteStream, protocol: wsproto.WSConnection) -> None:
        """Is made by `open_web_socket`."""
        self._stream = stream
        self._protocol = protocol
        self._writing = anyio.Lock()
        self._ahead, self._messages = anyio.create_memory_object_stream[bytes | str](_AHEAD_MESSAGES)
        self._parts: list[bytes | str] = []
        self._end = WebSocketClosed(None, "the connection broke")
        self._closing = False
        self._over = anyio.Event()
        self._task = LifetimeTask(self._reading())

    async def begin(self) -> None:
        """Begins to read."""
        await self._task.open()

    async def receive(self) -> bytes | str:
        """Returns the next message.

        Raises:
            WebSocketClosed: there will be none.
        """
        try:
            return await self._messages.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise self._end from None

    async def send(self, message: bytes | str) -> None:
        """Sends a message, whole.

        Raises:
            WebSocketClosed: it is closed, or broke.
        """
        await self._send(events.BytesMessage(message) if isinstance(message, bytes) else events.TextMessage(message))

    async def close(self) -> None:
        """Says goodbye, and closes it. Closing twice does no harm."""
        first, self._closing = not self._closing, True
        with anyio.move_on_after(_CLOSING_SECONDS, shield=True):
            self._messages.close()
            if first and not self._over.is_set():
                with suppress(WebSocketClosed):
                    await self._send(events.CloseConnection(_NORMAL))
                await self._over.wait()
        with anyio.CancelScope(shield=True):
            await self._task.close()
            with suppress(OSError):
                await anyio.aclose_forcefully(self._stream)

    # --- beneath ---

    async def _send(self, event: events.Event) -> None:
        try:
            async with self._writing:
                await self._stream.send(self._protocol.send(event))
        except _LOST:
            raise self._end from None

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read)
                try:
                    yield
                finally:
                    tasks.cancel_scope.cancel()

    async def _read(self) -> None:
        try:
            await self._hear_all()  # what came with the server's consent
            while not self._over.is_set():
                self._protocol.receive_data(await self._stream.receive(_READ_BYTES))
                await self._hear_all()
        except (*_LOST, WebSocketClosed):
            pass
        finally:
            self._over.set()
            self._ahead.close()

    async def _hear_all(self) -> None:
        for event in self._protocol.events():
            if isinstance(event, events.Ping):
                await self._send(event.response())
            elif isinstance(event, events.CloseConnection):
                self._end = WebSocketClosed(event.code, event.reason or "the server closed it")
                with suppress(WebSocketClosed):
                    await self._send(event.response())
                self._over.set()
            elif isinstance(event, events.Message):
                await self._take(event)

    async def _take(self, event: events.Message[Any]) -> None:
        self._parts.append(event.data)
        if sum(map(len, self._parts)) > _MAX_MESSAGE_BYTES:
            self._end = WebSocketClosed(None, "the server sent a message that is too long")
            raise self._end
        if not event.message_finished:
            return
        parts, self._parts = self._parts, []
        message = parts[0] if len(parts) == 1 else type(parts[0])().join(parts)  # type: ignore[arg-type]
        if not self._closing:
            with suppress(anyio.BrokenResourceError):  # nobody receives any more
                await self._ahead.send(bytes(message) if isinstance(message, bytearray) else message)


async def open_web_socket(address: Address, path: str, params: Mapping[str, Any], seconds: float) -> WebSocket:
    """Opens a WebSocket.

    Raises:
        Refused: the server answered, and opened none.
        Unanswered: there was no connection, or it broke.
    """
    broken = ""
    try:
        stream = await open_stream(address)
    except _LOST as error:
        broken = str(error) or type(error).__name__
    if broken:  # outside of the block, since what was raised there holds the key
        raise Unanswered(f"no connection to {address.url}: {broken}", sent=False)
    protocol = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    try:
        with anyio.fail_after(seconds):
            await stream.send(protocol.send(_handshake(address, path, params)))
            await _consent(stream, protocol)
        socket = WebSocket(stream, protocol)
        await socket.begin()
        return socket
    except BaseException as error:
        with anyio.CancelScope(shield=True), suppress(OSError):
            await anyio.aclose_forcefully(stream)
        if not isinstance(error, _LOST):
            raise
        broken = str(error) or type(error).__name__
    raise Unanswered(f"{address.url} did not answer: {broken}", sent=True)


def _handshake(address: Address, path: str, params: Mapping[str, Any]) -> events.Request:
    headers = [(name, value) for name, value in address.headers if name.lower() != b"host"]
    host = next(value.decode() for name, value in address.headers if name.lower() == b"host")
    target = f"{path}?{urlencode(params, doseq=True)}" if params else path
    return events.Request(host=host, target=address.target(target), extra_headers=headers)


async def _consent(stream: anyio.abc.ByteStream, protocol: wsproto.WSConnection) -> None:
    """Waits until the server has opened it, or raises its refusal."""
    head: events.RejectConnection | None = None
    body = b""
    while len(body) <= _MAX_REFUSAL_BYTES:
        protocol.receive_data(await stream.receive(_READ_BYTES))
        for event in protocol.events():
            if isinstance(event, events.AcceptConnection):
                return
            if isinstance(event, events.RejectConnection):
                head = event
            if isinstance(event, events.RejectData):
                body += bytes(event.data)
            if head is not None and (not head.has_body or getattr(event, "body_finished", False)):
                raise Refused(_answer(head, body))
    raise OSError("its refusal is too long")


def _answer(head: events.RejectConnection, body: bytes) -> Answer:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head.headers}
    return Answer(head.status_code, headers, body)


def said(message: bytes | str) -> dict[str, Any]:
    """Returns what a text message says as JSON; nothing for one of bytes, or one that is no JSON."""
    if isinstance(message, bytes):
        return {}
    try:
        told = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
