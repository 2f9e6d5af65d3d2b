"""The caller's hand on a running command: cancellation, and its live stdin."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from belljar.core.result import Status


class Control:
    """The caller's hand on a running command: stop it, or (if `feed` is set) talk to its stdin."""

    def __init__(self, feed: MemoryObjectReceiveStream[bytes] | None = None) -> None:
        self.feed = feed
        self.reason = Status.ABORTED
        self._stopped = anyio.Event()
        self._told: list[Callable[[Status], object]] = []

    def stop(self, reason: Status = Status.ABORTED) -> None:
        """Ends the command and everything it started; its partial output is still returned."""
        if not self._stopped.is_set():
            self.reason = reason
            self._stopped.set()
            for call in self._told:
                call(reason)

    def tell(self, call: Callable[[Status], object]) -> None:
        """For who has no task to wait in `stopped`: called once, at once if it has happened already."""
        call(self.reason) if self._stopped.is_set() else self._told.append(call)

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    async def stopped(self) -> Status:
        await self._stopped.wait()
        return self.reason
