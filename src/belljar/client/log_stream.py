"""Follows the output of a run on a server. A connection that breaks is opened again after the number of the last line:
none is lost, and none comes twice.

`follow` pushes (WebSocket, or server-sent events where something in between does not let it through); `each` is pulled.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from pydantic import ValidationError

from belljar.client.connections import Unanswered
from belljar.client.framing import Answer
from belljar.client.transport import Transport, refusal
from belljar.core import errors
from belljar.core.result import Event
from belljar.core.values import MIB
from belljar.host.loops import lone_errors
from belljar.protocol.records import FINAL, LogLine

_QUIET_SECONDS = 60.0  # the server says something every 15, and answers a ping
_LASTING_SECONDS = 10.0  # a connection that held this long was a good one
_MAX_MESSAGE_BYTES = MIB
_PARTS = frozenset(("stdout", "stderr"))


LineCallback = Callable[[LogLine], Awaitable[None]]


class _ListenerError(Exception):
    """Carries what a listener raised past the errors of the connection."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Patience:
    """Counts how often in a row a connection broke that neither told anything nor lasted, and gives up in the end."""

    def __init__(self, lines: LogFollower) -> None:
        self._lines = lines
        self._attempt = 0
        self._seen = (lines.number, time.monotonic())

    async def lose(self, error: Unanswered) -> None:
        number, began = self._seen
        lasted = time.monotonic() - began > _LASTING_SECONDS
        self._attempt = 0 if self._lines.number > number or lasted else self._attempt + 1
        if self._attempt > 2 * self._lines.transport.retries:
            raise error
        await self._lines.transport.pause(self._attempt)
        self._seen = (self._lines.number, time.monotonic())


class LogFollower:
    """Follows the numbered lines of one run to its end.

    Attributes:
        number: the last line that was told.
    """

    def __init__(self, transport: Transport, run: str, after: int = 0) -> None:
        self.transport: Transport = transport
        self._run = run
        self._path = f"/api/sandbox/{run}/logs"
        self._sockets = True  # until something in between refuses one
        self.number: int = after

    async def follow(self, hear: LineCallback) -> None:
        """Calls `hear` with each line to the end of the run. What it raises is raised here, whatever it is."""

        async def heard(line: LogLine) -> None:
            try:
                await hear(line)
            except Exception as error:
                raise _ListenerError(error) from None

        patience = _Patience(self)
        while True:
            try:
                await (self._by_socket(heard) if self._sockets else self._by_events(heard))
                return
            except Unanswered as error:
                await patience.lose(error)
            except _ListenerError as raised:
                raise raised.error from raised.error.__cause__

    async def each(self) -> AsyncGenerator[LogLine, None]:
        """Yields each line to the end of the run; between two lines nothing of ours is under way."""
        patience = _Patience(self)
        while True:
            try:
                async with aclosing(self._events()) as lines:
                    async for line in lines:
                        yield line
                return
            except Unanswered as error:
                await patience.lose(error)

    def _take(self, text: str) -> LogLine | None:
        """Returns the line, or None if it was told before."""
        try:
            line = LogLine.model_validate_json(text, extra="ignore")  # a server may be younger than its client
        except ValidationError:
            raise errors.NotAvailable(f"{self.transport.url} sent no line of output", fix="is it a Belljar?") from None
        if line.number <= self.number:
            return None
        self.number = line.number
        return line

    # --- WebSocket ---

    async def _by_socket(self, hear: LineCallback) -> None:
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        refused = ended = False
        try:
            with self.transport.translated_errors(), lone_errors():
                async with self.transport.streams.websocket(
                    self._path, params={"after": self.number}, max_message_size_bytes=_MAX_MESSAGE_BYTES,
                    keepalive_ping_interval_seconds=20.0, keepalive_ping_timeout_seconds=_QUIET_SECONDS,
                ) as socket:  # fmt: skip
                    ended = await self._listen(socket, hear)
        except WebSocketUpgradeError:
            refused = True
        except HTTPXWSException:
            pass  # which `ended` tells
        if refused:
            await self.transport.ask("GET", f"/api/sandbox/runs/{self._run}")  # says why, if it is us who are refused
            self._sockets = False
            await self._by_events(hear)
        elif not ended:
            raise Unanswered(f"the connection to {self.transport.url} broke", sent=True)

    async def _listen(self, socket: Any, hear: LineCallback) -> bool:
        """Tells the lines, and returns whether the run has ended: the server then closes with its state."""
        from httpx2.websockets import HTTPXWSException, WebSocketDisconnect

        while True:
            try:
                text = await socket.receive_text()
            except WebSocketDisconnect as end:
                return end.code == 1000 and end.reason in FINAL
            except (HTTPXWSException, anyio.EndOfStream, anyio.ClosedResourceError):
                return False
            if line := self._take(text):
                await hear(line)

    # --- server-sent events ---

    async def _by_events(self, hear: LineCallback) -> None:
        async with aclosing(self._events()) as lines:
            async for line in lines:
                await hear(line)

    async def _events(self) -> AsyncGenerator[LogLine, None]:
        import httpx2

        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(self.number)}
        timeout = httpx2.Timeout(self.transport.timeout, read=_QUIET_SECONDS)
        with self.transport.translated_errors():
            async with self.transport.streams.stream("GET", self._path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    content = await response.aread()
                    raise refusal(Answer(response.status_code, response.headers, content), self.transport.url)
                async for event in httpx2.EventSource(response, max_event_size=_MAX_MESSAGE_BYTES):
                    if event.event == "end" and event.data in FINAL:
                        return
                    if event.event == "message" and event.data and (line := self._take(event.data)):
                        yield line
        raise Unanswered(f"the connection to {self.transport.url} broke", sent=True)


def event_of(line: LogLine) -> Event:
    """Returns a line as the event that the library has for it: with its end of line."""
    if line.stream == "gap":
        return Event(run=line.container_id, seq=line.number, kind="limit", at=line.timestamp, text=line.message)
    end = "\n" if line.stream in _PARTS and not line.partial else ""
    return Event(run=line.container_id, seq=line.number, kind=line.stream, at=line.timestamp, text=line.message + end)
