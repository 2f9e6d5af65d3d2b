"""The caller's side of a running command: cancel it, feed its stdin, hear its bytes, signal it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import anyio

from belljar.core.process import PtySize
from belljar.core.result import Status, StreamName

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream


class StartedGuest(NamedTuple):
    """A command of a living box that runs: its number inside, and what can be done to it."""

    pid: int
    signal: Callable[[int], Awaitable[None]]  # ProcessLookupError: it has ended
    resize: Callable[[PtySize], Awaitable[None]]  # its terminal, if it has one
    place: Mapping[str, str | int] = {}  # by which its box finds it again, if that may go on without us


class Control:
    """Lets the caller stop a running command and, if `feed` is given, write to its stdin while it runs.

    Attributes:
        feed: the chunks that go to the command's stdin; None: its stdin is that of its `Command`.
        hear: is called with the bytes of each stream as they come, before anything else is done with them.
        reason: the status that the command's result gets when it is stopped.
        guest: the command itself, once a living box has started it.
    """

    def __init__(
        self, feed: MemoryObjectReceiveStream[bytes] | None = None,
        hear: Callable[[StreamName, bytes], object] | None = None,
    ) -> None:  # fmt: skip
        self.feed = feed
        self.hear = hear
        self.guest: StartedGuest | None = None
        self._started = anyio.Event()
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

    def begin(self, guest: StartedGuest) -> None:
        """Is called by a living box when the command runs."""
        self.guest = guest
        self._started.set()

    async def started(self) -> StartedGuest:
        """Waits until a living box has started the command."""
        await self._started.wait()
        assert self.guest is not None
        return self.guest

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    async def stopped(self) -> Status:
        """Waits until `stop` is called, and returns its reason."""
        await self._stopped.wait()
        return self.reason
