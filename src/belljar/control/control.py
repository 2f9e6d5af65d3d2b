"""The caller's side of a running command: cancel it, and feed its stdin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from belljar.core.result import Status

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream


class Control:
    """Lets the caller stop a running command and, if `feed` is given, write to its stdin while it runs.

    Attributes:
        feed: the chunks that go to the command's stdin; None: its stdin is that of its `Command`.
        reason: the status that the command's result gets when it is stopped.
    """

    def __init__(self, feed: MemoryObjectReceiveStream[bytes] | None = None) -> None:
        self.feed = feed
        self.reason: Status = Status.ABORTED
        self._stopped = anyio.Event()
        self._callbacks: list[Callable[[Status], object]] = []

    def stop(self, reason: Status = Status.ABORTED) -> None:
        """Ends the command and everything it started; its partial output is still returned.

        Only the first call counts.

        Args:
            reason: the status of the command's result.
        """
        if not self._stopped.is_set():
            self.reason = reason
            self._stopped.set()
            for callback in self._callbacks:
                callback(reason)

    def on_stop(self, callback: Callable[[Status], object]) -> None:
        """Calls `callback` with the reason when the command is stopped; at once if it has been stopped already."""
        if self._stopped.is_set():
            callback(self.reason)
        else:
            self._callbacks.append(callback)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    async def stopped(self) -> Status:
        """Waits until `stop` is called, and returns its reason."""
        await self._stopped.wait()
        return self.reason
