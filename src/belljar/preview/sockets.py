"""WebSockets of previews: the browser's, and one to the server inside, message by message."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import wsproto
from anyio.abc import ByteStream
from wsproto import events

from belljar.host.loops import lone_errors
from belljar.preview.exchange import BROKEN, Failed, Hung, Patience, Receive, Send
from belljar.preview.headers import Headers

_READ_BYTES = 64 * 1024
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_MAX_REFUSAL_BYTES = 64 * 1024
_NORMAL, _GOING_AWAY, _FAILED, _TOO_LARGE = 1000, 1001, 1011, 1009
_LOST = (*BROKEN, wsproto.utilities.ProtocolError)


class Offer(NamedTuple):
    """What a browser asks for, as it is sent on."""

    host: str
    target: str
    headers: Headers
    protocols: list[str]


async def bridge(stream: ByteStream, offer: Offer, receive: Receive, send: Send, patience: Patience) -> None:
    """Opens a WebSocket inside for one that a browser asked for, and passes on messages until one side has gone.

    Raises:
        Failed: nothing was answered yet, and nothing will be.
        Hung: one of both has gone.
    """
    wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    try:
        with anyio.move_on_after(patience.answer) as waiting:
            request = events.Request(
                host=offer.host, target=offer.target, extra_headers=offer.headers, subprotocols=offer.protocols
            )
            await stream.send(wire.send(request))
            accepted = await _consent(stream, wire)
    except (*_LOST, ValueError):
        raise Failed(502, "the server inside hung up, or speaks no WebSocket there") from None
    if waiting.cancelled_caught:
        raise Failed(504, f"the server inside has not answered within {patience.answer:g} seconds")
    cookies = [(bytes(name).lower(), bytes(value)) for name, value in accepted.extra_headers]
    cookies = [pair for pair in cookies if pair[0] == b"set-cookie"]
    await send({"type": "websocket.accept", "subprotocol": accepted.subprotocol, "headers": cookies})
    await _Bridge(stream, wire, receive, send, patience).run()


async def _consent(stream: ByteStream, wire: wsproto.WSConnection) -> events.AcceptConnection:
    """Waits until the server has opened it."""
    heard = 0
    while heard <= _MAX_REFUSAL_BYTES:
        data = await stream.receive(_READ_BYTES)
        heard += len(data)
        wire.receive_data(data)
        for event in wire.events():
            if isinstance(event, events.AcceptConnection):
                return event
            if isinstance(event, events.RejectConnection):
                raise Failed(event.status_code, "the server inside opens no WebSocket there")
    raise Failed(502, "the server inside says too much before it opens a WebSocket")


class _Bridge:
    def __init__(
        self, stream: ByteStream, wire: wsproto.WSConnection, receive: Receive, send: Send, patience: Patience
    ) -> None:
        self._stream = stream
        self._wire = wire
        self._receive = receive
        self._send = send
        self._patience = patience
        self._parts: list[Any] = []
        self._size = 0

    async def run(self) -> None:
        code, reason = _FAILED, "the server inside has gone"
        try:
            with lone_errors():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._from_browser)
                    code, reason = await self._from_inside()
                    tasks.cancel_scope.cancel()
        except _LOST:
            pass
        with anyio.move_on_after(self._patience.browser), suppress(OSError, RuntimeError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})

    async def _from_browser(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code", _NORMAL)
                with suppress(*_LOST), anyio.move_on_after(1):
                    close = events.CloseConnection(code if code not in (1005, 1006) else _GOING_AWAY)
                    await self._stream.send(self._wire.send(close))
                raise Hung("the browser has gone")
            data = message["text"] if message.get("bytes") is None else message["bytes"]
            await self._stream.send(self._wire.send(events.Message(data=data)))

    async def _from_inside(self) -> tuple[int, str]:
        """Passes on what comes; returns why no more does."""
        while True:
            for event in self._wire.events():
                if isinstance(event, events.Ping):
                    await self._stream.send(self._wire.send(event.response()))
                elif isinstance(event, events.CloseConnection):
                    with suppress(*_LOST):
                        await self._stream.send(self._wire.send(event.response()))
                    code = int(event.code or _NORMAL)
                    return (_NORMAL if code in (1005, 1006, 1015) else code), event.reason or ""
                elif isinstance(event, events.Message) and not await self._take(event):
                    return _TOO_LARGE, "a message of the server inside is too large"
            self._wire.receive_data(await self._stream.receive(_READ_BYTES))

    async def _take(self, event: events.Message[Any]) -> bool:
        """Collects a message, and passes it on when it is whole; False: it is too large."""
        self._parts.append(event.data)
        self._size += len(event.data)
        if self._size > _MAX_MESSAGE_BYTES:
            return False
        if event.message_finished:
            parts, self._parts, self._size = self._parts, [], 0
            key, whole = ("text", "".join(parts)) if isinstance(parts[0], str) else ("bytes", b"".join(parts))
            with anyio.move_on_after(self._patience.browser) as waiting:
                await self._send({"type": "websocket.send", key: whole})
            if waiting.cancelled_caught:
                raise Hung("the browser takes nothing more")
        return True
