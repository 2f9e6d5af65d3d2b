"""WebSockets of living sandboxes: who may open one, how much it takes, how slowly it may be read, and when it ends."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NoReturn

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from belljar.core import errors
from belljar.host.loops import lone_errors
from belljar.protocol.living import MAX_FRAME_BYTES
from belljar.service.auth import gate
from belljar.service.http.dependencies import headers_of
from belljar.service.http.guard import problem
from belljar.service.http.streams import still_known
from belljar.service.sandboxes.held import HeldSandbox
from belljar.service.sandboxes.sandboxes import Sandboxes
from belljar.service.service import Service
from belljar.service.telemetry.log_lines import BEAT

OVER, GOING_AWAY, REFUSED, TOO_LARGE, FAILED = 1000, 1012, 1008, 1009, 1011  # codes of ends
_READ_SECONDS = 30.0  # that the other side may take to read one message
UNREAD_SECONDS = 600.0  # that what a client sent may wait until it is read inside
_CLOSE_SECONDS = 2.0
_MAX_REASON_BYTES = 120


class Joined:
    """One WebSocket of a sandbox. Until `opened` is entered, an error is told as the answer to its handshake."""

    def __init__(self, socket: WebSocket, sandboxes: Sandboxes, held: HeldSandbox, headers: Mapping[str, str]) -> None:
        self.held: HeldSandbox = held
        self._socket = socket
        self.sandboxes: Sandboxes = sandboxes
        self._service: Service = sandboxes.service
        self._headers = headers
        self._end: tuple[int, str] | None = None
        self.accepted: bool = False

    @asynccontextmanager
    async def opened(self, *beside: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Accepts it, and does its work in the block, until that ends or one of us has to go.

        Args:
            *beside: what is done meanwhile; what waits for messages ends the work when the client hangs up.
        """
        with _hanging_up():
            await self._socket.accept(subprotocol=self._service.access.subprotocol(self._headers))
        self.accepted = True
        try:
            with lone_errors():
                async with anyio.create_task_group() as tasks:
                    for work in (self._watch, *beside):
                        tasks.start_soon(self._beside, work, tasks.cancel_scope)
                    yield
                    tasks.cancel_scope.cancel()
        except errors.BelljarError as error:
            self._end = (FAILED if isinstance(error, errors.BackendError) else REFUSED, error.message)
        except WebSocketDisconnect:  # the client's, or our own: then `_end` says why
            pass
        await self._close(*(self._end or (OVER, "it is over")))

    async def _beside(self, work: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        try:
            await work()
        except WebSocketDisconnect:
            scope.cancel()

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message as text."""
        await self.send_text(json.dumps(message))

    async def send_text(self, text: str) -> None:
        """Sends text. One that nobody reads for long ends the connection."""
        await self._sent(self._socket.send_text(text))

    async def send_bytes(self, data: bytes, *, patiently: bool = False) -> None:
        """Sends bytes. What nobody reads for long ends the connection, but for who sends `patiently`."""
        await self._sent(self._socket.send_bytes(data), math.inf if patiently else _READ_SECONDS)

    async def tell_problem(self, error: errors.BelljarError) -> None:
        """Says what was wrong with a message; the connection goes on."""
        await self.tell({"problem": problem(error)})

    async def messages(self) -> AsyncIterator[bytes | str]:
        """Gives what the client sends; raises WebSocketDisconnect when it hangs up."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            found: bytes | str = message["text"] if message.get("bytes") is None else message["bytes"]
            if len(found) > MAX_FRAME_BYTES:
                self.end(TOO_LARGE, f"a message may have {MAX_FRAME_BYTES} bytes")
            yield found

    async def ignore_messages(self) -> None:
        """Takes what the client sends, and does nothing with it."""
        async for _ in self.messages():
            pass

    def end(self, code: int, reason: str) -> NoReturn:
        """Ends the connection from within."""
        self._end = (code, reason)
        raise WebSocketDisconnect(code)

    async def _sent(self, sending: Awaitable[None], seconds: float = _READ_SECONDS) -> None:
        with anyio.move_on_after(seconds), _hanging_up():
            await sending
            return
        self.end(REFUSED, "it was not read")

    async def _watch(self) -> None:
        """Ends the work when the server or the sandbox does, or the caller may not ask any more."""
        drained, closed = self._service.drain.drained, self.held.closed
        while True:
            with anyio.move_on_after(BEAT):
                await _first(drained, closed)
            if closed.is_set():
                self.end(OVER, "the sandbox has ended")
            if drained.is_set():
                self.end(GOING_AWAY, "the server goes away")
            if not await still_known(self._service, self._headers):
                self.end(REFUSED, "the key does not count any more")

    async def _close(self, code: int, reason: str) -> None:
        told = reason.encode()[:_MAX_REASON_BYTES].decode("utf-8", "ignore")
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True), suppress(WebSocketDisconnect), _hanging_up():
            await self._socket.close(code, told)


@asynccontextmanager
async def attached(socket: WebSocket, id: str, scope: Any) -> AsyncIterator[Joined]:
    """Lets a caller attach to a sandbox of theirs, which is in use meanwhile. Who hangs up is no error.

    Args:
        socket: what they connect with.
        id: the sandbox.
        scope: what they must be allowed to do.
    """
    sandboxes: Sandboxes = socket.app.state.sandboxes
    service, headers = sandboxes.service, headers_of(socket)
    caller = await gate.admit(service, headers, scope)
    async with sandboxes.used(id, caller) as held:
        with held.in_use(), sandboxes.attached.taken(caller.name), suppress(WebSocketDisconnect), lone_errors():
            yield Joined(socket, sandboxes, held, headers)


@contextmanager
def _hanging_up() -> Iterator[None]:
    """Raises what a socket says of a client that is gone as one thing: there are three words for it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise WebSocketDisconnect(1006, str(error)) from None


async def _first(*events: anyio.Event) -> None:
    """Waits until one of them is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
