"""How the client reaches its server: connections that stay open, TLS, and the proxy that the environment names."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from belljar.client.async_client import AsyncClient
from belljar.client.client import Client
from belljar.client.connections import Unanswered
from belljar.core import errors
from interference import answer, canned

SECRET = "5ecret" * 8
KEY = f"bj_0123456789ab_{SECRET}"
BODY = b'{"id": "bj-1", "status": "success", "stdout": "ok"}'
DONE = answer("200 OK", BODY)
KEPT = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


class _Lasting:
    """A server that answers each request on an open connection, and counts connections and pieces of requests."""

    def __init__(self, answers: list[bytes], context: ssl.SSLContext | None = None) -> None:
        self._answers = answers
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.pieces: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while self._answers:
                near, _ = self._listener.accept()
                self.connections += 1
                with suppress(OSError), near if self._context is None else self._context.wrap_socket(near, True) as end:
                    while self._answers and (piece := end.recv(1 << 20)):
                        self.pieces.append(piece)
                        end.sendall(self._answers.pop(0))

    def close(self) -> None:
        self._listener.close()


@contextmanager
def lasting(*answers: bytes, context: ssl.SSLContext | None = None) -> Iterator[_Lasting]:
    server = _Lasting(list(answers), context)
    try:
        yield server
    finally:
        server.close()


def test_requests_follow_each_other_on_one_connection_each_in_one_piece() -> None:
    with lasting(KEPT, CHUNKED, KEPT) as server, Client(f"http://127.0.0.1:{server.port}", KEY) as client:
        for _ in range(3):
            assert client.run("print(1)").stdout == "ok"
    assert server.connections == 1
    assert [piece.partition(b" ")[0] for piece in server.pieces] == [b"POST"] * 3
    assert all(piece.endswith(b"}") and b"Authorization: Bearer bj_" in piece for piece in server.pieces)


async def test_requests_at_the_same_time_have_a_connection_each() -> None:
    with canned(DONE, DONE, DONE) as server:
        async with AsyncClient(server.url) as client, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(client.run, "1")
    assert len(set(server.header("Idempotency-Key"))) == 3


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    with canned(KEPT, KEPT) as server, Client(server.url, retries=0) as client:  # it hangs up without a word
        assert client.run("1").stdout == client.run("2").stdout == "ok"


@pytest.mark.parametrize("broken", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", b"HELLO\r\n\r\n"])
def test_half_an_answer_is_none_and_the_key_is_in_no_traceback(broken: bytes) -> None:
    with canned(broken) as server, pytest.raises(Unanswered, match="did not answer") as lost:
        Client(server.url, KEY, retries=0).run("1")
    assert lost.value.sent
    told = traceback.TracebackException.from_exception(lost.value, capture_locals=True).format()
    assert SECRET not in "".join(told)


def test_an_answer_that_does_not_come_in_time_is_told() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(Unanswered, match="did not answer"):
        Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2, retries=0).runs()


# --- proxies ---


def test_a_proxy_of_the_environment_is_asked_for_another_machine_but_not_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with canned(DONE) as proxy, canned(DONE) as here:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:a%20b@"))
        monkeypatch.setenv("no_proxy", "")
        assert Client("http://sandbox.example:8080/below").run("1").stdout == "ok"
        assert Client(here.url).run("1").stdout == "ok"
    assert proxy.requests[0].startswith(b"POST http://sandbox.example:8080/below/api/sandbox/execute HTTP/1.1\r\n")
    assert proxy.header("Host") == ["sandbox.example:8080"]
    assert proxy.header("Proxy-Authorization") == ["Basic bWU6YSBi"]
    assert here.requests[0].startswith(b"POST /api/sandbox/execute ")


def test_a_proxy_that_makes_no_tunnel_gets_neither_request_nor_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with canned(answer("403 Forbidden")) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(Unanswered, match=r"the proxy 127\.0\.0\.1 answered 403") as refused:
            Client("https://sandbox.example", KEY, retries=0).run("1")
    assert not refused.value.sent
    assert proxy.requests[0].startswith(b"CONNECT sandbox.example:443 HTTP/1.1\r\n")
    assert SECRET.encode() not in proxy.requests[0]


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(errors.NotAvailable, match="socks5"):
        Client("https://sandbox.example", retries=0).run("1")


# --- TLS ---


def _certified(folder: Path) -> ssl.SSLContext:
    """A server's context for 127.0.0.1; its certificate is left in the folder."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    day = datetime.timedelta(days=1)
    made = builder.not_valid_before(now - day).not_valid_after(now + day).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "certificate").write_bytes(made.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    return context


def test_a_certificate_is_believed_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lasting(KEPT, KEPT, context=_certified(tmp_path)) as server:
        url = f"https://127.0.0.1:{server.port}"
        with pytest.raises(Unanswered, match="no connection to") as refused:
            Client(url, KEY, retries=0).run("1")
        assert not refused.value.sent and server.pieces == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
        with Client(url, KEY) as client:
            assert client.run("1").stdout == client.run("2").stdout == "ok"
        assert server.connections == 2
