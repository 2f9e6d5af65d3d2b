"""The only way out of a sandbox that was granted hosts: a filtering proxy on the host's side.

Inside there is no route and no name service, only a listening socket on the guest's own loopback, whose other
side is here. It takes `CONNECT host:port` and nothing else: names are judged against the list, resolved by us,
and refused if they lead to this machine or to an address that is not public, unless an administrator listed that
address with its port. TLS goes through unopened, so the list is of names the guest asked for: it does not stop a
listed host from serving another's content.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio
from anyio.abc import SocketStream, UNIXSocketStream

from belljar.core.addresses import HTTPS_PORT, Endpoint, IPAddress, forms, why_not_public
from belljar.core.model import ours
from belljar.core.request import Egress, Limits
from belljar.core.values import covers, few
from belljar.host.loops import accepted

PORT = 3128
_PROXY = f"http://127.0.0.1:{PORT}"
# What tells a guest's programs of it.
ENV = {name: _PROXY for word in ("http", "https", "all") for name in (f"{word}_proxy", f"{word}_proxy".upper())}
ENV |= {"no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1", "NODE_USE_ENV_PROXY": "1"}
DENIALS = 20  # at most are in a result; all are events
_REASON_CHARACTERS = 400  # of an HTTP status line: many clients show it and nothing else
_HEADER_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 120.0
_PAUSE_SECONDS = 0.1
_CHUNK_BYTES = 65_536
_NO_LIMITS = ours(Limits)()
_LOST = (TimeoutError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)
_TARGET = re.compile(rb"([A-Za-z0-9.-]{1,253}):(\d{1,5})")

Told = Callable[[str], Awaitable[None]]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class EgressDecision(NamedTuple):
    """Whether a guest may connect to a host, and if not, why, and what would help."""

    host: str
    port: int
    objection: str = ""  # empty: allowed
    fix: str = ""

    def refused(self, objection: str, fix: str) -> EgressDecision:
        """The same target, refused."""
        return self._replace(objection=objection, fix=fix)

    def words(self) -> str:
        """What is told of a refusal; `core.diagnose` reads it."""
        where = f"{self.host}:{self.port}" if self.port else self.host
        return f"network: {where} was refused: {self.objection} — {self.fix}"


async def resolve(host: str, port: int) -> Sequence[str]:
    """Looks up the addresses of a name, as the host sees them."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def judge(target: bytes, allowed: Egress, ports: Collection[int] = (HTTPS_PORT,)) -> EgressDecision:
    """Decides on `CONNECT target` by the target alone.

    Args:
        target: what the guest wrote.
        allowed: the hosts that it was granted.
        ports: those at which anything may be reached.

    Returns:
        The decision; where it allows a plain name of the list, the addresses behind that name are still to be judged.
    """
    match = _TARGET.fullmatch(target)
    if not match:
        text = target[:60].decode("ascii", "backslashreplace")
        return EgressDecision(text, 0, "only host names can be reached", "ask for a name of the list")
    found = EgressDecision(match[1].decode().lower().rstrip("."), int(match[2]))
    if re.fullmatch(r"[\d.]+", found.host):
        return found.refused("only host names can be reached, not addresses", "ask for a name of the list")
    if not any(covers(pattern, found.host) for pattern in allowed.hosts):
        return found.refused(f"it is not on the list ({few(allowed.hosts)})", f'allow it with net=["{found.host}"]')
    return found if found.port in ports else found.refused(*_wrong_port(ports))


def _wrong_port(ports: Collection[int]) -> tuple[str, str]:
    shown = " and ".join(map(str, sorted(ports)))
    plural = "ports" if len(ports) > 1 else "port"
    return f"only {plural} {shown} can be reached", "others are listed with an address in egress.private"


def _plain(target: bytes) -> EgressDecision:
    where = target[:100].decode("ascii", "backslashreplace")
    return EgressDecision(where, 0, "plain HTTP is not let out", "use https")


def judge_address(found: EgressDecision, address: str, private: Sequence[Endpoint]) -> EgressDecision:
    """Decides on one address of a name that was allowed."""
    itself, *_ = known = forms(address)
    if any(one.holds(itself, found.port) for one in private):
        return found
    if found.port != HTTPS_PORT:
        return found.refused(*_wrong_port((HTTPS_PORT,)))
    what = why_not_public(address) or ("this machine itself" if any(map(_is_own, known)) else "")
    shown = f"[{itself}]" if itself.version == 6 else str(itself)
    fix = f'if that is meant, an administrator lists "{shown}:{found.port}" in egress.private'
    return found.refused(f"it leads to {address}, which is not public but {what}", fix) if what else found


