"""How many sandboxes there may be at once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from belljar.core import errors
from belljar.host.loops import asking_thread, in_this_loop

_RETRY_SECONDS = 5.0
_PATIENCE_SECONDS = 30.0  # after which who waits is told if nobody but those who wait could give a place back


class _Waiting:
    """Somebody in line, who is called for a place, or to be told that there will be none."""

    def __init__(self, living: bool, who: object) -> None:
        self.living: bool = living
        self.who = who
        self.has_place: bool = False
        self.called: anyio.Event = anyio.Event()
        self.call: Callable[[], None] = in_this_loop(self.called.set)


class Capacity:
    """How many sandboxes there may be at once, over all event loops that use the engine; the rest wait in line.

    Nobody waits for living sandboxes: where they have all places, no end of theirs is in sight. Nor does anybody wait
    for ever who holds all that there may be open himself, and asks for one more.
    """

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._number = number
        self._free = number
        self._living = 0
        self._line: deque[_Waiting] = deque()
        self._held: Counter[object] = Counter()  # by whom, those that are not living

    @property
    def full(self) -> bool:
        return self._free <= 0

    @asynccontextmanager
    async def place(self, *, living: bool = False) -> AsyncIterator[None]:
        """Waits for a place, and keeps it while the block runs.

        Args:
            living: it is for a sandbox that stays open until somebody closes it.

        Raises:
            Busy: living sandboxes have all places, or all are held by who waits.
        """
        who = _who()
        await self._take(living, who)
        try:
            yield
        finally:
            self._release(living, who)

    async def _take(self, living: bool, who: object) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                self._note(living, who, 1)
                return
            if self._hopeless:
                raise self._refusal()
            waiting = _Waiting(living, who)
            self._line.append(waiting)
        try:
            while not waiting.called.is_set():
                with anyio.move_on_after(_PATIENCE_SECONDS):
                    await waiting.called.wait()
                self._check(waiting)
        except BaseException:
            with self._lock:
                if waiting in self._line:
                    self._line.remove(waiting)
            if waiting.has_place:  # called in the same moment: the place is ours, and goes to the next
                self._release(living, who)
            raise
        if not waiting.has_place:
            raise self._refusal()

    def _check(self, waiting: _Waiting) -> None:
        """Raises Busy where all that hold places wait for one more: none of them can give one back."""
        with self._lock:
            if waiting in self._line and self._held.keys() <= {one.who for one in self._line}:
                raise errors.Busy(
                    f"all {self._number} sandboxes that may be open at once are held open by who waits for one more",
                    retry_after=_RETRY_SECONDS, status=503,
                    fix="close one before you ask for another, or raise MAX_CONTAINERS",
                )  # fmt: skip

    def _note(self, living: bool, who: object, number: int) -> None:
        if living:
            self._living += number
        else:
            self._held[who] += number
            if not self._held[who]:
                del self._held[who]

    def _release(self, living: bool, who: object) -> None:
        with self._lock:
            self._note(living, who, -1)
            if not self._line:
                self._free += 1
                return
            following = self._line.popleft()
            following.has_place = True
            self._note(following.living, following.who, 1)
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


def _who() -> object:
    """Who asks: the thread of a blocking call, else the task."""
    thread = asking_thread.get()
    return ("task", anyio.get_current_task().id) if thread is None else ("thread", thread)
