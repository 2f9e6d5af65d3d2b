"""One request to a server inside, and its answer: streamed both ways by h11 over a connection without a network.

No piece waits in our memory for longer than the other side needs to take it, however large a body is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

import anyio
import h11

from belljar.host.loops import lone_errors
from belljar.preview.connections import ServerConnection
from belljar.preview.headers import Headers

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

_READ_BYTES = 64 * 1024
BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class Patience(NamedTuple):
    """Seconds that are waited: for a connection, for the headers of an answer, and for a browser to send or to take."""

    connect: float = 30.0
    answer: float = 120.0
    browser: float = 60.0


class Failed(Exception):
    """Nobody inside answered. `status` is what the browser is told, and the text says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Stale(Exception):
    """A connection that was used before had been closed meanwhile: nothing was answered, and another one may be."""


class Hung(Exception):
    """The browser has gone, or takes nothing more: there is nobody to answer."""


class AskedInside(NamedTuple):
    """A request as it is sent on."""

    method: bytes
    target: bytes
    headers: Headers
    has_body: bool


async def carry(
    connection: ServerConnection, asked: AskedInside, receive: Receive, send: Send,
    mended: Callable[[Headers], Headers], patience: Patience,
) -> None:  # fmt: skip
    """Sends a request over a connection, and its answer to the browser.

    Args:
        connection: it is used for nothing else meanwhile, and may be used again if this returns.
        asked: the request.
        receive: gives the body.
        send: takes the answer.
        mended: changes the headers of the answer.
        patience: how long is waited.

    Raises:
        Stale: the connection was used before, and is closed.
        Failed: nothing was answered yet, and nothing will be.
        Hung: the answer is not whole, and cannot become it.
    """
    one = _ServerExchange(connection, receive, send, mended, patience)
    try:
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                await one.ask(asked)
                tasks.start_soon(one.upload, asked.has_body)
                await one.answer()
                tasks.cancel_scope.cancel()
    except (*BROKEN, h11.RemoteProtocolError) as error:
        if one.started:
            raise Hung(str(error)) from None
        if connection.used and not one.heard:
            raise Stale from None
        raise Failed(502, "the server inside hung up, or what it answered is no HTTP") from None


class _ServerExchange:
    def __init__(
        self, connection: ServerConnection, receive: Receive, send: Send, mended: Callable[[Headers], Headers],
        patience: Patience,
    ) -> None:  # fmt: skip
        self.started = False
        self.heard = False
        self._stream = connection.stream
        self._receive = receive
        self._send = send
        self._mended = mended
        self._patience = patience
        self._wire = connection.wire

    async def ask(self, asked: AskedInside) -> None:
        try:
            head = self._wire.send(h11.Request(method=asked.method, target=asked.target, headers=asked.headers))
        except h11.LocalProtocolError as error:
            raise Failed(400, f"this request cannot be sent on: {error}") from None
        assert head is not None
        await self._stream.send(head if asked.has_body else head + (self._wire.send(h11.EndOfMessage()) or b""))

    async def upload(self, more: bool) -> None:
        """Sends the body as it comes, if there is one; afterwards waits for the browser to go away."""
        while True:
            with anyio.move_on_after(self._patience.browser if more else None) as waiting:
                message = await self._receive()
            if waiting.cancelled_caught or message["type"] == "http.disconnect":
                raise Hung("the browser has gone")
            if not more:
                continue
            more = bool(message.get("more_body"))
            try:
                await self._pass_on(message.get("body") or b"", last=not more)
            except BROKEN:  # who refuses a large body hangs up on it, and its answer says why
                return await anyio.sleep_forever()
            except h11.LocalProtocolError:
                raise Hung("the body is not as long as it was said to be") from None

    async def _pass_on(self, data: bytes, *, last: bool) -> None:
        if data:
            await self._stream.send(self._wire.send(h11.Data(data=data)) or b"")
        if last:
            end = self._wire.send(h11.EndOfMessage())
            if end:
                await self._stream.send(end)

    async def answer(self) -> None:
        with anyio.move_on_after(self._patience.answer) as waiting:
            head = await self._next()
            while isinstance(head, h11.InformationalResponse) and head.status_code != 101:
                head = await self._next()
        if waiting.cancelled_caught:
            raise Failed(504, f"the server inside has not answered within {self._patience.answer:g} seconds")
        if not isinstance(head, h11.Response):
            raise Failed(502, "the server inside hung up without an answer")
        headers = [*self._mended([(bytes(name), bytes(value)) for name, value in head.headers])]
        self.started = True
        await self._give({"type": "http.response.start", "status": head.status_code, "headers": headers})
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                await self._give({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await self._give({"type": "http.response.body", "body": b""})
                return
            else:
                raise Hung("the server inside hung up")

    async def _next(self) -> Any:
        while (event := self._wire.next_event()) is h11.NEED_DATA:
            try:
                data = await self._stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                data = b""
            self.heard = self.heard or bool(data)
            self._wire.receive_data(data)
        return event

    async def _give(self, message: AsgiMessage) -> None:
        with anyio.move_on_after(self._patience.browser) as waiting:
            await self._send(message)
        if waiting.cancelled_caught:
            raise Hung("the browser takes nothing more")
