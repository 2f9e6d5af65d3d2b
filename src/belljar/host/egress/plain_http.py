"""Plain HTTP to listed hosts: one request for each connection, read strictly and written anew.

What two readers could take for different things is refused: a request that two hosts could be meant by, lengths that
contradict each other, folded lines, bare line feeds. After the body of the one request nothing more of the guest's is
passed on, so that nothing can hide behind it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import anyio

from belljar.host.egress.relay import LOST, Counted, OverCapError, Peer, Traffic, relay

MAX_HEAD_BYTES = 32_768
_MAX_HEADERS = 128
_MAX_LINE_BYTES = 256  # of a chunk's size
_MAX_TRAILER_BYTES = 8192
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]{1,16384}) HTTP/(1\.[01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_ABSOLUTE = re.compile(rb"(?i:http)://([^/?#@]{1,300})(/[^#]*|\?[^#]*)?")
_HOST = re.compile(rb"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(\d{1,5}))?")
_NOT_PASSED_ON = frozenset(
    (b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"te", b"http2-settings", b"upgrade")
)


class RefusedRequestError(ValueError):
    """A request that is not passed on; the message says why."""


class RequestHead(NamedTuple):
    """The head of a request, read."""

    method: bytes
    target: bytes  # as it was written
    version: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]

    @property
    def connects(self) -> bool:
        """Whether it asks for a tunnel."""
        return self.method == b"CONNECT"

    @property
    def host_and_path(self) -> tuple[bytes, bytes]:
        """The host it is for, with its port, and the path.

        Raises:
            RefusedRequestError: it names none, two of them, or one in a way that is not plain.
        """
        hosts = self.values(b"host")
        if len(hosts) > 1:
            raise RefusedRequestError("it has more than one Host header")
        match = _ABSOLUTE.fullmatch(self.target)
        if not match and not self.target.startswith(b"/") and self.target != b"*":
            raise RefusedRequestError("its target is neither a path nor an http:// address")
        named = match[1] if match else (hosts[0] if hosts else b"")
        where = _host_and_port(named)
        if hosts and _host_and_port(hosts[0]) != where:
            raise RefusedRequestError("its Host header is unlike the host that it is sent to")
        path = (match[2] or b"/") if match else self.target
        return where, path if path.startswith((b"/", b"*")) else b"/" + path


def _host_and_port(text: bytes) -> bytes:
    match = _HOST.fullmatch(text)
    if not match or not 0 < int(match[2] or 80) < 65536:
        raise RefusedRequestError("it does not say for which host it is")
    return match[1].lower().rstrip(b".") + b":%d" % int(match[2] or 80)


def read_head(data: bytes) -> RequestHead:
    """Reads the head of a request, up to its empty line.

    Raises:
        RefusedRequestError: it is not HTTP as everybody reads it.
    """
    if not data.endswith(b"\r\n\r\n") or b"\0" in data:
        raise RefusedRequestError("it is not HTTP")
    first, *lines = data[:-4].split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if not match:
        raise RefusedRequestError("its first line is not HTTP's")
    if len(lines) > _MAX_HEADERS:
        raise RefusedRequestError(f"it has more than {_MAX_HEADERS} headers")
    headers = []
    for line in lines:
        found = _HEADER.fullmatch(line)
        if not found:
            folded = line.startswith((b" ", b"\t"))
            raise RefusedRequestError("it has a folded header" if folded else "it has a header that cannot be read")
        headers.append((found[1].lower(), found[2]))
    return RequestHead(match[1], match[2], match[3], tuple(headers))


def body_length(head: RequestHead) -> int | None:
    """How long the body is; None: it comes in chunks.

    Raises:
        RefusedRequestError: two readers could take it for different lengths.
    """
    lengths, codings = head.values(b"content-length"), head.values(b"transfer-encoding")
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != b"chunked" or head.version != b"1.1":
            raise RefusedRequestError("its Transfer-Encoding and Content-Length do not go together")
        return None
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"\d{1,18}", lengths[0])):
        raise RefusedRequestError("its Content-Length is not one number")
    return int(lengths[0]) if lengths else 0


def written(head: RequestHead, where: bytes, path: bytes) -> bytes:
    """The request as it is sent on: for this host, and for one answer.

    Raises:
        RefusedRequestError: it would become another protocol than a WebSocket's.
    """
    upgrades = head.values(b"upgrade")
    if upgrades and [value.lower() for value in upgrades] != [b"websocket"]:
        raise RefusedRequestError("it asks for another protocol than websocket")
    own = [(b"host", where.removesuffix(b":80")), (b"connection", b"Upgrade" if upgrades else b"close")]
    own += [(b"upgrade", b"websocket")] if upgrades else []
    rest = [(name, value) for name, value in head.headers if name not in _NOT_PASSED_ON and name != b"host"]
    lines = [b"%s %s HTTP/1.1" % (head.method, path), *(b"%s: %s" % pair for pair in (*own, *rest))]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def exchange(head: bytes, length: int | None, guest: Peer, upstream: Peer, traffic: Traffic) -> None:
    """Sends one request on, and brings back what is answered, to its end.

    Args:
        head: of the request, as it is sent.
        length: of its body; None: it comes in chunks.
        guest: whose body comes from here.
        upstream: who answers.
        traffic: counts both.

    Raises:
        OverCapError: the bytes that may be carried in all are used up.
    """
    await traffic.out(len(head))
    await upstream.stream.send(head)
    upgrades = b"\r\nupgrade: websocket\r\n" in head
    over = False
    became = False

    async def send_body() -> None:
        nonlocal over
        try:
            await _send_body(length, guest, upstream, traffic.out)
        except OverCapError:
            over = True
            tasks.cancel_scope.cancel()
        except (*LOST, anyio.EndOfStream, RefusedRequestError):  # what is half is sent no further
            tasks.cancel_scope.cancel()

    async def answer() -> None:
        nonlocal over, became
        try:
            became = await _answer(guest, upstream, traffic, upgrades)
        except OverCapError:
            over = True
        except (*LOST, anyio.EndOfStream):
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        tasks.start_soon(send_body)
    if over:
        raise OverCapError
    if became:
        await relay(guest, upstream, traffic)


async def _send_body(length: int | None, guest: Peer, upstream: Peer, counted: Counted) -> None:
    if length is None:
        await _send_chunks(guest, upstream, counted)
        return
    while length and (data := await guest.some(length)):
        length -= len(data)
        await counted(len(data))
        await upstream.stream.send(data)


async def _send_chunks(guest: Peer, upstream: Peer, counted: Counted) -> None:
    """Each chunk is written anew, without what may stand beside its size."""
    while True:
        line = await guest.until(b"\r\n", _MAX_LINE_BYTES)
        match = re.fullmatch(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t -~]*)?\r\n", line or b"")
        if not match:
            raise RefusedRequestError("a chunk of its body has no size")
        size = left = int(match[1], 16)
        if not size:
            break
        await upstream.stream.send(b"%x\r\n" % size)
        while left and (data := await guest.some(left)):
            left -= len(data)
            await counted(len(data))
            await upstream.stream.send(data)
        if left or await guest.until(b"\r\n", 2) is None:
            raise RefusedRequestError("a chunk of its body is not as long as it says")
        await upstream.stream.send(b"\r\n")
    while (line := await guest.until(b"\r\n", _MAX_TRAILER_BYTES)) != b"\r\n":
        if line is None:
            raise RefusedRequestError("its trailers are too long")
    await upstream.stream.send(b"0\r\n\r\n")


async def _answer(guest: Peer, upstream: Peer, traffic: Traffic, upgrades: bool) -> bool:
    """Brings the answer back; True where the connection has become a WebSocket's."""
    while True:
        head = await upstream.until(b"\r\n\r\n", MAX_HEAD_BYTES)
        match = re.match(rb"HTTP/1\.[01] (\d{3})", head or b"")
        if head is None or not match:
            return False
        status = int(match[1])
        if status == 101 and not upgrades:
            return False
        if status >= 200:
            head = re.sub(rb"(?im)^(connection|keep-alive|proxy-connection):[^\r]*\r\n", b"", head)
            head = head[:-2] + b"Connection: close\r\n\r\n"
        await traffic.back(len(head))
        await guest.stream.send(head)
        if status == 101:
            return True
        if status >= 200:
            break
    while data := await upstream.some():
        await traffic.back(len(data))
        await guest.stream.send(data)
    return False
