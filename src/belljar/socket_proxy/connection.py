"""One side of a conversation over HTTP, and the ways in which bytes go from one side to the other."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import h11
from anyio.abc import SocketAttribute, UNIXSocketStream

from belljar.socket_proxy.rules import CallRefused

IDLE_SECONDS = 120.0  # until a client says the next thing
LOOK_SECONDS = 0.25  # between two looks whether a client is still there
CHUNK_BYTES = 1 << 16
LOST = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.ProtocolError)
_DRAIN_BYTES = 4 << 20  # of a refused request that are read, so that the refusal is heard
_DRAIN_SECONDS = 2
_MAX_HEAD_BYTES = 32_768


class HttpConnection:
    """One side of a conversation: a stream, and the parser for what comes over it."""

    def __init__(self, stream: UNIXSocketStream, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.stream = stream
        self._socket: socket.socket = stream.extra(SocketAttribute.raw_socket)
        self.http: h11.Connection = h11.Connection(role, max_incomplete_event_size=_MAX_HEAD_BYTES)

    async def hear(self, seconds: float | None = None) -> Any:
        """The next event. Without a deadline only where the other side's silence means that it works."""
        while (event := self._event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                await self.say(h11.InformationalResponse(status_code=100, headers=[]))
            with anyio.fail_after(seconds):
                self.http.receive_data(await self.receive())
        return event

    async def receive(self) -> bytes:
        """What has come; empty at the end. anyio's own complains when it is cancelled just as something comes."""
        while True:
            with suppress(BlockingIOError):
                return self._socket.recv(CHUNK_BYTES)
            await anyio.wait_readable(self._socket)

    def _event(self) -> Any:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError as error:
            if self.http.our_role is h11.SERVER:
                raise
            raise OSError(f"its answer makes no sense: {error}") from None

    async def say(self, event: Any) -> None:
        """Sends an event of h11's."""
        if data := self.http.send(event):
            await self.stream.send(data)

    async def body(self, most: int) -> bytes:
        """Returns the whole body, or raises `CallRefused` if it is over `most` bytes."""
        held = bytearray()
        while isinstance(event := await self.hear(IDLE_SECONDS), h11.Data):
            held += event.data
            if len(held) > most:
                raise CallRefused(f"the body is over {most} bytes")
        return bytes(held)

    @property
    def early(self) -> bytes:
        """What came after the end of HTTP."""
        return bytes(self.http.trailing_data[0])

    async def going(self, *, half: bool = True) -> None:
        """Returns when the other side has hung up; half: is one that will say nothing more as good as gone?"""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP if half else 0)
        while True:
            if any(found & (select.POLLHUP | select.POLLERR | select.POLLRDHUP) for _, found in poll.poll(0)):
                return
            await anyio.sleep(LOOK_SECONDS)


async def send_request(
    engine: HttpConnection, method: str, target: str, body: Mapping[str, Any] | None, headers: list[tuple[bytes, bytes]]
) -> None:
    """Sends a whole request to the engine."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = [] if body is None else [(b"Content-Type", b"application/json")]
    length = [(b"Content-Length", b"%d" % len(data))] if body is not None or method == "POST" else []
    close = [] if any(name == b"Connection" for name, _ in headers) else [(b"Connection", b"close")]
    fields = [(b"Host", b"docker"), *kind, *length, *close, *headers]
    await engine.say(h11.Request(method=method, target=target, headers=fields))
    if data:
        await engine.say(h11.Data(data=data))
    await engine.say(h11.EndOfMessage())


async def send_stream(
    client: HttpConnection, engine: HttpConnection, target: str, headers: list[tuple[bytes, bytes]]
) -> None:
    """Sends a request with a body of any length on, as it comes from the client."""
    fields = [(b"Host", b"docker"), (b"Content-Type", b"application/x-tar"), (b"Transfer-Encoding", b"chunked")]
    await engine.say(h11.Request(method="POST", target=target, headers=[*fields, (b"Connection", b"close"), *headers]))
    while isinstance(event := await client.hear(IDLE_SECONDS), h11.Data):
        await engine.say(h11.Data(data=bytes(event.data)))
    await engine.say(h11.EndOfMessage())


def registry_headers(request: h11.Request) -> list[tuple[bytes, bytes]]:
    """Returns the headers with which a client logs in to a registry."""
    return [(name, value) for name, value in request.headers if name.startswith(b"x-registry-")]


async def tell(client: HttpConnection, status: int, why: str, body: bytes = b"") -> None:
    """An answer of our own, in the words of an engine. What the client still says is heard, and forgotten."""
    said = body or json.dumps({"message": why}).encode()
    fields = [("Content-Type", "application/json"), ("Content-Length", str(len(said))), ("Connection", "close")]
    await client.say(h11.Response(status_code=status, headers=fields))
    await client.say(h11.Data(data=said))
    await client.say(h11.EndOfMessage())
    with suppress(anyio.BrokenResourceError, OSError):
        await client.stream.send_eof()
    with suppress(*LOST), anyio.move_on_after(_DRAIN_SECONDS):
        rest = _DRAIN_BYTES
        while rest > 0 and (data := await client.receive()):
            rest -= len(data)


def response_head(response: Any) -> bytes:
    """Returns the status line and headers of a response, as bytes."""
    lines = [f"HTTP/1.1 {response.status_code} {response.reason.decode('latin-1')}".encode()]
    lines += [name.title() + b": " + value for name, value in response.headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


@asynccontextmanager
async def while_connected(client: HttpConnection) -> AsyncIterator[None]:
    """Ends what is inside when the client has hung up: an engine stops pulling when nobody listens any more."""

    async def watch() -> None:
        await client.going()
        tasks.cancel_scope.cancel()

    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            yield
        except Exception as error:  # else it would come out as a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure:
        raise failure
    if client.http.our_state not in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
        raise anyio.EndOfStream


async def tunnel(client: HttpConnection, engine: HttpConnection) -> None:
    """Until the engine has said all, or the client is gone. One that only ended its input still listens.

    No deadline: a guest may be silent for hours, and both sides are on this machine, whose kernel tells of a death.
    """

    async def carry(source: HttpConnection, target: HttpConnection) -> None:
        with suppress(*LOST):
            while data := await source.receive():
                await target.stream.send(data)

    async def outwards() -> None:
        await carry(engine, client)
        tasks.cancel_scope.cancel()

    async def inwards() -> None:
        await carry(client, engine)
        with suppress(*LOST):
            await engine.stream.send_eof()
        await client.going(half=False)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outwards)
        tasks.start_soon(inwards)
