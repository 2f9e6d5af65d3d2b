"""A WebSocket of a living sandbox that a test holds in its hand: messages both ways, text and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from wsproto import events as ws

from watching import Watcher

Told = dict[str, Any] | bytes


class Attached(Watcher):
    """`with Attached(server.url, "/api/sandboxes/ID/processes/p1/terminal") as terminal: terminal.send(b"ls\\n")`."""

    _bytes = b""

    def send(self, message: bytes | dict[str, Any] | str) -> None:
        """Sends bytes, or what becomes JSON, or text as it is."""
        data = json.dumps(message) if isinstance(message, dict) else message
        self._socket.sendall(self._wire.send(ws.Message(data=data)))

    def push(self, data: bytes) -> None:
        """Sends bytes past the protocol, as a broken client would."""
        self._socket.sendall(data)

    def hang_up(self) -> None:
        """Closes it as a client does that has had enough."""
        self._socket.sendall(self._wire.send(ws.CloseConnection(code=1000)))

    def messages(self) -> Iterator[Told]:
        """To the end, or to where the test stops to read."""
        if self.end:
            return
        for event in self._events():
            if isinstance(event, ws.TextMessage):
                self._text += event.data
                if event.message_finished:
                    whole, self._text = self._text, ""
                    yield json.loads(whole)
            elif isinstance(event, ws.BytesMessage):
                self._bytes += event.data
                if event.message_finished:
                    found, self._bytes = self._bytes, b""
                    yield bytes(found)
            elif isinstance(event, ws.Ping):
                self._socket.sendall(self._wire.send(event.response()))
            elif isinstance(event, ws.CloseConnection):
                self.end = (event.code, event.reason or "")
                return

    def until(self, wanted: Callable[[Told], bool]) -> Told:
        """The first message that is wanted; those before it are dropped."""
        for message in self.messages():
            if wanted(message):
                return message
        raise AssertionError(f"it ended before that came: {self.end}")

    def bytes_until(self, wanted: bytes) -> bytes:
        """The bytes that come, until some are among them."""
        heard = b""
        for message in self.messages():
            heard += message if isinstance(message, bytes) else b""
            if wanted in heard:
                return heard
        raise AssertionError(f"it ended before {wanted!r} came: {self.end}, after {heard[-300:]!r}")
