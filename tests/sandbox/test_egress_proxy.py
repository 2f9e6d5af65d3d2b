"""The filtering proxy itself, before real servers on loopback: what goes through, and what it survives."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute, TLSStream

from belljar.core.addresses import endpoint
from belljar.core.request import Egress, Limits
from belljar.host.egress import proxy as proxy_module
from belljar.host.egress.access import NetworkAccess, Outside
from belljar.host.egress.proxy import Proxy
from local_tls import Authority, hello, with_extension

pytestmark = pytest.mark.anyio
NAME = "listed.example"
ENCRYPTED_HELLO = 0xFE0D


class Here(NamedTuple):
    """A proxy with two servers behind it: one speaks TLS, the other plain HTTP."""

    proxy: int
    tls: int
    plain: int
    access: NetworkAccess
    told: list[str]
    heard: list[bytes]  # by the plain server
    greeted: list[bytes]  # by the TLS server, once a client trusted it
    authority: Authority
    streams: list[ByteStream]  # of clients

    async def ask(self, text: str | bytes) -> ByteStream:
        stream = await anyio.connect_tcp("127.0.0.1", self.proxy)
        self.streams.append(stream)
        await stream.send(text.encode() if isinstance(text, str) else text)
        return stream

    async def tunnel(self, host: str, port: int) -> ByteStream:
        stream = await self.ask(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}\r\n\r\n")
        answer = await _some(stream)
        assert b" 200 " in answer, answer
        return stream

    async def spoken(self, host: str, port: int, server_name: str | None = None, **options: Any) -> bytes:
        """What the TLS server says to a client in a tunnel."""
        context: ssl.SSLContext = self.authority.client()
        context.set_alpn_protocols(options.get("alpn", ["http/1.1"]))
        stream = await self.tunnel(host, port)
        tls = await TLSStream.wrap(stream, hostname=server_name or host, ssl_context=context, standard_compatible=False)
        await tls.send(b"hello")
        return await _some(tls) + b" " + str(tls.extra(_ALPN, "")).encode()

    async def whole(self, text: str | bytes) -> bytes:
        """All that is answered."""
        stream = await self.ask(text)
        return await _all(stream)


_ALPN = TLSAttribute.alpn_protocol


async def _some(stream: ByteStream) -> bytes:
    with anyio.fail_after(30):
        return await stream.receive(65536)


async def _all(stream: ByteStream) -> bytes:
    said = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError), anyio.fail_after(60):
        while True:
            said += await stream.receive(65536)
    return said


Answer = Callable[[bytes], bytes]


def _usual(request: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: keep-alive\r\n\r\npong"


@asynccontextmanager
async def here(
    folder: Path, net: Iterable[str] = (), *, answer: Answer = _usual, resolver: Any = None, tls: str = "strict",
    private: bool = True, **limits: Any,
) -> AsyncIterator[Here]:  # fmt: skip
    """The proxy for a list of entries, in which {tls} and {plain} are the servers' ports."""
    authority, told, heard, greeted = Authority(folder), list[str](), list[bytes](), list[bytes]()
    secret = authority.server(NAME, "other.example", alpn=("h2", "http/1.1"))

    async def speak(stream: ByteStream) -> None:
        async with stream:
            with suppress(Exception):
                secured = await TLSStream.wrap(stream, server_side=True, ssl_context=secret)
                greeted.append(await secured.receive())
                await secured.send(b"x" * 1000)
                await secured.receive()

    async def serve(stream: ByteStream) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            async with stream:
                while True:
                    heard.append(await stream.receive())
                    if said := answer(heard[-1]):
                        await stream.send(said)
                        if said.endswith(b"pong"):
                            return

    async def usual(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    async def tell(words: str) -> None:
        told.append(words)

    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(await anyio.create_tcp_listener(local_host="127.0.0.1")) for _ in "12"
        ]
        ports = {"tls": one.extra(SocketAttribute.local_port), "plain": two.extra(SocketAttribute.local_port)}
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(one.serve, speak)
        tasks.start_soon(two.serve, serve)
        known = [endpoint(f"127.0.0.1:{port}") for port in ports.values()] if private else []
        outside = Outside(resolver or usual, known, tls)  # type: ignore[arg-type]
        access = NetworkAccess(Egress.of(one.format(**ports) for one in net), outside)
        listener = socket.create_server(("127.0.0.1", 0))
        tasks.start_soon(Proxy(access, tell, Limits(**limits)).serve, listener)
        streams: list[ByteStream] = []
        yield Here(listener.getsockname()[1], *ports.values(), access, told, heard, greeted, authority, streams)
        for stream in streams:
            await anyio.aclose_forcefully(stream)


