"""Connections to a server inside, used again while they are fresh: each new one costs some milliseconds."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import anyio
import h11
from anyio.abc import ByteStream

_MOST_IDLE = 64
_FRESH_SECONDS = 10.0  # servers close what is idle for some seconds; who meets a closed one asks again
_MAX_HEAD_BYTES = 64 * 1024  # of an answer's headers


class ServerConnection:
    """One connection, and what has been said over it.

    Attributes:
        stream: its bytes.
        wire: the state of its protocol.
        used: whether it has carried a request before this one.
    """

    def __init__(self, stream: ByteStream) -> None:
        """Is fresh."""
        self.stream = stream
        self.wire: h11.Connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self.used: bool = False

    def renew(self) -> bool:
        """Makes it ready for another request; False: it cannot carry one."""
        self.used = True
        try:
            self.wire.start_next_cycle()
        except h11.LocalProtocolError:
            return False
        return not self.wire.trailing_data[0]

    async def close(self) -> None:
        """Closes it at once."""
        with suppress(OSError):
            await anyio.aclose_forcefully(self.stream)


class _Idle(NamedTuple):
    connection: ServerConnection
    until: float


class Idle:
    """Connections that wait for their next request."""

    def __init__(self) -> None:
        """There are none yet."""
        self._waiting: list[_Idle] = []

    async def take(self) -> ServerConnection | None:
        """Returns the one that was used last, if it is fresh; those that are not are closed."""
        fresh = [one for one in self._waiting if one.until > anyio.current_time()]
        old, self._waiting = [one for one in self._waiting if one not in fresh], fresh
        for one in old:
            await one.connection.close()
        return self._waiting.pop().connection if self._waiting else None

    async def give(self, connection: ServerConnection) -> None:
        """Keeps one for the next request, if it can carry one."""
        if len(self._waiting) < _MOST_IDLE and connection.renew():
            self._waiting.append(_Idle(connection, anyio.current_time() + _FRESH_SECONDS))
        else:
            await connection.close()

    async def close(self) -> None:
        """Closes them all."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            await one.connection.close()
