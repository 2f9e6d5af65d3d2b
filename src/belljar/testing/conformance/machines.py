"""Living sandboxes that serve one check after another.

Opening one costs a container engine ten times what most checks do in it. A check that fails in a sandbox that served
another is judged again in new ones, and that verdict counts: see `conform`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from belljar.core.errors import BelljarError
from belljar.sandbox import AsyncSandbox

_PLACES = ("/workspace", "~", "/tmp", "/var/tmp")  # where the programs of a check may have left something
_EMPTY_SECONDS = 20.0
_LOOKS_SECONDS = (0.05, 0.1, 0.3, 0.5)


class UsedMachines:
    """Open living sandboxes in which nothing runs and nothing lies, to be used once more."""

    def __init__(self) -> None:
        self._free: list[tuple[AsyncSandbox, set[str]]] = []

    @asynccontextmanager
    async def one(self, new: Callable[[], AsyncSandbox], told: Callable[[], object]) -> AsyncIterator[AsyncSandbox]:
        """Yields an open sandbox, and keeps it for others if it can be emptied; otherwise it is closed.

        Args:
            new: makes one that is not yet open.
            told: is called if it served another check before.
        """
        if self._free:
            box, fresh = self._free.pop()
            told()
        else:
            box = await new()
            fresh = await _entries(box)
        empty = False
        try:
            yield box
            with anyio.move_on_after(_EMPTY_SECONDS):
                empty = await _emptied(box, fresh)
        finally:
            if empty:
                self._free.append((box, fresh))
            else:
                with anyio.CancelScope(shield=True):
                    await box.close()

    async def close(self) -> None:
        """Closes those that nobody uses."""
        with anyio.CancelScope(shield=True):
            while self._free:
                await self._free.pop()[0].close()


async def _entries(box: AsyncSandbox) -> set[str]:
    return {entry.path for place in _PLACES for entry in await box.files.list(place)}


async def _emptied(box: AsyncSandbox, fresh: set[str]) -> bool:
    """Ends what was started in a sandbox, removes what was left there, and returns whether it is as it was at first."""
    if box.ended or box.paused:
        return False
    with suppress(BelljarError, OSError):
        for process in box.started:
            if process.running:
                await process.kill()
        for path in await _entries(box) - fresh:
            await box.files.remove(path)
        for pause in _LOOKS_SECONDS:  # the kernel may still be about to bury what has ended
            if await box.processes() == ():
                return await _entries(box) == fresh
            await anyio.sleep(pause)
    return False
