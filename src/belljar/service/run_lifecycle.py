"""A run under way, as the process that carries it out knows it."""

from __future__ import annotations

from typing import Any

import anyio

from belljar.backends.control import Control
from belljar.core import errors
from belljar.core.result import Result, Status
from belljar.protocol.records import RunRecord
from belljar.service.telemetry.log_lines import Live


class Run:
    def __init__(self, record: RunRecord, live: Live) -> None:
        self.record = record
        self.live = live
        self.control = Control()
        self.scope = anyio.CancelScope()
        self.seen = anyio.Event()  # it has a place, or one in the queue, or was turned away
        self.begun = anyio.Event()  # it is in the store, if it could be
        self.recorded = False
        self.opened = bool(record.session)  # there is a box whose `control` can be heard
        self.done = anyio.Event()
        self.refusal: errors.BelljarError | None = None
        self.error: errors.BelljarError | None = None  # what `problem` was made of

    @property
    def id(self) -> str:
        return self.record.id

    def change(self, **fields: Any) -> None:
        self.record = self.record.model_copy(update=fields)

    def wait_in_line(self, position: int) -> None:
        """Told whenever its place in the queue changes."""
        self.change(state="queued", position=position)
        self.seen.set()

    def stop(self, reason: Status = Status.ABORTED) -> None:
        """Ends the guest if it runs; one that waits or is being started is given up."""
        self.control.stop(reason)
        if not self.opened:  # it waits, for a place here or in the engine, or for its box
            self.scope.cancel()

    async def result(self) -> Result:
        """What came of it, or the error that came instead."""
        await self.done.wait()
        if self.record.result is None:
            raise self.error or errors.ExecutionFailed(f"{self.id} ended without a result")
        return self.record.result
