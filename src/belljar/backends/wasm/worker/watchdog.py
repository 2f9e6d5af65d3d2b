"""A thread that interrupts the running guest at its deadline, and sends output that has waited long enough."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from .fuel import ASYNC_EXCEPTION, COLLECT_GARBAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    import wasmtime

    from .fuel import FuelCount

_TICK_SECONDS = 0.01  # that output waits for more, at most
_LOOK_SECONDS = 0.0005  # between two looks at whether a guest has written its fuel down
_ASK_SECONDS = 0.03  # that each way to have it do so is given


class Watchdog:
    """Watches one engine, in which one guest runs at a time."""

    def __init__(
        self, engine: wasmtime.Engine, flush: Callable[[], None], late: Callable[[int], None] = lambda fuel: None
    ) -> None:
        """Starts the thread.

        Args:
            engine: the one that is watched.
            flush: reads and sends what the guest has printed; it is called at every tick while a guest runs.
            late: is told the fuel that a guest has used that may not be interrupted at once, since it waits.
        """
        self._engine = engine
        self._flush = flush
        self._late = late
        self._change = threading.Condition()
        self._deadline = self._tick = math.inf
        self._fuel: FuelCount | None = None  # of the guest that runs
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
                guest = self._fuel
                if guest:
                    guest.moves()
            if due and guest:
                self._interrupt(guest)
            if tick:
                self._flush()

    def _interrupt(self, guest: FuelCount) -> None:
        """Has the guest write down the fuel that it has used, if it can, and interrupts it."""
        moves = self._has_it_counted(guest, ASYNC_EXCEPTION) or self._has_it_counted(guest, COLLECT_GARBAGE)
        with self._change:
            if self._fuel is not guest:
                return
            self._engine.increment_epoch()
            used = guest.used(interrupted=True)
        if not moves:
            self._late(used)

    def _has_it_counted(self, guest: FuelCount, bit: int) -> bool:
        """Waits a moment for the guest to write its fuel down; True if it has, or has ended meanwhile."""
        until = time.monotonic() + _ASK_SECONDS
        with self._change:
            if self._fuel is guest:
                guest.ask(bit)
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            with self._change:  # its store is not closed while we look
                if self._fuel is not guest or guest.moves():
                    return True
        return False

    def begin(self, guest: FuelCount, deadline: float) -> None:
        """Watches a guest that is to be interrupted at this time (monotonic)."""
        with self._change:
            self._fuel = guest
            self._deadline, self._tick = deadline, time.monotonic() + _TICK_SECONDS
            self._change.notify()

    def end(self) -> None:
        """Watches nobody until the next guest begins."""
        with self._change:
            self._fuel = None
            self._deadline = self._tick = math.inf
