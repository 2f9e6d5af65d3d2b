"""How many sandboxes there may be at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import anyio

from belljar.host.loops import in_this_loop


class Capacity:
    """How many sandboxes there may be at once, over all event loops that use the engine; the rest wait in line."""

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free = number
        self._line: deque[tuple[Callable[[], None], anyio.Event]] = deque()

    @property
    def full(self) -> bool:
        return self._free <= 0

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            called = anyio.Event()
            place = (in_this_loop(called.set), called)
            self._line.append(place)
        try:
            await called.wait()
        except BaseException:
            with self._lock:
                waiting = place in self._line
                if waiting:
                    self._line.remove(place)
            if not waiting:  # called in the same moment: the place is ours, and goes to the next
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        with self._lock:
            if self._line:
                call, _ = self._line.popleft()
                call()
            else:
                self._free += 1
