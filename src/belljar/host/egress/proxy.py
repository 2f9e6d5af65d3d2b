"""The filtering proxy that answers a guest, on the other side of a socket on the guest's own loopback.

It takes `CONNECT host:port`, and plain HTTP to hosts that are listed for it. Names are judged by the list, resolved by
us, and refused if they lead to this machine or to an address that is not public, unless an administrator listed that
address with its port. The connection is made to the very address that was judged. What goes through a tunnel begins as
TLS whose server name is that of the tunnel; then it goes on unopened: what a listed host does with it is its affair.
"""

from __future__ import annotations

import logging
import re
import socket
from contextlib import suppress

import anyio
from anyio.abc import SocketStream, UNIXSocketStream

from belljar.core.model import ours
from belljar.core.request import Limits
from belljar.core.values import format_size
from belljar.host.egress import plain_http, tls_hello
from belljar.host.egress.access import NetworkAccess
from belljar.host.egress.judgement import EgressDecision, Told, judge_address
from belljar.host.egress.plain_http import RefusedRequestError, RequestHead
from belljar.host.egress.relay import LOST, OverCapError, Peer, Traffic, hang_up, relay
from belljar.host.loops import accepted

_log = logging.getLogger("belljar.egress")
_REASON_CHARACTERS = 400  # of an HTTP status line: many clients show it and nothing else
_HEADER_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_HELLO_SECONDS = 10.0  # that a client may take for its first words in a tunnel
_PAUSE_SECONDS = 0.1
_NO_LIMITS = ours(Limits)()
_TLS_RECORD = 22
_ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"  # a fatal TLS alert
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_FOR_TLS = 'an administrator can set egress.tls to "relaxed"'
_ONE_REQUEST = "send one plain HTTP/1.1 request, or use https"
_OTHER_NAME = "in its TLS the program asks for another host"


