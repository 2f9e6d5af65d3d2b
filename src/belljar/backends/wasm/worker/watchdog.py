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
        """`flush`: reads and sends what the guest has printed; it is called at every tick while a guest runs."""
        self._engine = engine
        self._flush = flush
        self._change = threading.Condition()
        self._deadline = self._tick = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._change:
                now = time.monotonic()
                due, tick = self._deadline <= now, self._tick <= now
                if not due and not tick:
                    left = min(self._deadline, self._tick) - now
                    self._change.wait(None if left == math.inf else left)
                    continue
                self._deadline = math.inf if due else self._deadline
                self._tick = now + _TICK_SECONDS if self._tick < math.inf else math.inf
            if due:
                self._engine.increment_epoch()
            if tick:
                self._flush()

    def set(self, deadline: float = math.inf) -> None:
        """Sets the time (monotonic) at which the guest is interrupted; by default never, and then nobody runs."""
        with self._change:
            was_idle = self._tick == math.inf
            self._deadline = deadline
            self._tick = math.inf if deadline == math.inf else time.monotonic() + _TICK_SECONDS
            if was_idle and deadline < math.inf:
                self._change.notify()
