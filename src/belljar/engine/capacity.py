"""How many sandboxes there may be at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from belljar.core import errors
from belljar.host.loops import in_this_loop

_RETRY_SECONDS = 5.0


class _Waiting:
    """Somebody in line, who is called for a place, or to be told that there will be none."""

    def __init__(self, living: bool) -> None:
        self.living: bool = living
        self.has_place: bool = False
        self.called: anyio.Event = anyio.Event()
        self.call: Callable[[], None] = in_this_loop(self.called.set)


class Capacity:
    """How many sandboxes there may be at once, over all event loops that use the engine; the rest wait in line.

    Nobody waits for living sandboxes: where they have all places, no end of theirs is in sight.
    """

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._number = number
        self._free = number
        self._living = 0
        self._line: deque[_Waiting] = deque()

    @property
    def full(self) -> bool:
        return self._free <= 0

    @asynccontextmanager
    async def place(self, *, living: bool = False) -> AsyncIterator[None]:
        """Waits for a place, and keeps it while the block runs.

        Args:
            living: it is for a sandbox that stays open until somebody closes it.

        Raises:
            Busy: living sandboxes have all places.
        """
        await self._take(living)
        try:
            yield
        finally:
            self._release(living)

    async def _take(self, living: bool) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                self._living += living
                return
            if self._hopeless:
                raise self._refusal()
            waiting = _Waiting(living)
            self._line.append(waiting)
        try:
            await waiting.called.wait()
        except BaseException:
            with self._lock:
                if waiting in self._line:
                    self._line.remove(waiting)
            if waiting.has_place:  # called in the same moment: the place is ours, and goes to the next
                self._release(living)
            raise
        if not waiting.has_place:
            raise self._refusal()

    def _release(self, living: bool) -> None:
        with self._lock:
            self._living -= living
            if not self._line:
                self._free += 1
                return
            following = self._line.popleft()
            following.has_place = True
            self._living += following.living
            following.call()
            while self._hopeless and self._line:
                self._line.popleft().call()

    @property
    def _hopeless(self) -> bool:
        return self._living >= self._number

    def _refusal(self) -> errors.Busy:
        return errors.Busy(
            f"{self._number} living sandboxes are open, which is all that may be open at once",
            retry_after=_RETRY_SECONDS, status=503, fix="close one, or raise MAX_CONTAINERS",
        )  # fmt: skip
