"""A WebSocket that a test holds in its hand: it reads when it is told to, not before, and can be cut at any moment."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto import events as ws

SECONDS = 30.0


class Refused(Exception):
    """The server did not accept it: `status`, and what it said."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body.decode(errors='replace')[:500]}")
        self.status = status
        self.body = body


class Watcher:
    """`with Watcher(server.url, "/api/sandbox/ID/logs") as watcher: list(watcher.lines())`; `end` is (code, reason)."""

    def __init__(
        self, url: str, path: str, *, headers: dict[str, str] | None = None, offer: Sequence[str] = (),
        buffer: int = 0, seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        parts = urlsplit(url)
        given = dict(headers or {})
        self.end: tuple[int, str] | None = None
        self.subprotocol: str | None = None
        self._socket = socket.socket()
        self._socket.settimeout(seconds)
        if buffer:  # of the kernel: how much it takes before we read
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.connect((parts.hostname or "", parts.port or 80))
        self._wire = WSConnection(ConnectionType.CLIENT)
        host = given.pop("Host", parts.netloc)
        extra = [(name.encode(), value.encode()) for name, value in given.items()]
        request = ws.Request(host=host, target=path, extra_headers=extra, subprotocols=list(offer))
        self._socket.sendall(self._wire.send(request))
        self._ready: list[ws.Event] = []
        self._text = ""
        try:
            self._await_acceptance()
        except BaseException:
            self._socket.close()
            raise

    def _await_acceptance(self) -> None:
        status, body = 0, b""
        for event in self._events():
            if isinstance(event, ws.AcceptConnection):
                self.subprotocol = event.subprotocol
                return
            if isinstance(event, ws.RejectConnection):
                status = event.status_code
                if not event.has_body:
                    break
            if isinstance(event, ws.RejectData):
                body += event.data
                if event.body_finished:
                    break
        raise Refused(status, body)

    def _events(self) -> Iterator[ws.Event]:
        while True:
            while self._ready:
                yield self._ready.pop(0)
            data = self._socket.recv(65536)
            self._wire.receive_data(data or None)
            self._ready = list(self._wire.events())
            if not data and not self._ready:
                return

    def lines(self) -> Iterator[dict[str, Any]]:
        """To the end, or to where the test stops to read."""
        if self.end:
            return
        for event in self._events():
            if isinstance(event, ws.TextMessage):
                self._text += event.data
                if event.message_finished:
                    whole, self._text = self._text, ""
                    yield json.loads(whole)
            elif isinstance(event, ws.Ping):
                self._socket.sendall(self._wire.send(event.response()))
            elif isinstance(event, ws.CloseConnection):
                self.end = (event.code, event.reason or "")
                return

    def cut(self) -> None:
        """Without a word, as a cable does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def resident(pid: int) -> int:
    """Bytes of memory that a process has now."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) * 1024


def peak(pid: int) -> int:
    """Bytes of memory that it had at most since `forget_peak`."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024


def forget_peak(pid: int) -> None:
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")
