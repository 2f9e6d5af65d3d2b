"""Measures how long an event loop was busy with one thing alone, in CPU time: how busy the machine is counts not."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Self

import anyio

_TICK_SECONDS = 0.005


class Stalls:
    """`async with Stalls() as stalls:` watches this event loop; then `longest` and `cpu` say what it did.

    Attributes:
        longest: seconds of CPU that its thread spent at most between two looks at everything else.
        cpu: seconds of CPU that its thread spent in all.
    """

    def __init__(self) -> None:
        self.longest: float = 0.0
        self.cpu: float = 0.0
        self._stack = AsyncExitStack()
        self._last = 0.0

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        self._last = time.thread_time()
        tasks.start_soon(self._tick)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._look()
        await self._stack.aclose()

    async def _tick(self) -> None:
        while True:
            self._look()
            await anyio.sleep(_TICK_SECONDS)

    def _look(self) -> None:
        now = time.thread_time()
        spent, self._last = now - self._last, now
        self.longest, self.cpu = max(self.longest, spent), self.cpu + spent
