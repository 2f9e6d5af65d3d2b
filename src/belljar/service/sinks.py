"""Where the engine's events go besides the audit log. A sink never slows a run and never breaks one, nor another sink.

Each sink has a queue of its own and a task of its own. One that is too slow misses the oldest of what it has not heard,
one that raises is logged; both are counted. All of it is for one event loop: the one that opened the sinks.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from belljar.core import errors
from belljar.core.result import Event, EventKind
from belljar.service.bus.queues import Signal

_log = logging.getLogger("belljar")


class Sink:
    """Somebody who wants to hear of events. Who names the kinds it needs is not crowded out by a flood of others.

    Args:
        name: For the log.
        hear: Is called with each event.
        kinds: Of events that it hears; none: all.
        count: Events that may wait.
        wanted: Is asked before each event whether it is of any use.
    """

    def __init__(
        self,
        name: str,
        hear: Callable[[Event], Awaitable[None] | None],
        *,
        kinds: Sequence[EventKind] = (),
        count: int = 10_000,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        if count < 1:
            raise errors.InvalidRequest(f"the sink {name} needs room for at least one event")
        self.name = name
        self.missed: int = 0  # events that it never heard
        self.failed: int = 0  # events over which it raised
        self._hear = hear
        self._kinds = frozenset(kinds)
        self._count = count
        self._wanted = wanted
        self._events: deque[Event] = deque()
        self._signal = Signal()
        self._closing = False
        self._busy = False

    def put(self, event: Event) -> None:
        if (self._kinds and event.kind not in self._kinds) or not self._wanted():
            return
        if self._closing:
            self.missed += 1
            return
        if len(self._events) >= self._count:
            self._events.popleft()
            self.missed += 1
        self._events.append(event)
        self._signal.set()

    async def run(self) -> None:
        """Until it is closed and everything was heard."""
        while True:
            while self._events:
                self._busy = True
                await self._deliver(self._events.popleft())
                self._busy = False
                await anyio.lowlevel.checkpoint()  # one that never waits lets others have their turn
            if self._closing:
                return
            await self._signal.wait()

    async def _deliver(self, event: Event) -> None:
        try:
            heard = self._hear(event)
            if inspect.isawaitable(heard):
                await heard
        except Exception as error:
            self.failed += 1
            if math.log10(self.failed).is_integer():  # the first, the tenth, the hundredth: no flood in the log
                _log.error(
                    "the sink %s failed over %s of %s (%d times by now): %r",
                    self.name, event.kind, event.run, self.failed, error,
                    exc_info=error,
                )  # fmt: skip

    def close(self) -> None:
        self._closing = True
        self._signal.set()

    def give_up(self) -> int:
        """What it did not hear in time."""
        left = len(self._events) + self._busy
        self.missed += left
        self._events.clear()
        return left


class Sinks:
    """The engine's listener: `Engine(sinks=[sinks.hear])`. To be opened where the engine runs."""

    _tasks: TaskGroup

    def __init__(self, sinks: Sequence[Sink], *, closing: float = 5.0) -> None:
        self._sinks = tuple(sinks)
        self._closing = closing
        if len({sink.name for sink in self._sinks}) < len(self._sinks):
            raise errors.InvalidRequest("two sinks have one name")

    @property
    def missed(self) -> dict[str, int]:
        return {sink.name: sink.missed for sink in self._sinks}

    def hear(self, event: Event) -> None:
        for sink in self._sinks:
            sink.put(event)

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        for sink in self._sinks:
            self._tasks.start_soon(sink.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sinks have some seconds for what they have not heard yet."""
        for sink in self._sinks:
            sink.close()
        self._tasks.cancel_scope.shield = True
        self._tasks.cancel_scope.deadline = anyio.current_time() + self._closing
        await self._tasks.__aexit__(None, None, None)  # what the body raised is not for a group of exceptions
        for sink in self._sinks:
            if left := sink.give_up():
                _log.warning("the sink %s was closed with %d events that it did not hear", sink.name, left)
