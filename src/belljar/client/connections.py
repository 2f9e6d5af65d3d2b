"""Connections to one server: HTTP/1.1 by h11, kept open between requests, and used by one request at a time.

A general HTTP library takes a millisecond for each request, most of it for what a client of one server has no use for:
redirects, cookies, encodings. `log_stream`, which follows streams, uses one.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import anyio
import anyio.abc
import h11

from belljar.client.address import Address, Headers, open_stream
from belljar.core import errors

_MAX_IDLE = 20
_IDLE_SECONDS = 30.0
_READ_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 100 * 1024  # of an answer
_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.RemoteProtocolError)


class Unanswered(errors.NotAvailable):
    """The connection broke before there was an answer. `sent`: the server may have heard the question."""

    def __init__(self, message: str, *, sent: bool, fix: str = "") -> None:
        super().__init__(message, fix=fix or "is it running, and is this its address?")
        self.sent: bool = sent


class Answer(NamedTuple):
    """What a server answered. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


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
        """Raises errors of the connection as `Unanswered`, outside of their frames: those hold the key."""
        broken = ""
        try:
            yield
        except _BROKEN as error:
            broken = str(error) or type(error).__name__
        if broken:
            url = self._address.url
            raise Unanswered(
                f"{url} did not answer: {broken}" if sent else f"no connection to {url}: {broken}", sent=sent
            )


class _Connection:
    """One connection, on which one answer follows one question."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self.reusable = False
        self.idle_since = 0.0
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
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
        content = self._encode(address, question)
        with suppress(anyio.BrokenResourceError):  # a server may answer before it has all of it, and hang up
            with anyio.fail_after(write_seconds):
                await self._stream.send(content)
        answer = await self._receive(question.read_seconds)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.reusable = True
        return answer

    def _encode(self, address: Address, question: Question) -> bytes:
        """Returns the whole request: sent at once, it wakes the server once."""
        length = (b"content-length", str(len(question.body)).encode())
        headers = [
            *address.headers,
            *question.headers,
            *([length] if question.body or question.method != "GET" else []),
        ]
        head = h11.Request(method=question.method, target=address.target(question.target), headers=headers)
        parts = [self._http.send(head), self._http.send(h11.Data(data=question.body)) if question.body else b""]
        self._http.send(h11.EndOfMessage())
        return b"".join(part or b"" for part in parts)

    async def _receive(self, seconds: float) -> Answer:
        head: h11.Response | None = None
        body: list[bytes] = []
        while True:
            event: Any = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._read(seconds))
            elif isinstance(event, h11.Data):
                body.append(event.data)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                return Answer(head.status_code, headers, b"".join(body))
            elif not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                raise h11.RemoteProtocolError("it hung up")

    async def _read(self, seconds: float) -> bytes:
        with anyio.fail_after(seconds):
            try:
                return await self._stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                return b""

    async def close(self) -> None:
        """Closes it at once."""
        self.reusable = False
        with anyio.CancelScope(shield=True), suppress(OSError):
            await anyio.aclose_forcefully(self._stream)
