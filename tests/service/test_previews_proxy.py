"""The proxy of previews against servers and browsers that misbehave, with little patience."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from belljar.preview import proxy
from belljar.preview.backend import ApiBackend
from belljar.preview.connections import Idle
from belljar.preview.exchange import Patience
from belljar.preview.headers import SeenFrom
from belljar.preview.proxy import Glance

pytestmark = pytest.mark.anyio

_HASTE = Patience(connect=1.0, answer=0.3, browser=0.3)
_OUTSIDE = SeenFrom("http://bs-1.localhost:8080", "", 3000)
Serve = Callable[[SocketStream], Awaitable[None]]


class LocalPlace:
    """A server of the test's own."""

    backend: ApiBackend | None = None

    def __init__(self, port: int) -> None:
        self.open = 0
        self.dialled = 0
        self.idle = Idle()
        self._port = port

    async def dial(self) -> ByteStream:
        self.dialled += 1
        return await anyio.connect_tcp("127.0.0.1", self._port)

    def glance(self) -> Glance:
        return Glance("running")


class Browser:
    """What an ASGI server hands to the proxy for one request, and what it heard."""

    def __init__(
        self, method: str = "GET", *, takes: bool = True, body: tuple[bytes, ...] = (), **headers: str
    ) -> None:
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {
            "type": "http", "method": method, "path": "/", "raw_path": b"/", "query_string": b"", "headers": given,
            "server": ("127.0.0.1", 8080),
        }  # fmt: skip
        self.status = 0
        self.body = b""
        self.whole = False
        self.left = anyio.Event()
        self._takes = takes
        self._pieces = [*body]

    async def receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if not self._takes:
            await anyio.sleep_forever()
        self.body += message.get("body", b"")
        self.whole = not message.get("more_body", False)

    async def ask(self, place: LocalPlace) -> Browser:
        with anyio.fail_after(20):
            await proxy.serve(self.scope, self.receive, self.send, place, _OUTSIDE, _HASTE)
        return self


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[LocalPlace]:
    async def handle(stream: SocketStream) -> None:
        async with stream:
            await serve(stream)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        place = LocalPlace(listener.extra(SocketAttribute.local_port))
        yield place
        assert place.open == 0
        await place.idle.close()
        tasks.cancel_scope.cancel()


def answering(*pieces: bytes) -> Serve:
    async def serve(stream: SocketStream) -> None:
        await stream.receive()
        for piece in pieces:
            await stream.send(piece)

    return serve


async def test_a_server_that_never_answers_is_given_up() -> None:
    async def serve(stream: SocketStream) -> None:
        await anyio.sleep_forever()

    async with serving(serve) as place:
        assert (await Browser().ask(place)).status == 504


@pytest.mark.parametrize(
    "said",
    [b"", b"\0garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000 + b"\r\n\r\n",
     b"HTTP/1.1 101 Switch\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n"],
)  # fmt: skip
async def test_what_is_no_answer_is_a_bad_gateway(said: bytes) -> None:
    async with serving(answering(said)) as place:
        assert (await Browser().ask(place)).status == 502


async def test_a_port_at_which_nothing_listens_is_a_bad_gateway() -> None:
    async with serving(answering()) as place:
        pass
    assert (await Browser().ask(place)).status == 502


async def test_an_answer_that_is_cut_off_is_not_made_whole() -> None:
    for head in (b"Content-Length: 10\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"):
        async with serving(answering(b"HTTP/1.1 200 OK\r\n" + head)) as place:
            browser = await Browser().ask(place)
            assert (browser.status, browser.body, browser.whole) == (200, b"abc", False)


async def test_a_browser_that_takes_nothing_or_sends_nothing_is_let_go() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1000)) as place:
        assert not (await Browser(takes=False).ask(place)).whole
    async with serving(lambda stream: anyio.sleep_forever()) as place:
        assert (await Browser("POST", **{"content-length": "5"}).ask(place)).status in (0, 504)


async def test_a_browser_that_leaves_ends_the_request_inside() -> None:
    gone = anyio.Event()

    async def serve(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        try:
            await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            gone.set()

    async with serving(serve) as place:
        browser = Browser()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(browser.ask, place)
            with anyio.fail_after(10):
                while not browser.body:
                    await anyio.sleep(0.01)
                browser.left.set()
                await gone.wait()


async def test_a_connection_is_used_again_and_one_that_was_closed_meanwhile_costs_nobody_an_answer() -> None:
    async def serve(stream: SocketStream) -> None:
        for _ in range(3):
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serving(serve) as place:
        for _ in range(7):
            assert (await Browser().ask(place)).body == b"ok"
        assert place.dialled == 3  # after each three the server hung up
        assert (await Browser("POST", body=(b"x",), **{"content-length": "1"}).ask(place)).body == b"ok"
        assert place.dialled == 4  # what may not be done twice has a connection of its own


async def test_a_body_that_is_longer_than_it_was_said_to_be_reaches_nobody() -> None:
    heard = b""

    async def serve(stream: SocketStream) -> None:
        nonlocal heard
        async for piece in stream:
            heard += piece

    async with serving(serve) as place:
        browser = await Browser(
            "POST", body=(b"abcGET /smuggled HTTP/1.1\r\n\r\n", b""), **{"content-length": "3"}
        ).ask(place)
        assert browser.status in (0, 504) and b"smuggled" not in heard


async def test_an_early_refusal_of_a_large_body_is_passed_on() -> None:
    async def serve(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async with serving(serve) as place:
        pieces = tuple(b"x" * 65536 for _ in range(200))
        assert (await Browser("POST", body=pieces, **{"transfer-encoding": "chunked"}).ask(place)).status == 413


async def test_no_more_than_so_many_requests_are_under_way() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n")) as place:
        place.open = 256
        assert (await Browser().ask(place)).status == 503
        place.open = 0