BOTH = ("listed.example:{tls}", "http://listed.example:{plain}")


# --- TLS ---


async def test_a_client_that_says_the_same_in_its_tls_is_let_through_with_http2_too(tmp_path: Path) -> None:
    async with here(tmp_path, BOTH) as at:
        assert await at.spoken(NAME, at.tls) == b"x" * 1000 + b" http/1.1"
        assert await at.spoken(NAME, at.tls, alpn=["h2"]) == b"x" * 1000 + b" h2"
    assert at.told == []


async def test_tls_for_another_host_than_the_tunnels_is_refused_before_the_server_hears_of_it(tmp_path: Path) -> None:
    async with here(tmp_path, ["*.example:{tls}"]) as at:
        with pytest.raises((ssl.SSLError, anyio.BrokenResourceError)) as raised:
            await at.spoken(NAME, at.tls, "other.example")
        assert isinstance(raised.value.__cause__ or raised.value, ssl.SSLError), "an alert of TLS"
    (words,) = at.told
    assert "in its TLS the program asks for another host: other.example" in words and NAME in words
    assert not at.greeted


REFUSED = {
    "no name": (hello(None), "does not name the host"),
    "an encrypted hello": (with_extension(hello(NAME), ENCRYPTED_HELLO, b"\0" * 8), "hides the host's name"),
    "a name with a dot more and another": (hello("listed.example.evil.example"), "another host: listed.example.evil"),
    "http": (b"GET / HTTP/1.1\r\nHost: listed.example\r\n\r\n", "only TLS is let through"),
    "ssh": (b"SSH-2.0-x\r\n", "only TLS is let through"),
    "two names": (with_extension(hello(NAME), 0, b"\0\x10\0\0\x0d" + b"other.example"), "says something twice"),
    "a length that lies": (hello(NAME)[:6] + b"\xff\xff\xff" + hello(NAME)[9:], "only TLS is let through"),
    "no handshake": (b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", "does not begin with a ClientHello"),
}


@pytest.mark.parametrize("words", REFUSED)
async def test_what_does_not_begin_as_tls_for_the_host_is_refused_and_told(words: str, tmp_path: Path) -> None:
    sent, told = REFUSED[words]
    async with here(tmp_path, ["listed.example:{tls}"]) as at:
        stream = await at.tunnel(NAME, at.tls)
        await stream.send(sent)
        said = await _all(stream)
    assert told in at.told[0], at.told
    assert said == b"\x15\x03\x03\x00\x02\x02\x31" if sent[0] == 22 else b" 403 network: " in said, "it can be read"


async def test_a_hello_in_many_pieces_and_records_is_read_whole(tmp_path: Path) -> None:
    first, cut = hello(NAME), 0
    body = first[5:]
    records = b"".join(
        first[:3] + len(part).to_bytes(2, "big") + part for part in (body[at : at + 7] for at in range(0, len(body), 7))
    )
    async with here(tmp_path, ["listed.example:{tls}"]) as at:
        stream = await at.tunnel(NAME, at.tls)
        while cut < len(records):
            await stream.send(records[cut : cut + 11])
            cut += 11
        assert (await _some(stream))[0] in (22, 21), "the server answers"
    assert at.told == []


async def test_what_is_let_through_can_be_relaxed_by_the_administrator_but_no_other_name(tmp_path: Path) -> None:
    async with here(tmp_path, ["listed.example:{tls}"], tls="relaxed") as at:
        for sent in (hello(None), with_extension(hello(NAME), ENCRYPTED_HELLO, b"\0" * 8)):
            stream = await at.tunnel(NAME, at.tls)
            await stream.send(sent)
            assert (await _some(stream))[0] in (21, 22)
            await stream.aclose()
        assert at.told == []
        stream = await at.tunnel(NAME, at.tls)
        await stream.send(hello("other.example"))
        assert await _all(stream)
    assert "another host" in at.told[0]


# --- plain HTTP ---


async def test_plain_http_is_let_out_to_hosts_that_are_listed_for_it_alone(tmp_path: Path) -> None:
    async with here(tmp_path, BOTH) as at:
        asked = f"GET http://listed.example:{at.plain}/x?y HTTP/1.1\r\nHost: listed.example:{at.plain}\r\nA: b\r\n\r\n"
        assert (await at.whole(asked)).endswith(b"pong")
        head = at.heard[0]
        assert head.startswith(b"GET /x?y HTTP/1.1\r\nhost: listed.example:%d\r\nconnection: close\r\n" % at.plain)
        in_tunnel = await at.tunnel(NAME, at.plain)
        await in_tunnel.send(f"GET /z HTTP/1.1\r\nHost: listed.example:{at.plain}\r\n\r\n".encode())
        assert (await _all(in_tunnel)).endswith(b"pong")
        for host, port in (("other.example", at.plain), (NAME, at.tls)):
            said = await at.whole(f"GET http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n")
            assert b" 403 network: " in said
        fronted = await at.tunnel(NAME, at.plain)
        await fronted.send(b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n")
        assert b"unlike the host that it is sent to" in await _all(fronted)
    assert len(at.heard) == 2
    assert f'list net=["http://other.example:{at.plain}"]' in at.told[0] or "allow it with" in at.told[0]


SMUGGLED = {
    "two lengths": "Content-Length: 4\r\nContent-Length: 40\r\n\r\nabcd",
    "a length and chunks": "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks that are not": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a length with a sign": "Content-Length: +4\r\n\r\nabcd",
    "a folded header": "X: a\r\n Host: other.example\r\n\r\n",
    "a header with a space": "Host : other.example\r\n\r\n",
    "two hosts": "Host: other.example\r\n\r\n",
    "a bare line feed": "X: a\nHost: other.example\r\n\r\n",
    "a NUL": "X: a\0b\r\n\r\n",
    "another protocol": "Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
}


@pytest.mark.parametrize("how", SMUGGLED)
async def test_a_request_that_two_could_read_differently_is_not_passed_on(how: str, tmp_path: Path) -> None:
    async with here(tmp_path, BOTH) as at:
        where = f"listed.example:{at.plain}"
        said = await at.whole(f"POST http://{where}/ HTTP/1.1\r\nHost: {where}\r\n{SMUGGLED[how]}")
        assert b" 400 " in said, said
    assert not at.heard
    assert at.told, "it is told of"


async def test_the_host_header_must_be_that_of_the_address_that_is_asked_for(tmp_path: Path) -> None:
    async with here(tmp_path, BOTH) as at:
        for host in ("other.example", f"other.example:{at.plain}", "user@listed.example", ""):
            said = await at.whole(f"GET http://listed.example:{at.plain}/ HTTP/1.1\r\nHost: {host}\r\n\r\n")
            assert b" 400 " in said, (host, said)
    assert not at.heard


async def test_nothing_that_follows_the_one_request_is_passed_on(tmp_path: Path) -> None:
    async with here(tmp_path, BOTH, answer=lambda request: b"") as at:
        where = f"listed.example:{at.plain}"
        head = f"POST http://{where}/ HTTP/1.1\r\nHost: {where}\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = "4;name=value\r\nabcd\r\n0\r\nTrailer: x\r\n\r\n"
        stream = await at.ask(head + chunks + f"GET http://{where}/second HTTP/1.1\r\nHost: {where}\r\n\r\n")
        with anyio.fail_after(30):
            while not b"".join(at.heard).endswith(b"0\r\n\r\n"):
                await anyio.sleep(0.01)
        await stream.aclose()
    sent = b"".join(at.heard)
    assert sent.endswith(b"\r\n\r\n4\r\nabcd\r\n0\r\n\r\n") and b"second" not in sent


async def test_a_websocket_over_plain_http_goes_through(tmp_path: Path) -> None:
    def answer(request: bytes) -> bytes:
        if b"upgrade: websocket" in request:
            return b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        return b"frame:" + request

    async with here(tmp_path, BOTH, answer=answer) as at:
        where = f"listed.example:{at.plain}"
        head = f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        stream = await at.ask(head)
        assert b" 101 " in await _some(stream)
        await stream.send(b"ping")
        assert await _some(stream) == b"frame:ping"
        await stream.aclose()


# --- which hosts and addresses ---


async def test_addresses_are_reached_where_a_range_lists_them_and_they_are_allowed(tmp_path: Path) -> None:
    async with here(tmp_path, ["127.0.0.0/30:{tls}", "http://127.0.0.1:{plain}"]) as at:
        stream = await at.tunnel("127.0.0.1", at.tls)
        await stream.send(hello(None))
        assert (await _some(stream))[0] in (21, 22), "an address has no name to be said"
        where = f"127.0.0.1:{at.plain}"
        assert (await at.whole(f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n")).endswith(b"pong")
        for host in ("127.0.0.9", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[::1]", "2130706433", "0x7f000001"):
            said = await at.whole(f"CONNECT {host}:{at.tls} HTTP/1.1\r\n\r\n")
            assert b" 403 network: " in said, (host, said)
    async with here(tmp_path, ["127.0.0.0/8:{tls}"], private=False) as at:
        assert b"not public but this machine" in await at.whole(f"CONNECT 127.0.0.1:{at.tls} HTTP/1.1\r\n\r\n")


async def test_an_open_network_reaches_any_public_host_and_no_other(tmp_path: Path) -> None:
    async with here(tmp_path, ["*"]) as at:
        assert await at.spoken(NAME, at.tls)
    async with here(tmp_path, ["*"], private=False) as at:
        for host in (NAME, "127.0.0.1", "10.0.0.1", "[fd00::1]", "169.254.169.254", "[::ffff:10.0.0.1]"):
            for port in (443, 80, at.tls):
                assert b"not public but" in await at.whole(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n"), host
        assert b"mail is not let out" in await at.whole(b"CONNECT mail.example:25 HTTP/1.1\r\n\r\n")


async def test_the_address_that_was_judged_is_the_one_that_is_connected_to(tmp_path: Path) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.99"], ["10.0.0.1", "127.0.0.1"]])
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return next(answers)

    async with here(tmp_path, BOTH, resolver=rebinding) as at:
        assert await at.spoken(NAME, at.tls)
        assert len(asked) == 1, "it is looked up once for each connection"
        assert b"not public" in await at.whole(f"CONNECT {NAME}:{at.tls} HTTP/1.1\r\n\r\n")


# --- changes, limits, failures ---


async def test_what_is_denied_meanwhile_is_cut_and_told_and_what_is_still_allowed_goes_on(tmp_path: Path) -> None:
    async with here(tmp_path, ["listed.example:{tls}", "other.example:{tls}"]) as at:
        one, other = await at.tunnel(NAME, at.tls), await at.tunnel("other.example", at.tls)
        for stream, name in ((one, NAME), (other, "other.example")):
            await stream.send(hello(name))
            assert (await _some(stream))[0] == 22
        at.access.change(Egress.of([f"other.example:{at.tls}"]))
        await _all(one)
        assert b" 403 " in await at.whole(f"CONNECT {NAME}:{at.tls} HTTP/1.1\r\n\r\n")
        with anyio.move_on_after(0.2) as waited:
            assert await _some(other)
        assert waited.cancelled_caught or not at.told[2:], "the other goes on"
        at.access.change(Egress.of(["*"], denied=[f"other.example:{at.tls}"]))
        await _all(other)
    assert all("not on the list" in words for words in at.told[:2])
    assert "denied to this sandbox" in at.told[-1]


async def test_a_run_that_has_used_up_its_bytes_is_cut_and_told_what_would_help(tmp_path: Path) -> None:
    size = 100_000

    def much(request: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size + b"pong"

    async with here(tmp_path, BOTH, answer=much, net_bytes=20_000) as at:
        asked = f"GET http://listed.example:{at.plain}/ HTTP/1.1\r\nHost: listed.example:{at.plain}\r\n\r\n"
        assert len(await at.whole(asked)) <= 20_000
        assert b"are used up" in await at.whole(asked)
    assert 'ask for more: net_bytes="80000"' in at.told[0]


async def test_clients_that_never_say_all_and_heads_that_never_end_are_hung_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "_HEADER_SECONDS", 0.3)
    monkeypatch.setattr(proxy_module, "_HELLO_SECONDS", 0.3)
    async with here(tmp_path, BOTH, net_connections=2) as at:
        assert await at.whole(b"CONNECT listed.example") == b"", "half a line"
        assert b" 400 " in await at.whole(b"GET http://listed.example/ HTTP/1.1\r\nX: " + b"a" * 40_000)
        half = await at.tunnel(NAME, at.tls)
        await half.send(hello(NAME)[:20])
        assert await _all(half), "it gets a TLS alert"
        silent = await at.tunnel(NAME, at.tls)
        assert await _all(silent) == b""
        assert await at.spoken(NAME, at.tls), "and others are served"


async def test_a_proxy_that_dies_lets_nothing_through_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failing = proxy_module.accepted, [True]

    async def accepted(listener: socket.socket, pause: float) -> socket.socket:
        connection = await real(listener, pause)
        if failing and not failing.clear():
            connection.close()
            raise RuntimeError("the proxy died")
        return connection

    async def broken(host: str, port: int) -> Sequence[str]:
        if host == "breaks.example":
            raise RuntimeError("a fault of ours")
        return ["127.0.0.1"]

    async with here(tmp_path, [*BOTH, "breaks.example"], resolver=broken) as at:
        stays = await at.tunnel(NAME, at.tls)
        await stays.send(hello(NAME))
        assert (await _some(stays))[0] == 22
        monkeypatch.setattr(proxy_module, "accepted", accepted)
        assert await at.whole(b"CONNECT breaks.example:443 HTTP/1.1\r\n\r\n") == b"", "one connection, not the proxy"
        assert await at.whole(f"CONNECT {NAME}:{at.tls} HTTP/1.1\r\n\r\n") == b""
        await _all(stays)
        assert await at.spoken(NAME, at.tls), "its replacement answers"
    assert "the proxy of a sandbox failed, and is replaced" in caplog.text


async def test_a_redirect_to_a_host_that_is_not_listed_is_refused_when_the_client_follows(tmp_path: Path) -> None:
    import urllib.error
    import urllib.request

    def elsewhere(request: bytes) -> bytes:
        return b"HTTP/1.1 302 Found\r\nLocation: http://forbidden.example/\r\nContent-Length: 4\r\n\r\npong"

    def fetch(proxy: int, plain: int) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": f"http://127.0.0.1:{proxy}"}))
        with pytest.raises(urllib.error.HTTPError) as raised:
            opener.open(f"http://listed.example:{plain}/", timeout=30)
        with raised.value:
            return str(raised.value)

    async with here(tmp_path, BOTH, answer=elsewhere) as at:
        said = await anyio.to_thread.run_sync(fetch, at.proxy, at.plain)
    assert "forbidden.example" in said and "it is not on the list" in said
    assert len(at.told) == 1
