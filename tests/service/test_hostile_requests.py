"""Requests that are made to cost us: nobody we do not know makes us read, and nobody makes us keep."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from serving import Server, served
from watching import resident

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(start=False, MAX_CONTAINERS="2") as server:
        made = server.belljar("keys", "create", "ann", "--scope", "run", "--scope", "read", "--json")
        assert made.returncode == 0, made.stderr
        server.key = json.loads(made.stdout)["key"]  # type: ignore[attr-defined]
        server.start()
        yield server


def connected(server: Server) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def test_a_stranger_is_refused_before_its_body_is_read(server: Server) -> None:
    with connected(server) as line:
        head = "POST /api/sandbox/execute HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: 50000000\r\n\r\n".encode())
        answer = line.recv(65536)
    assert answer.startswith(b"HTTP/1.1 401"), answer


def test_headers_without_end_end_the_connection(server: Server) -> None:
    with connected(server) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with pytest.raises(OSError):
            for number in range(2000):
                line.sendall(b"X-%d: %s\r\n" % (number, b"x" * 1000))
            if not line.recv(1):
                raise ConnectionResetError


@pytest.mark.parametrize("body", ['{"command":[' + "1," * 500_000 + "1]}", '{"code":' + "[" * 900_000 + "}"])
def test_a_body_that_is_all_mistakes_is_told_a_few_and_costs_little(server: Server, body: str) -> None:
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}  # type: ignore[attr-defined]
    before = resident(server.pid)
    answer = httpx2.post(f"{server.url}/api/sandbox/execute", content=body, headers=headers, timeout=60)
    assert answer.status_code in (400, 422), answer.text[:300]
    assert len(answer.content) < 100_000
    assert resident(server.pid) - before < 150 * 1024 * 1024


def test_a_large_text_is_no_large_structure(server: Server) -> None:
    code = "# " + "[" * 3_000_000 + "\nprint(1)"
    headers = {"Authorization": f"Bearer {server.key}"}  # type: ignore[attr-defined]
    answer = httpx2.post(f"{server.url}/api/sandbox/execute", json={"code": code}, headers=headers, timeout=60)
    assert answer.json()["stdout"] == "1\n", answer.text[:300]
