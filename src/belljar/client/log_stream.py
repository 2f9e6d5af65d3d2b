"""Lines of a run as they come. A connection that breaks is opened again after the last number: nothing is lost, and
nothing comes twice.

`follow` pushes (WebSocket, or server-sent events where something in between does not let it through); `each` is pulled.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from pydantic import ConfigDict, Field, ValidationError

from belljar.client.transport import Unanswered, Wire, refusal
from belljar.core import errors
from belljar.core.result import Event
from belljar.core.values import MIB
from belljar.host.loops import lone_errors
from belljar.protocol.records import FINAL, LogLine

_QUIET = 60.0  # seconds; the server says something every 15, and answers a ping
_LASTING = 10.0  # seconds
_LARGEST = MIB  # of one message
_PARTS = frozenset(("stdout", "stderr"))


class Line(LogLine):
    """A line of a server that may be younger than we are."""

    model_config = ConfigDict(extra="ignore")
    partial: bool = Field(False, description="no end of line followed it")


Hear = Callable[[Line], Awaitable[None]]


class _Raised(Exception):
    """What a listener raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Patience:
    """How often in a row a connection may break that neither told anything nor lasted. A run that is under way is
    worth more of it than a request."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._attempt = 0
        self._seen = (lines.number, time.monotonic())

    async def lose(self, error: Unanswered) -> None:
        number, began = self._seen
        lasted = time.monotonic() - began > _LASTING
        self._attempt = 0 if self._lines.number > number or lasted else self._attempt + 1
        if self._attempt > 2 * self._lines.wire.retries:
            raise error
        await self._lines.wire.pause(self._attempt)
        self._seen = (self._lines.number, time.monotonic())


class Lines:
    """`number` is the last that was told."""

    def __init__(self, wire: Wire, run: str, after: int = 0) -> None:
        self.wire = wire
        self._run = run
        self._path = f"/api/sandbox/{run}/logs"
        self._sockets = True  # until something in between refuses one
        self.number = after

    async def follow(self, hear: Hear) -> None:
        """To the end of the run. What `hear` raises is raised here, whatever it is: it is no broken connection."""

        async def heard(line: Line) -> None:
            try:
                await hear(line)
            except Exception as error:
                raise _Raised(error) from None

        patience = _Patience(self)
        while True:
            try:
                await (self._by_socket(heard) if self._sockets else self._by_events(heard))
                return
            except Unanswered as error:
                await patience.lose(error)
            except _Raised as raised:
                raise raised.error from raised.error.__cause__

    async def each(self) -> AsyncGenerator[Line, None]:
        """The same, to be pulled; between two lines nothing of ours is under way."""
        patience = _Patience(self)
        while True:
            try:
                async with aclosing(self._events()) as lines:
                    async for line in lines:
                        yield line
                return
            except Unanswered as error:
                await patience.lose(error)

    def _take(self, text: str) -> Line | None:
        """A line that is new to us."""
        try:
            line = Line.model_validate_json(text)
        except ValidationError:
            raise errors.NotAvailable(f"{self.wire.url} sent no line of output", fix="is it a Belljar?") from None
        if line.number <= self.number:
            return None
        self.number = line.number
        return line

    # --- WebSocket ---

    async def _by_socket(self, hear: Hear) -> None:
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        refused = ended = False
        try:
            with self.wire.telling(), lone_errors():
                async with self.wire.pool.websocket(
                    self._path, params={"after": self.number}, max_message_size_bytes=_LARGEST,
                    keepalive_ping_interval_seconds=20.0, keepalive_ping_timeout_seconds=_QUIET,
                ) as socket:  # fmt: skip
                    ended = await self._listen(socket, hear)
        except WebSocketUpgradeError:
            refused = True
        except HTTPXWSException:
            pass  # which `ended` tells
        if refused:
            await self.wire.ask("GET", f"/api/sandbox/runs/{self._run}")  # says why, if it is us who are refused
            self._sockets = False
            await self._by_events(hear)
        elif not ended:
            raise Unanswered(f"the connection to {self.wire.url} broke", sent=True)

    async def _listen(self, socket: Any, hear: Hear) -> bool:
        """Whether the run has ended: the server then says goodbye with its state."""
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

    async def _by_events(self, hear: Hear) -> None:
        async with aclosing(self._events()) as lines:
            async for line in lines:
                await hear(line)

    async def _events(self) -> AsyncGenerator[Line, None]:
        import httpx2

        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(self.number)}
        timeout = httpx2.Timeout(self.wire.timeout, read=_QUIET)
        with self.wire.telling():
            async with self.wire.pool.stream("GET", self._path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(response, self.wire.url)
                async for event in httpx2.EventSource(response, max_event_size=_LARGEST):
                    if event.event == "end" and event.data in FINAL:
                        return
                    if event.event == "message" and event.data and (line := self._take(event.data)):
                        yield line
        raise Unanswered(f"the connection to {self.wire.url} broke", sent=True)


def event_of(line: Line) -> Event:
    """As the library tells it: a line with its end."""
    if line.stream == "gap":
        return Event(run=line.container_id, seq=line.number, kind="limit", at=line.timestamp, text=line.message)
    end = "\n" if line.stream in _PARTS and not line.partial else ""
    return Event(run=line.container_id, seq=line.number, kind=line.stream, at=line.timestamp, text=line.message + end)
