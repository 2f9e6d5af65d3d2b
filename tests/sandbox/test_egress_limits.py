"""How much a guest may have of the network: connections at once, and bytes a second. The proxy itself, on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from belljar.core.addresses import endpoint
from belljar.core.request import Egress, Limits
from belljar.host.egress.access import NetworkAccess, Outside
from belljar.host.egress.proxy import Proxy

pytestmark = pytest.mark.anyio
SIZE = 300_000


async def _send_all(stream: SocketStream) -> None:
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):  # one test asks for nothing
        async with stream:
            await stream.receive()
            await stream.send(b"x" * SIZE)


async def _nowhere(words: str) -> None:
    raise AssertionError(words)


async def _here(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@asynccontextmanager
async def proxied(**limits: Any) -> AsyncIterator[tuple[int, int]]:
    """The ports of a proxy and of a server behind it, which answers anything with many bytes."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as server, anyio.create_task_group() as tasks:
        port = server.extra(SocketAttribute.local_port)
        tasks.start_soon(server.serve, _send_all)
        listener = socket.create_server(("127.0.0.1", 0))
        allowed = Egress(mode="listed", hosts=frozenset({"example.org"}))
        outside = Outside(_here, [endpoint(f"127.0.0.1:{port}")], tls="off")
        proxy = Proxy(NetworkAccess(allowed, outside), _nowhere, Limits(**limits))
        tasks.start_soon(proxy.serve, listener)
        yield listener.getsockname()[1], port
        tasks.cancel_scope.cancel()


async def connected(proxy: int, port: int) -> SocketStream:
    stream = await anyio.connect_tcp("127.0.0.1", proxy)
    await stream.send(f"CONNECT example.org:{port} HTTP/1.1\r\nHost: example.org\r\n\r\n".encode())
    return stream


async def fetched(proxy: int, port: int) -> int:
    """How many bytes came through."""
    size = 0
    async with await connected(proxy, port) as stream:
        assert b" 200 " in await stream.receive()
        await stream.send(b"all")
        try:
            while True:
                size += len(await stream.receive())
        except anyio.EndOfStream:
            return size


async def test_bytes_come_whole_and_no_faster_than_the_bandwidth_over_all_connections() -> None:
    async with proxied(net_bandwidth="200K") as (proxy, port):
        began, sizes = time.monotonic(), list[int]()

        async def fetch() -> None:
            sizes.append(await fetched(proxy, port))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            tasks.start_soon(fetch)
        spent = time.monotonic() - began
    assert sizes == [SIZE, SIZE]
    assert spent >= 0.9 * 2 * SIZE / (200 * 1024)


async def test_a_connection_beyond_the_limit_waits_until_another_is_closed() -> None:
    async with proxied(net_connections=1) as (proxy, port):
        first = await connected(proxy, port)
        assert b" 200 " in await first.receive()
        second = await connected(proxy, port)
        with anyio.move_on_after(0.3) as waited:
            await second.receive()
        assert waited.cancelled_caught, "it was answered beside the first"
        await first.aclose()
        with anyio.fail_after(60):
            assert b" 200 " in await second.receive()
        await second.aclose()
