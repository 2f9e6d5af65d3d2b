"""The worker's frames: requests as they arrive on the socket, and answers as they leave on stdout."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .messages import Request

_CHUNK_BYTES = 1 << 15  # of waiting output, after which it waits no longer
_FRAME_BYTES = 1 << 18  # of output in one frame
_READ_BYTES = 1 << 18
_MAX_DESCRIPTORS = 4


class Received(NamedTuple):
    """One request, the descriptors that came with it, and its payload."""

    request: Request
    fds: list[int]
    payload: bytes


def requests(host: socket.socket) -> Iterator[Received]:
    """Yields each request of the host, to the end of the socket."""
    pending = bytearray()
    fds: list[int] = []

    def fill() -> bool:
        data, more, _, _ = socket.recv_fds(host, _READ_BYTES, _MAX_DESCRIPTORS)
        pending.extend(data)
        fds.extend(more)
        return bool(data)

    while True:
        while (end := pending.find(b"\n")) < 0:
            if not fill():
                return
        request: Request = json.loads(pending[:end])
        size = end + 1 + request.get("payload", 0)
        while len(pending) < size:
            if not fill():
                return
        payload = bytes(pending[end + 1 : size])
        del pending[:size]
        yield Received(request, fds[:], payload)
        fds.clear()


class FrameWriter:
    """Writes frames to the host, one line of JSON each.

    What a guest prints waits a moment for more: a frame for every `print` would cost more than the print.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, list[bytes]]] = []  # (stream, what it said)
        self._size = 0

    def send(self, **frame: Any) -> None:
        """Writes a frame of the worker's own, after all output that came before it."""
        with self._lock:
            self._write(self._take_waiting() + _line(frame))

    def send_payload(self, data: bytes) -> None:
        """Writes what a session's agent said, unread; its length says where it ends, whatever is in it."""
        with self._lock:
            self._write(self._take_waiting() + _line({"payload": len(data)}) + data)

    def print(self, stream: str, data: bytes) -> None:
        """Takes what a guest wrote to stdout or stderr."""
        with self._lock:
            if self._waiting and self._waiting[-1][0] == stream:
                self._waiting[-1][1].append(data)
            else:
                self._waiting.append((stream, [data]))
            self._size += len(data)
            if self._size > _CHUNK_BYTES:
                self._write(self._take_waiting())

    def flush(self) -> None:
        """Writes the output that waits."""
        with self._lock:
            self._write(self._take_waiting())

    def _take_waiting(self) -> bytes:
        """Returns the output that waits as frames: short ones, so that the host never has to parse much at once."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        frames = []
        for stream, parts in waiting:
            data = b"".join(parts)
            for at in range(0, len(data), _FRAME_BYTES):
                frames.append(
                    _line({"stream": stream, "data": base64.b64encode(data[at : at + _FRAME_BYTES]).decode()})
                )
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def _line(frame: dict[str, Any]) -> bytes:
    return json.dumps(frame).encode() + b"\n"
