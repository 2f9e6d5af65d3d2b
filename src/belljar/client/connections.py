"""Connections to one server: HTTP/1.1, kept open between requests, and used by one request at a time.

A general HTTP library takes a millisecond for each request, most of it for what a client of one server has no use for:
redirects, cookies, encodings. `log_stream`, which follows streams, uses one.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import anyio
import anyio.abc

from belljar.client.address import Address, open_stream
from belljar.client.framing import Answer, AnswerReader, Broken, Headers, lines_of, request_line
from belljar.core import errors

_MAX_IDLE = 20
_IDLE_SECONDS = 30.0
_READ_BYTES = 64 * 1024
_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, Broken)


class Unanswered(errors.NotAvailable):
    """The connection broke before there was an answer. `sent`: the server may have heard the question."""

    def __init__(self, message: str, *, sent: bool, fix: str = "") -> None:
        super().__init__(message, fix=fix or "is it running, and is this its address?")
        self.sent: bool = sent


class Question(NamedTuple):
    """What a server is asked: `target` is the path with its query."""

    method: str
    target: str
    headers: Headers
    body: bytes
    read_seconds: float


class Connections:
    """The connections of one event loop to one server."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._idle: deque[_Connection] = deque()  # the longest idle comes first

    async def ask(self, question: Question) -> Answer:
        """Sends a request once, and returns the answer, whatever it says.

        Raises:
            Unanswered: there was no connection, or it broke, or no answer came in time.
        """
        connection = await self._take() or await self._open()
        try:
            with self._translated_errors(sent=True):
                return await connection.ask(self._address, question, self._timeout)
        finally:
            if connection.reusable and len(self._idle) < _MAX_IDLE:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                await connection.close()

    async def close(self) -> None:
        """Closes those that are idle."""
        while self._idle:
            await self._idle.pop().close()

    async def _take(self) -> _Connection | None:
        """Returns the connection that was used last, if the server has not closed it."""
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since > _IDLE_SECONDS:
            await self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.hung_up:
                return connection
            await connection.close()
        return None

    async def _open(self) -> _Connection:
        with self._translated_errors(sent=False):
            return _Connection(await open_stream(self._address))

    @contextmanager
    def _translated_errors(self, *, sent: bool) -> Iterator[None]:
        """Raises errors of the connection as `Unanswered`, without their frames: those hold the key."""
        broken = ""
        try:
            yield
        except _BROKEN as error:
            broken = str(error) or type(error).__name__
        if broken:
            url = self._address.url
            told = f"{url} did not answer: {broken}" if sent else f"no connection to {url}: {broken}"
            raise Unanswered(told, sent=sent) from None


class _Connection:
    """One connection, on which one answer follows one question."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self.reusable = False
        self.idle_since = 0.0
        self._stream = stream
        self._socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)

    @property
    def hung_up(self) -> bool:
        """Whether the server closed it: nothing else is to be read while nothing was asked."""
        if not hasattr(select, "poll"):  # Windows
            return bool(select.select([self._socket], [], [], 0)[0])
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    async def ask(self, address: Address, question: Question, write_seconds: float) -> Answer:
        """Sends a request and returns the answer; afterwards `reusable` says whether another one may follow."""
        self.reusable = False
        content = _encode(address, question)
        with anyio.fail_after(write_seconds) as clock:
            with suppress(anyio.BrokenResourceError):  # a server may answer before it has all of it, and hang up
                await self._stream.send(content)
            reader = AnswerReader()
            answer: Answer | None = None
            while answer is None:
                clock.deadline = anyio.current_time() + question.read_seconds
                answer = reader.feed(await self._read())
        self.reusable = reader.reusable
        return answer

    async def _read(self) -> bytes:
        try:
            return await self._stream.receive(_READ_BYTES)
        except anyio.EndOfStream:
            return b""

    async def close(self) -> None:
        """Closes it at once."""
        self.reusable = False
        with anyio.CancelScope(shield=True), suppress(OSError):
            await anyio.aclose_forcefully(self._stream)


def _encode(address: Address, question: Question) -> bytes:
    """Returns the whole request: sent at once, it wakes the server once."""
    sized = question.body or question.method != "GET"
    length = b"content-length: %d\r\n" % len(question.body) if sized else b""
    first = request_line(question.method, address.target(question.target))
    return b"".join((first, address.lines, lines_of(question.headers), length, b"\r\n", question.body))
