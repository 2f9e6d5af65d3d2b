"""A transport that sends the head of an answer together with the beginning of its body."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from belljar.core.values import KIB

_MAX_HELD_BYTES = 64 * KIB  # more is sent at once: the transport itself has to see that its buffer is full


class JoinedWrites:
    """Wraps a transport: two pieces that are written in one turn of the event loop are sent by one system call.

    Each call costs a tenth of a millisecond, and may wake the client before there is anything for it to do. The second
    piece is not held: what is done after an answer, such as its line in the log, must not keep it waiting.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Takes data to be sent with the next piece, or before the event loop looks for anything else to do."""
        if self._parts or len(data) > _MAX_HELD_BYTES:
            self._parts.append(data)
            self._flush()
        elif data:
            self._parts.append(data)
            self._loop.call_soon(self._flush)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Takes several, behind what was written before."""
        for part in parts:
            self.write(part)

    def close(self) -> None:
        """Sends what it holds, and closes the transport."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)
