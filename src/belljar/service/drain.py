"""How a server leaves: it takes nothing new, lets runs end for a while, stops the rest, and records each of them."""

from __future__ import annotations

import logging

import anyio

from belljar.core.result import Status
from belljar.service.admission.queue import Admission
from belljar.service.run_lifecycle import RunLifecycle
from belljar.service.telemetry.server_log import facts

_log = logging.getLogger("belljar")
ENDING_SECONDS = 10.0  # that a run has to end when it was told to


class Drain:
    """`draining` is set by whoever wants the service to leave; `drained` when no run is under way, and none will be."""

    def __init__(self, lifecycle: RunLifecycle, admission: Admission, patience: float) -> None:
        self.draining: anyio.Event = anyio.Event()
        self.drained: anyio.Event = anyio.Event()
        self._lifecycle = lifecycle
        self._admission = admission
        self._patience = patience  # seconds that runs have to end by themselves

    async def run(self) -> None:
        """Waits for `draining`, then ends all runs and sets `drained`."""
        await self.draining.wait()
        _log.info(
            "it is about to end: nothing new is taken in",
            extra=facts(runs=len(self._lifecycle.runs), seconds=self._patience),
        )
        self._admission.drain()
        with anyio.move_on_after(self._patience):
            await self._all_done()
        if self._lifecycle.runs:
            _log.warning("runs that are still under way are ended", extra=facts(runs=len(self._lifecycle.runs)))
        self.stop_all()
        with anyio.move_on_after(ENDING_SECONDS):
            await self._all_done()
        _log.info("no run is under way any more")
        self.drained.set()

    async def finish(self) -> None:
        """Drains, and returns when that is over; however it goes, it does not take for ever."""
        self.draining.set()
        with anyio.move_on_after(self._patience + 2 * ENDING_SECONDS, shield=True):
            await self.drained.wait()

    def stop_all(self) -> None:
        """Ends every run now; each is still recorded with what it had printed."""
        for run in [*self._lifecycle.runs.values()]:
            run.stop(Status.KILLED)

    async def _all_done(self) -> None:
        for run in [*self._lifecycle.runs.values()]:
            await run.done.wait()
