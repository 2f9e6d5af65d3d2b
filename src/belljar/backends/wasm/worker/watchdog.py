"""A thread that interrupts the running guest at its deadline, and sends output that has waited long enough."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import wasmtime

_TICK_SECONDS = 0.01  # that output waits for more, at most


class Watchdog:
    """Watches one engine, in which one guest runs at a time."""

    def __init__(self, engine: wasmtime.Engine, flush: Callable[[], None]) -> None:
        self._engine = engine
        self._flush = flush
        self._change = threading.Condition()
        self._deadline = self._output = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._change:
                now = time.monotonic()
                due, output = self._deadline <= now, self._output <= now
                if not due and not output:
                    left = min(self._deadline, self._output) - now
                    self._change.wait(None if left == math.inf else min(left, _TICK_SECONDS))
                    continue
                self._deadline = math.inf if due else self._deadline
                self._output = math.inf if output else self._output
            if output:
                self._flush()
            if due:
                self._engine.increment_epoch()

    def set(self, deadline: float = math.inf) -> None:
        """Sets the time (monotonic) at which the guest is interrupted; by default never."""
        with self._change:
            sooner, self._deadline = deadline < self._deadline, deadline
            if sooner:
                self._change.notify()

    def flush_soon(self) -> None:
        """Has output flushed at the next tick.

        Nobody is woken for it: most guests have ended by then, and their output goes with their end.
        """
        self._output = time.monotonic()
