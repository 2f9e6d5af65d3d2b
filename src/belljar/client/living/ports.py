"""Ports of a living sandbox on a server: waited for, and connected to through a WebSocket."""

from __future__ import annotations

import time

import anyio
from anyio.abc import ByteStream

from belljar.client.runs import parse
from belljar.client.transport import Transport
from belljar.client.web_socket import WebSocket, WebSocketClosed, said
from belljar.core.options import check_seconds
from belljar.protocol import file_errors
from belljar.protocol.living import MAX_FRAME_BYTES, Listening

_LOOK_SECONDS = 30.0  # that one request waits
_END = '{"eof": true}'


async def wait_for_remote(transport: Transport, sandbox: str, port: int, timeout: float) -> None:
    """Waits until something in the sandbox listens on a port.

    Raises:
        TimeoutError: nothing does after so many seconds.
    """
    check_seconds(timeout=timeout)
    end = time.monotonic() + timeout
    while True:
        left = max(0.0, end - time.monotonic())
        seconds = min(left, _LOOK_SECONDS)
        answer = await transport.ask(
            "GET",
            f"{sandbox}/ports/{port}/wait",
            params={"timeout": f"{seconds:.3f}"},
            read=seconds + transport.timeout,
        )
        if parse(Listening, answer).listening:
            return
        if time.monotonic() >= end:
            raise TimeoutError(f"nothing listens on port {port} after {timeout:g} seconds")


async def dial_remote(transport: Transport, sandbox: str, port: int) -> ByteStream:
    """Connects to a port of the sandbox's own loopback.

    Raises:
        ConnectionRefusedError: nothing listens there.
    """
    with file_errors.raised(f"port {port}"):
        return RemoteByteStream(await transport.web_socket(f"{sandbox}/ports/{port}/dial", {}))


class RemoteByteStream(ByteStream):
    """A connection to a port of a sandbox, through the server."""

    def __init__(self, socket: WebSocket) -> None:
        """Is made by `dial_remote`."""
        self._socket = socket
        self._rest = memoryview(b"")
        self._over = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Returns what came next; raises EndOfStream when the other side has closed."""
        while not self._rest:
            if self._over:
                raise anyio.EndOfStream
            try:
                message = await self._socket.receive()
            except WebSocketClosed as end:
                self._over = True
                if end.code != 1000:
                    raise anyio.BrokenResourceError(str(end)) from None
                continue
            if isinstance(message, bytes):
                self._rest = memoryview(message)
            elif said(message).get("eof"):
                self._over = True
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return bytes(piece)

    async def send(self, item: bytes) -> None:
        """Sends all of it."""
        view = memoryview(item)
        try:
            for start in range(0, len(view), MAX_FRAME_BYTES):
                await self._socket.send(bytes(view[start : start + MAX_FRAME_BYTES]))
        except WebSocketClosed as end:
            raise anyio.BrokenResourceError(str(end)) from None

    async def send_eof(self) -> None:
        """Says that nothing more will be sent."""
        try:
            await self._socket.send(_END)
        except WebSocketClosed as end:
            raise anyio.BrokenResourceError(str(end)) from None

    async def aclose(self) -> None:
        """Closes it, in both directions."""
        await self._socket.close()