class Proxy:
    """Serves the guest's connections until it is cancelled. `told` hears of every refusal."""

    def __init__(self, access: NetworkAccess, told: Told, limits: Limits = _NO_LIMITS) -> None:
        """Serves nobody yet.

        Args:
            access: What may be reached.
            told: Hears of every refusal.
            limits: How many connections at once (more wait), how many bytes a second, each way, and how many in all.
        """
        self._access = access
        self._told = told
        self._limits = limits
        self._traffic = Traffic(limits)

    async def serve(self, listener: socket.socket) -> None:
        """Answers on a listening socket. A failure of ours cuts all connections, and another round begins."""
        listener.setblocking(False)
        with listener:
            while True:
                try:
                    await self._serve(listener)
                except Exception:
                    _log.exception("the proxy of a sandbox failed, and is replaced")
                    await anyio.sleep(_PAUSE_SECONDS)

    async def _serve(self, listener: socket.socket) -> None:
        slots = anyio.Semaphore(self._limits.net_connections)
        async with anyio.create_task_group() as tasks:
            while True:
                await slots.acquire()  # first: each that is taken is a descriptor of this process
                tasks.start_soon(self._attend, await accepted(listener, _PAUSE_SECONDS), slots)

    async def _attend(self, connection: socket.socket, slots: anyio.Semaphore) -> None:
        kind = UNIXSocketStream if connection.family is socket.AF_UNIX else SocketStream
        try:
            async with await kind.from_socket(connection) as stream:
                guest = Peer(stream, self._traffic)
                with anyio.fail_after(_HEADER_SECONDS):
                    raw = await guest.until(b"\r\n\r\n", plain_http.MAX_HEAD_BYTES)
                await self._answer(guest, raw or b"")
        except (*LOST, anyio.EndOfStream):
            return
        except Exception:
            _log.exception("a connection of a sandbox was cut by a failure of the proxy")
        finally:
            slots.release()

    async def _answer(self, guest: Peer, raw: bytes) -> None:
        try:
            head = plain_http.read_head(raw)
            if head.connects:
                target, path = head.target, b""
            else:
                target, path = head.host_and_path
        except RefusedRequestError as error:
            await self._refuse_request(guest, raw, str(error))
            return
        with self._access.connection(target, plain=not head.connects) as scope:
            await self._connect(guest, head, target, path)
        if scope.cancelled_caught:
            with anyio.CancelScope(shield=True):
                await hang_up(guest.stream)
                await self._told(self._access.judge(target, plain=not head.connects).words())

    async def _refuse_request(self, guest: Peer, raw: bytes, why: str) -> None:
        """Says no to what is no request; one that names a host is told of, too."""
        shown = re.match(rb"[A-Z]{1,16} ([!-~]{1,100}) HTTP/1", raw)
        if shown:
            where = shown[1].decode("ascii", "backslashreplace")
            await self._refuse(guest, EgressDecision(where, 0, why, _ONE_REQUEST), 400)
        else:
            await guest.stream.send(_BAD_REQUEST)

    async def _connect(self, guest: Peer, head: RequestHead, target: bytes, path: bytes) -> None:
        """Judges a target, connects to it, and lets through what may go."""
        found = self._access.judge(target, plain=not head.connects)
        if not found.objection and self._traffic.used_up:
            found = self._over(found)
        upstream = found if found.objection else await self._dial(found)
        if isinstance(upstream, EgressDecision):
            await self._refuse(guest, upstream)
            return
        async with upstream:
            try:
                other = Peer(upstream, self._traffic)
                if head.connects:
                    await self._tunnel(guest, other, found)
                else:
                    await self._exchange(guest, other, found, head, path)
            except OverCapError:
                await self._told(self._over(found).words())

    def _over(self, found: EgressDecision) -> EgressDecision:
        cap = self._traffic.cap or 0
        return found.refused(
            f"the {format_size(cap)} that may be sent and received are used up", f'ask for more: net_bytes="{cap * 4}"'
        )

    # --- a tunnel ---

    async def _tunnel(self, guest: Peer, upstream: Peer, found: EgressDecision) -> None:
        await guest.stream.send(_ESTABLISHED)
        if not found.raw and not (self._access.outside.tls == "off" and not found.plain):
            with anyio.move_on_after(_HELLO_SECONDS) as waiting, suppress(anyio.EndOfStream):
                while not guest.held:
                    await guest.more()
            if waiting.cancelled_caught or not guest.held:
                return
            if guest.held[0] != _TLS_RECORD and found.plain:
                await self._one_request(guest, upstream, found)
                return
            if objection := await self._look_at_tls(guest, found):
                await self._cut(guest, objection)
                return
        await relay(guest, upstream, self._traffic)

    async def _look_at_tls(self, guest: Peer, found: EgressDecision) -> EgressDecision | None:
        """What speaks against the first words in a tunnel; None if nothing does."""
        rule = self._access.outside.tls
        if rule == "off":
            return None
        if not found.tls:
            return found.refused("it is listed for plain HTTP", f'list it for TLS: net=["{found.shown}"]')
        try:
            with anyio.fail_after(_HELLO_SECONDS):
                while (hello := tls_hello.read_hello(guest.held)) is None:
                    await guest.more()
        except tls_hello.NotTlsError as error:
            return found.refused(f"only TLS is let through: {error}", "use https")
        except (TimeoutError, anyio.EndOfStream):
            return found.refused("its TLS did not begin in time", "try again")
        wanted = "" if found.address else found.host
        if hello.server_name != wanted and (hello.server_name or rule == "strict"):
            if not hello.server_name:
                return found.refused("its TLS does not name the host (no SNI)", f"name it, or {_FOR_TLS}")
            shown = hello.server_name[:100]
            return found.refused(f"{_OTHER_NAME}: {shown}", "ask the proxy for the host that is meant")
        if hello.encrypted and rule == "strict":
            return found.refused("its TLS hides the host's name (ECH)", f"switch that off in the client, or {_FOR_TLS}")
        return None

    async def _cut(self, guest: Peer, verdict: EgressDecision) -> None:
        """Refuses what goes on in a tunnel, in the language that is spoken there."""
        if guest.held[0] == _TLS_RECORD:
            await self._told(verdict.words())
            await guest.stream.send(_ACCESS_DENIED)
        else:
            await self._refuse(guest, verdict)

    async def _one_request(self, guest: Peer, upstream: Peer, found: EgressDecision) -> None:
        """A request in plain HTTP within a tunnel."""
        try:
            with anyio.fail_after(_HEADER_SECONDS):
                head = plain_http.read_head(await guest.until(b"\r\n\r\n", plain_http.MAX_HEAD_BYTES) or b"")
            where, path = head.host_and_path
            if where != found.shown.encode():
                raise RefusedRequestError("its Host header is unlike the host that it is sent to")
        except RefusedRequestError as error:
            await self._refuse(guest, found.refused(str(error), _ONE_REQUEST), 400)
            return
        await self._exchange(guest, upstream, found, head, path)

    # --- plain HTTP ---

    async def _exchange(
        self, guest: Peer, upstream: Peer, found: EgressDecision, head: RequestHead, path: bytes
    ) -> None:
        try:
            length = plain_http.body_length(head)
            sent_on = plain_http.written(head, found.shown.encode(), path)
        except RefusedRequestError as error:
            await self._refuse(guest, found.refused(str(error), _ONE_REQUEST), 400)
            return
        await plain_http.exchange(sent_on, length, guest, upstream, self._traffic)

    # --- connecting and refusing ---

    async def _dial(self, found: EgressDecision) -> SocketStream | EgressDecision:
        """A connection to the very address that was judged, or the reason why there is none."""
        last = found.refused("it has no address", "check the name")
        outside = self._access.outside
        try:
            with anyio.fail_after(_CONNECT_SECONDS):
                known = [found.host] if found.address else await outside.resolver(found.host, found.port)
                for address in known:
                    last = judge_address(found, address, outside.private)
                    if not last.objection:
                        try:
                            return await anyio.connect_tcp(address, found.port)
                        except OSError as error:
                            last = _unreachable(found, error)
        except (OSError, TimeoutError) as error:
            return _unreachable(found, error)
        return last

    async def _refuse(self, guest: Peer, verdict: EgressDecision, status: int = 403) -> None:
        words = verdict.words()
        await self._told(words)
        body = f"belljar: {words}\n".encode()
        reason = re.sub(r"[^ -~]", "-", words)[:_REASON_CHARACTERS]
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await guest.stream.send(head.encode() + body)


def _unreachable(found: EgressDecision, error: Exception) -> EgressDecision:
    why = getattr(error, "strerror", None) or error or "no answer"
    return found.refused(f"it cannot be reached: {why}", "check the name, and try again")
