"""The only way out of a sandbox that was granted hosts: a filtering proxy on the host's side.

Inside there is no route and no name service, only a listening socket on the guest's own loopback, whose other
side is here. It takes `CONNECT host:port` and nothing else: names are judged against the list, resolved by us,
and refused if they lead to a private address. TLS goes through unopened, so the list is of names the guest
asked for: it does not stop a listed host from serving another's content.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio
from anyio.abc import SocketStream, UNIXSocketStream

from belljar.core.request import Egress
from belljar.host.loops import accepted

PORT = 3128
_PROXY = f"http://127.0.0.1:{PORT}"
# What tells a guest's programs of it.
ENV = {name: _PROXY for word in ("http", "https", "all") for name in (f"{word}_proxy", f"{word}_proxy".upper())}
ENV |= {"no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1", "NODE_USE_ENV_PROXY": "1"}
DENIALS = 20  # at most are in a result; all are events
_PORTS = frozenset({443})
_CONNECTIONS = 64
_HEADER_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 120.0
_PAUSE_SECONDS = 0.1
_LOST = (TimeoutError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)
_TARGET = re.compile(rb"([A-Za-z0-9.-]{1,253}):(\d{1,5})")

Told = Callable[[str], Awaitable[None]]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class EgressDecision(NamedTuple):
    """Whether a guest may connect to a host, and if not, why."""

    host: str
    port: int
    objection: str = ""  # empty: allowed


async def resolve(host: str, port: int) -> Sequence[str]:
    """Looks up the addresses of a name, as the host sees them."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def judge(target: bytes, allowed: Egress) -> EgressDecision:
    """Decides on `CONNECT target`: only a plain name on the list is allowed, and only for TLS."""
    match = _TARGET.fullmatch(target)
    if not match:
        return EgressDecision(target[:60].decode("ascii", "backslashreplace"), 0, "only host names can be reached")
    host, port = match[1].decode().lower().rstrip("."), int(match[2])
    if re.fullmatch(r"[\d.]+", host):
        return EgressDecision(host, port, "only host names can be reached, not addresses")
    if not any(_matches(host, pattern) for pattern in allowed.hosts):
        return EgressDecision(
            host, port, f"it is not on the list ({', '.join(sorted(allowed.hosts)) or 'which is empty'})"
        )
    if port not in _PORTS:
        return EgressDecision(host, port, "only port 443 can be reached")
    return EgressDecision(host, port)


def _plain(target: bytes) -> EgressDecision:
    return EgressDecision(target[:100].decode("ascii", "backslashreplace"), 0, "plain HTTP is not let out: use https")


def _matches(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


class Proxy:
    """Serves the guest's connections until it is cancelled. `told` hears of every refusal."""

    def __init__(self, allowed: Egress, told: Told, *, resolver: Resolve = resolve, private: bool = False) -> None:
        self._allowed = allowed
        self._told = told
        self._resolve = resolver
        self._private = private  # may names lead to private addresses? Only where a test says so.
        self._slots = anyio.Semaphore(_CONNECTIONS)

    async def serve(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        with listener:
            async with anyio.create_task_group() as tasks:
                while True:
                    await self._slots.acquire()  # first: each that is taken is a descriptor of this process
                    tasks.start_soon(self._attend, await accepted(listener, _PAUSE_SECONDS))

    async def _attend(self, connection: socket.socket) -> None:
        kind = UNIXSocketStream if connection.family is socket.AF_UNIX else SocketStream
        try:
            async with await kind.from_socket(connection) as guest:
                with anyio.fail_after(_HEADER_SECONDS):
                    request = await _request(guest)
                if request is not None:
                    await self._answer(guest, *request)
        except (*_LOST, anyio.EndOfStream):
            return
        finally:
            self._slots.release()

    async def _answer(self, guest: SocketStream, method: bytes, target: bytes, early: bytes) -> None:
        verdict = judge(target, self._allowed) if method == b"CONNECT" else _plain(target)
        upstream = verdict.objection or await self._dial(verdict)
        if isinstance(upstream, str):
            await self._refuse(guest, verdict._replace(objection=upstream))
            return
        async with upstream:
            await guest.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if early:
                await upstream.send(early)
            await _relay(guest, upstream)

    async def _dial(self, verdict: EgressDecision) -> SocketStream | str:
        """A connection to the very address that was judged, or why there is none."""
        try:
            with anyio.fail_after(_CONNECT_SECONDS):
                for address in await self._resolve(verdict.host, verdict.port):
                    if not self._private and not ipaddress.ip_address(address).is_global:
                        return f"it leads to {address}, which is not a public address"
                    return await anyio.connect_tcp(address, verdict.port)
        except (OSError, TimeoutError) as error:
            return f"it cannot be reached: {error or 'no answer'}"
        return "it has no address"

    async def _refuse(self, guest: SocketStream, verdict: EgressDecision) -> None:
        where = f"{verdict.host}:{verdict.port}" if verdict.port else verdict.host
        words = f"network: {where} was refused: {verdict.objection}"
        await self._told(words)
        body = f"belljar: {words}\n".encode()
        head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await guest.send(head.encode() + body)


async def _request(guest: SocketStream) -> tuple[bytes, bytes, bytes] | None:
    """Method, target and what already followed the header; None for what is not HTTP."""
    import h11  # here: most sandboxes are granted no host

    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=16_384)
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError:
            await guest.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return None
        if isinstance(event, h11.Request):
            return bytes(event.method), bytes(event.target), bytes(parser.trailing_data[0])
        if event is not h11.NEED_DATA:
            return None
        parser.receive_data(await guest.receive(4096))


async def _relay(one: SocketStream, other: SocketStream) -> None:
    """Bytes both ways until both sides have said all, or nothing is said for too long."""

    async def pump(source: SocketStream, target: SocketStream) -> None:
        try:
            with suppress(anyio.EndOfStream):
                while True:
                    with anyio.fail_after(_IDLE_SECONDS):
                        data = await source.receive()
                    await target.send(data)
            await target.send_eof()
        except _LOST:  # caught here: out of a task group it would come as a group
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump, one, other)
        tasks.start_soon(pump, other, one)
