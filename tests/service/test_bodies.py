"""Bodies that come slowly, in heaps, half, or from somebody who may not ask: none is held for long, nor for nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx2
import pytest

from serving import Server, served
from watching import resident
from witness import eventually

pytestmark = pytest.mark.engine

MB = 1_000_000
CONFIG = "[service]\nrequest_size = 4194304\nbody_patience = 1\ndrain = 1\n"
CONNECTIONS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(start=False, config=CONFIG, MAX_CONTAINERS="2") as server:
        server.keys = {  # type: ignore[attr-defined]
            "runner": key(server, "runner", "run", "read", "sessions", "files"),
            "reader": key(server, "reader", "read"),
            "neighbour": key(server, "neighbour", "run"),
        }
        server.start()
        yield server


def key(server: Server, name: str, *scopes: str) -> str:
    made = server.belljar("keys", "create", name, *(word for scope in scopes for word in ("--scope", scope)), "--json")
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["key"])


def opened(server: Server, name: str, path: str = "/api/sandbox/execute", size: int = 4 * MB) -> socket.socket:
    """A connection on which a POST was begun, with its headers only."""
    parts = urlsplit(server.url)
    line = socket.create_connection((parts.hostname, parts.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {server.keys[name]}\r\nContent-Length: {size}\r\n\r\n"  # type: ignore[attr-defined]
    line.sendall(head.encode())
    return line


def told(line: socket.socket) -> bytes:
    """The whole answer, of a server that hangs up after it."""
    answer = b""
    try:
        while part := line.recv(65536):
            answer += part
    except (ConnectionResetError, TimeoutError):  # it does not read what we have sent since
        pass
    return answer


@pytest.mark.parametrize("path", ["/api/sandbox/execute", "/api/sandbox/sessions", "/api/sandbox/sessions/x/run"])
def test_who_may_not_ask_is_refused_before_a_byte_of_the_body_is_sent(server: Server, path: str) -> None:
    with opened(server, "reader", path) as line:
        answer = told(line)
    assert answer.startswith(b"HTTP/1.1 403"), answer
    assert b"connection: close" in answer.lower(), "the rest of the body would be taken for a request"


def test_bodies_in_flight_are_counted_and_one_caller_has_a_bounded_part_of_the_memory(server: Server) -> None:
    before = resident(server.pid)
    part = b'{"code": "' + b"x" * (3 * MB)
    answers = []
    with ExitStack() as stack:
        lines = [stack.enter_context(opened(server, "runner")) for _ in range(CONNECTIONS)]
        for line in lines:
            try:
                line.sendall(part)
            except OSError:  # refused, and hung up on
                answers.append(told(line))
        headers = {"Authorization": f"Bearer {server.keys['neighbour']}"}  # type: ignore[attr-defined]
        asked = {"code": "print(1)", "backend": "native"}
        assert httpx2.post(f"{server.url}/api/sandbox/execute", json=asked, headers=headers).json()["stdout"] == "1\n"
        grown = resident(server.pid) - before
        for line in lines:
            line.settimeout(0.5)  # of those that it goes on waiting for
        answers += [told(line) for line in lines]
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 429")]
    assert len(refused) >= CONNECTIONS - 3, answers
    assert b"retry-after" in refused[0].lower()
    assert grown < 40 * MB, f"{grown // MB} MB more"


def test_a_body_that_trickles_is_cut_off(server: Server) -> None:
    with opened(server, "runner") as line:
        start = time.monotonic()
        line.sendall(b"{" + b" " * 100)
        answer = told(line)
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert time.monotonic() - start < 10


def test_a_body_that_comes_fast_enough_may_take_longer_than_the_patience(server: Server) -> None:
    body = json.dumps({"code": "print(1)" + " " * 3_000_000, "backend": "native"}).encode()
    with opened(server, "runner", size=len(body)) as line:
        step = len(body) // 24
        for at in range(0, len(body), step):
            line.sendall(body[at : at + step])
            time.sleep(0.1)  # it is the subject: 2.4 seconds in all
        assert line.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "method, path",
    [
        ("POST", "/api/sandbox/execute"), ("POST", "/api/sandbox/sessions"),
        ("PUT", "/api/sandbox/x/files/a"), ("POST", "/mcp"),
    ],
)  # fmt: skip
def test_a_client_that_hangs_up_is_one_line_of_the_log(server: Server, method: str, path: str) -> None:
    before = len(server.log)
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as line:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += "Accept: application/json, text/event-stream\r\n"
        head += f"Authorization: Bearer {server.keys['runner']}\r\nContent-Length: 1000\r\n\r\n"  # type: ignore[attr-defined]
        line.sendall(head.encode() + b'{"code":')
    assert eventually(lambda: "hung up" in server.log[before:])
    said = server.log[before:]
    assert "Traceback" not in said and "bug" not in said, said
    assert len([row for row in said.splitlines() if f"{method} {path}" in row]) == 1, said
