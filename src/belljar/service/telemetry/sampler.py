"""Each second a `Sample` of every open sandbox, and the alerts that follow from them.

One task looks after all of them. A run that is over before the first look has cost an entry in a dictionary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio

from belljar.core.request import Limits
from belljar.core.result import Measurable, Usage
from belljar.core.values import MIB
from belljar.protocol.records import Alert, Sample
from belljar.protocol.records import now as wall_clock
from belljar.service.telemetry.alerts import AlertMonitor

_log = logging.getLogger("belljar")
_FIRST = 0.1  # seconds from a sandbox's beginning to the first look, which only sets the counters' zero
_LEAST = 0.01
_IDLE_ROUNDS = 20  # without a sandbox, after which the task waits for the next one


class _Seen:
    """One sandbox as it was seen last."""

    def __init__(self, id: str, box: object, limits: Limits, network_allowed: bool, now: float) -> None:
        self.id = id
        self.box = box
        self.began = now
        self.due = now + _FIRST
        self.watch = AlertMonitor(id, limits, network_allowed=network_allowed)
        self.last: tuple[float, Usage] | None = None
        self.sample: Sample | None = None
        self.failing = False
        self.logged = False  # that it fails is said once

    def take(self, figures: Usage | None, now: float) -> Sample | None:
        """The sample since the last look; None for a first look, and where nothing runs or is known."""
        before, self.last = self.last, None
        if figures is None or figures.cpu_ms is None or figures.memory is None:
            return None
        self.last = now, figures
        if before is None or before[1].cpu_ms is None or figures.cpu_ms < before[1].cpu_ms:  # another command
            return None
        seconds = max(1e-3, now - before[0])
        self.sample = Sample(
            container_id=self.id, timestamp=wall_clock(), memory_mb=round(figures.memory / MIB, 3),
            cpu_percent=round((figures.cpu_ms - before[1].cpu_ms) / seconds / 10, 2),
            network_rx_bytes=figures.rx, network_tx_bytes=figures.tx, disk_read_bytes=figures.disk_read,
            disk_write_bytes=figures.disk_write, uptime_seconds=round(now - self.began, 3),
        )  # fmt: skip
        return self.sample


class Sampler:
    """`async with Sampler(told)`: `told` hears each sample and each alert; it must not wait.

    `watch` and `forget` are called in the event loop that the sampler runs in.
    """

    def __init__(self, told: Callable[[Sample | Alert], None], interval: float = 1.0) -> None:
        self._told = told
        self._interval = interval
        self._deadline = interval / 2  # for one look: a box that does not answer must not delay the next round
        self._seen: dict[str, _Seen] = {}
        self._wanted: anyio.Event | None = None  # the task waits for a sandbox
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._go_round)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    def watch(self, id: str, box: object, limits: Limits, network_allowed: bool) -> None:
        """A box is open. One that cannot be measured is looked at once, and never again."""
        self._seen[id] = _Seen(id, box, limits, network_allowed, time.monotonic())
        if self._wanted is not None:
            self._wanted.set()

    def forget(self, id: str) -> None:
        """It is about to be closed; its alerts are over."""
        if (seen := self._seen.pop(id, None)) and seen.watch.raised:
            self._report(seen.watch.end(wall_clock()))

    def latest(self, id: str) -> Sample | None:
        seen = self._seen.get(id)
        return seen.sample if seen else None

    async def _go_round(self) -> None:
        idle = 0
        while True:
            idle = 0 if self._seen else idle + 1
            if idle > _IDLE_ROUNDS:  # nobody is woken ten times a second for nothing, nor by each of many short runs
                self._wanted = anyio.Event()
                await self._wanted.wait()
                self._wanted, idle = None, 0
            earliest = min((seen.due for seen in self._seen.values()), default=0.0) - time.monotonic()
            await anyio.sleep(min(_FIRST, max(_LEAST, earliest)))  # who comes meanwhile is not due before that
            now = time.monotonic()
            due = [seen for seen in self._seen.values() if seen.due <= now]
            if due:
                async with anyio.create_task_group() as tasks:
                    for seen in due:
                        tasks.start_soon(self._look, seen)

    async def _look(self, seen: _Seen) -> None:
        if not isinstance(seen.box, Measurable):
            seen.due = float("inf")
            return
        figures = await self._measure(seen, seen.box)
        if self._seen.get(seen.id) is not seen:  # it was closed meanwhile
            return
        now = time.monotonic()
        first = seen.last is None
        sample = seen.take(figures, now)
        if figures is not None and first:
            seen.due = now + _FIRST  # the second look makes the first sample
        elif seen.sample is None and now - seen.began < self._interval:
            seen.due = now + _FIRST  # it has not begun: an engine takes its time
        else:
            seen.due = _next(self._interval, seen.began, now)
        if sample:
            self._report([sample, *seen.watch.look(sample)])
        elif figures is None and not seen.failing and seen.watch.raised:  # its command has ended, and the box is open
            self._report(seen.watch.end(wall_clock()))

    async def _measure(self, seen: _Seen, box: Measurable) -> Usage | None:
        try:
            with anyio.fail_after(self._deadline):
                figures = await box.measure()
            seen.failing = False
            return figures
        except Exception as error:
            seen.failing = True
            if not seen.logged:
                seen.logged = True
                _log.warning("%s cannot be measured: %s: %s", seen.id, type(error).__name__, error)
            return None

    def _report(self, measured: Iterable[Sample | Alert]) -> None:
        for item in measured:
            try:
                self._told(item)
            except Exception:  # a listener's fault must not end the figures of all others
                _log.exception("a %s of %s was not taken", type(item).__name__, item.container_id)


def _next(interval: float, began: float, now: float) -> float:
    """The next whole interval of its own life, if that is not at once: rounds that were late do not add up."""
    return began + (int((now - began) / interval + 0.25) + 1) * interval
