"""What stands between a client and a server on bad days: a TCP proxy that cuts connections, on a real socket."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_ABORT = struct.pack("ii", 1, 0)  # linger for no time: the other side gets a reset


class Proxy:
    """`plan(request)` says of each request after how many bytes of its answer the connection is cut; None: not at all.
    `refuse(request)`: an answer of the proxy's own instead."""

    def __init__(self, target: str, plan: Callable[[bytes], int | None], refuse: Callable[[bytes], bytes]) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._plan = plan
        self._refuse = refuse
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with suppress(OSError), near, socket.create_connection(self._target, 5) as far:
            allowed: list[int | None] = [None]
            threading.Thread(target=self._carry, args=(near, far, allowed), daemon=True).start()
            while data := far.recv(65536):
                if allowed[0] is not None:
                    data, allowed[0] = data[: allowed[0]], allowed[0] - len(data)
                near.sendall(data)
                if allowed[0] is not None and allowed[0] <= 0:
                    self._cut(near)
                    return
            near.shutdown(socket.SHUT_WR)

    def _carry(self, near: socket.socket, far: socket.socket, allowed: list[int | None]) -> None:
        """What the client says; a connection is used for one request after the other."""
        with suppress(OSError):
            while data := near.recv(65536):
                if data.startswith((b"GET /", b"POST /")):
                    allowed[0] = self._plan(data)
                    if answer := self._refuse(data):
                        near.sendall(answer)
                        break
                far.sendall(data)
        with suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def _cut(self, near: socket.socket) -> None:
        """Every other time as a crashed machine does it, else as one that was closed."""
        self.cuts += 1
        if self.cuts % 2:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@contextmanager
def proxied(
    target: str, plan: Callable[[bytes], int | None] = lambda request: None,
    refuse: Callable[[bytes], bytes] = lambda request: b"",
) -> Iterator[Proxy]:  # fmt: skip
    proxy = Proxy(target, plan, refuse)
    try:
        yield proxy
    finally:
        proxy.close()


class Canned:
    """A server that knows its answers beforehand, and keeps what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            for answer in self._answers:
                near, _ = self._listener.accept()
                with near, suppress(OSError):
                    near.settimeout(10)
                    self.requests.append(_whole(near))
                    near.sendall(answer)

    def header(self, name: str) -> list[str]:
        """Of each request."""
        start = f"{name.lower()}:".encode()
        lines = [request.split(b"\r\n") for request in self.requests]
        return [
            line.partition(b":")[2].strip().decode()
            for some in lines
            for line in some
            if line.lower().startswith(start)
        ]

    def close(self) -> None:
        self._listener.close()


def _whole(near: socket.socket) -> bytes:
    """A request with its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := near.recv(65536)):
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += near.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def canned(*answers: bytes) -> Iterator[Canned]:
    server = Canned(*answers)
    try:
        yield server
    finally:
        server.close()


def answer(status: str, body: bytes = b"", kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
