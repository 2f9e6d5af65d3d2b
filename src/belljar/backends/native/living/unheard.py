"""Reads away what processes in the background write to the streams of commands that have ended, so that none blocks."""

from __future__ import annotations

import os

import anyio
from anyio.abc import TaskGroup

from belljar.host import process

_MOST = 64  # streams of a sandbox that are read away: each costs us a descriptor
_PAUSE_SECONDS = 0.05  # between two reads of one: who floods it waits at its pipe


class UnheardStreams:
    """Streams that nobody hears any more. Of more than can be kept, the oldest are closed."""

    def __init__(self) -> None:
        self._scopes: dict[int, anyio.CancelScope] = {}  # of each that is open, the oldest first

    def add(self, fd: int, tasks: TaskGroup) -> None:
        """Takes over a descriptor, and reads it in a task of its own until its end."""
        going = [scope for scope in self._scopes.values() if not scope.cancel_called]
        if len(going) >= _MOST:
            going[0].cancel()
        self._scopes[fd] = scope = anyio.CancelScope()
        tasks.start_soon(self._read_away, fd, scope)

    def close(self) -> None:
        """Closes what no task has closed; to be called when the tasks have ended."""
        for fd in self._scopes:
            os.close(fd)
        self._scopes.clear()

    async def _read_away(self, fd: int, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                while True:
                    if not await process.read_some(fd):
                        break
                    await anyio.sleep(_PAUSE_SECONDS)
        except OSError:  # a terminal that nobody has open any more
            pass
        finally:
            del self._scopes[fd]
            os.close(fd)