def _is_own(address: IPAddress) -> bool:
    """Whether an address is one of this machine's: then the kernel would send from it to itself. Nothing is sent."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), HTTPS_PORT))
        return str(probe.getsockname()[0]) == str(address)
    return False


class Proxy:
    """Serves the guest's connections until it is cancelled. `told` hears of every refusal."""

    def __init__(
        self,
        allowed: Egress,
        told: Told,
        limits: Limits = _NO_LIMITS,
        *,
        resolver: Resolve = resolve,
        private: Sequence[Endpoint] = (),
    ) -> None:
        """Serves nobody yet.

        Args:
            allowed: The hosts that were granted.
            told: Hears of every refusal.
            limits: How many connections at once (more wait), and how many bytes a second, each way.
            resolver: Looks up names.
            private: Addresses of private networks that names may lead to.
        """
        self._allowed = allowed
        self._told = told
        self._resolve = resolver
        self._private = private
        self._ports = frozenset((HTTPS_PORT, *(one.port for one in private)))
        self._slots = anyio.Semaphore(limits.net_connections)
        self._out, self._in = Pace(limits.net_bandwidth), Pace(limits.net_bandwidth)

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
        verdict = judge(target, self._allowed, self._ports) if method == b"CONNECT" else _plain(target)
        upstream = verdict if verdict.objection else await self._dial(verdict)
        if isinstance(upstream, EgressDecision):
            await self._refuse(guest, upstream)
            return
        async with upstream:
            await guest.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if early:
                await upstream.send(early)
            await _relay(guest, upstream, self._out, self._in)

    async def _dial(self, found: EgressDecision) -> SocketStream | EgressDecision:
        """A connection to the very address that was judged, or the reason why there is none."""
        last = found.refused("it has no address", "check the name")
        try:
            with anyio.fail_after(_CONNECT_SECONDS):
                for address in await self._resolve(found.host, found.port):
                    last = judge_address(found, address, self._private)
                    if not last.objection:
                        try:
                            return await anyio.connect_tcp(address, found.port)
                        except OSError as error:
                            last = _unreachable(found, error)
        except (OSError, TimeoutError) as error:
            return _unreachable(found, error)
        return last

    async def _refuse(self, guest: SocketStream, verdict: EgressDecision) -> None:
        words = verdict.words()
        await self._told(words)
        body = f"belljar: {words}\n".encode()
        reason = re.sub(r"[^ -~]", "-", words)[:_REASON_CHARACTERS]
        head = f"HTTP/1.1 403 {reason}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await guest.send(head.encode() + body)


def _unreachable(found: EgressDecision, error: Exception) -> EgressDecision:
    why = getattr(error, "strerror", None) or error or "no answer"
    return found.refused(f"it cannot be reached: {why}", "check the name, and try again")


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


class Pace:
    """Slows a flow down to a number of bytes a second; all that share it have that much together."""

    def __init__(self, bytes_a_second: int | None) -> None:
        self._rate = bytes_a_second
        self._free = 0.0  # when the next byte may go

    @property
    def most_bytes(self) -> int:
        """How much to take at once: never more than goes in a second."""
        return min(_CHUNK_BYTES, self._rate or _CHUNK_BYTES)

    async def wait(self, size: int) -> None:
        """Waits as long as this many bytes take."""
        if self._rate:
            now = anyio.current_time()
            self._free = max(now, self._free) + size / self._rate
            await anyio.sleep(self._free - now)


async def _relay(one: SocketStream, other: SocketStream, there: Pace, back: Pace) -> None:
    """Bytes both ways until both sides have said all, or nothing is said for too long."""

    async def pump(source: SocketStream, target: SocketStream, pace: Pace) -> None:
        try:
            with suppress(anyio.EndOfStream):
                while True:
                    with anyio.fail_after(_IDLE_SECONDS):
                        data = await source.receive(pace.most_bytes)
                    await pace.wait(len(data))
                    await target.send(data)
            await target.send_eof()
        except _LOST:  # caught here: out of a task group it would come as a group
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump, one, other, there)
        tasks.start_soon(pump, other, one, back)
