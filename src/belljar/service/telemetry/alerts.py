"""When a sandbox deserves a word: decided from its samples alone, with no clock and no I/O.

An alert begins when something has been too high for long enough, and is over when it has been well below that for a
while: a figure that swings around one threshold is one alert, not twenty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from belljar.core.request import Limits
from belljar.core.values import format_size
from belljar.protocol.records import Alert, Sample

HIGH, LOW = 0.9, 0.8  # parts of a limit
CPU_SECONDS = 10.0  # that the CPU must be high
CALM_SECONDS = 5.0  # that anything must be low before its alert is over
_GAP = 5.0  # seconds without a sample: what was going on before says nothing about now

Kind = Literal["cpu", "memory", "network"]


class Level:
    """One figure, as a part of what it may be: raised after `patience` seconds above HIGH, until it is calm again."""

    def __init__(self, patience: float = 0.0) -> None:
        self.raised: bool = False
        self._patience = patience
        self._above = self._below = math.inf  # since when

    def look(self, part: float, since: float, now: float) -> bool:
        """Takes what was true from `since` to `now`; returns whether anything has changed."""
        self._above = min(self._above, since) if part > HIGH else math.inf
        self._below = min(self._below, since) if part < LOW else math.inf
        if not self.raised and self._above < math.inf and now - self._above >= self._patience:
            self.raised = True
            return True
        if self.raised and now - self._below >= CALM_SECONDS:
            self.raised = False
            return True
        return False

    def pause(self) -> None:
        """Nobody looked for a while."""
        self._above = self._below = math.inf


class AlertMonitor:
    """The alerts of one sandbox. Time is its own uptime: the wall clock may be set while it runs."""

    def __init__(self, id: str, limits: Limits, *, network_allowed: bool) -> None:
        self._id = id
        self._limits = limits
        self._network_allowed = network_allowed
        self._levels: dict[Kind, Level] = {"cpu": Level(CPU_SECONDS), "memory": Level(), "network": Level()}
        self._last: Sample | None = None

    @property
    def raised(self) -> tuple[Kind, ...]:
        return tuple(kind for kind, level in self._levels.items() if level.raised)

    def look(self, sample: Sample) -> list[Alert]:
        """What this sample changes."""
        last, self._last = self._last, sample
        since = last.uptime_seconds if last else sample.uptime_seconds
        if sample.uptime_seconds - since > _GAP:
            since = sample.uptime_seconds
            for level in self._levels.values():
                level.pause()
        changed = [
            kind
            for kind, part in self._parts(last, sample)
            if self._levels[kind].look(part, since, sample.uptime_seconds)
        ]
        return [self._alert(kind, sample.timestamp, self._words(kind, sample)) for kind in changed]

    def end(self, at: float) -> list[Alert]:
        """What ran has ended, and what was raised with it."""
        over = self.raised
        for kind in over:
            self._levels[kind].raised = False
        return [self._alert(kind, at, f"{_NAMES[kind]}: over, the command has ended") for kind in over]

    def _parts(self, last: Sample | None, sample: Sample) -> Iterator[tuple[Kind, float]]:
        yield "cpu", sample.cpu_percent / (self._limits.cpus * 100)
        yield "memory", sample.memory_mb * 2**20 / self._limits.memory
        if not self._network_allowed:
            yield "network", 1.0 if _traffic(sample) > (_traffic(last) if last else 0) else 0.0

    def _alert(self, kind: Kind, at: float, message: str) -> Alert:
        return Alert(
            container_id=self._id, timestamp=at, kind=kind, message=message, over=not self._levels[kind].raised
        )

    def _words(self, kind: Kind, sample: Sample) -> str:
        if not self._levels[kind].raised:
            return f"{_NAMES[kind]}: over, calm for {CALM_SECONDS:g} seconds"
        if kind == "cpu":
            of = "one CPU" if self._limits.cpus == 1 else f"{self._limits.cpus:g} CPUs"
            return f"CPU: above {HIGH:.0%} of {of} for {CPU_SECONDS:g} seconds (now {sample.cpu_percent:.0f} %)"
        if kind == "memory":
            part = sample.memory_mb * 2**20 / self._limits.memory
            return f"memory: {sample.memory_mb:.0f} MB, {part:.0%} of its limit of {format_size(self._limits.memory)}"
        rx, tx = sample.network_rx_bytes or 0, sample.network_tx_bytes or 0
        return f"network: traffic where none was allowed ({rx} bytes received, {tx} sent)"


_NAMES: dict[Kind, str] = {"cpu": "CPU", "memory": "memory", "network": "network"}


def _traffic(sample: Sample) -> int:
    return (sample.network_rx_bytes or 0) + (sample.network_tx_bytes or 0)
