"""What callers ask about runs: their records, their history, and their lines as they come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from belljar.core import errors
from belljar.protocol.records import Caller, LogLine, RunRecord
from belljar.service.drain import Drain
from belljar.service.publisher import Publisher, subject_of_lines
from belljar.service.run_lifecycle import RunLifecycle
from belljar.service.store.result_text import LargeText
from belljar.service.store.store import Store
from belljar.service.telemetry.log_lines import BEAT, replay

_MAX_STREAMS = 2000  # of one caller at once
_POLL_SECONDS = 0.5  # between two looks at the store for lines of another server's run


def sees(caller: Caller, owner: str) -> bool:
    """Whether a caller may know of what belongs to `owner`."""
    return caller.name == owner or caller.may("admin")


class RunQueries:
    """Answers about runs of this server and of others that share its store. A caller sees their own."""

    def __init__(self, store: Store, lifecycle: RunLifecycle, publisher: Publisher, drain: Drain) -> None:
        self._store = store
        self._runs = lifecycle.runs
        self._publisher = publisher
        self._drain = drain
        self._streams: Counter[str] = Counter()  # that each caller listens to

    async def record(self, id: str, caller: Caller) -> RunRecord:
        """Returns a run of this caller, or raises NotFound: others' runs do not exist for them."""
        record, _ = await self.inspect(id, caller)
        return record

    async def inspect(self, id: str, caller: Caller) -> tuple[RunRecord, LargeText | None]:
        """Returns the same, and its result as JSON where that is large: the record has its head only then."""
        run = self._runs.get(id)
        record, large = (run.record, run.large) if run else await self._store.brief_run(id)
        if record is None or not sees(caller, record.caller):
            raise errors.NotFound(f"there is no run {id[:80]!r}", fix="GET /api/sandbox/runs lists yours")
        return record, large

    async def history(self, caller: Caller, **wanted: Any) -> list[RunRecord]:
        """Returns runs of this caller, the newest first, without their results; `wanted` is as `Store.runs` has it."""
        found = await self._store.runs(caller=None if caller.may("admin") else caller.name, **wanted)
        latest = [self._runs[record.id].record if record.id in self._runs else record for record in found]
        return [record for record in latest if wanted.get("state") in (None, record.state)]

    @contextmanager
    def listening(self, caller: Caller) -> Iterator[None]:
        """Counts a stream of this caller while the block runs, or raises Busy: a slow reader costs megabytes."""
        if self._streams[caller.name] >= _MAX_STREAMS:
            raise errors.Busy(f"{_MAX_STREAMS} streams of yours are open, which is all you may have", retry_after=5)
        self._streams[caller.name] += 1
        try:
            yield
        finally:
            self._streams[caller.name] -= 1
            if not self._streams[caller.name]:
                del self._streams[caller.name]

    async def follow(self, id: str, caller: Caller, after: int) -> AsyncIterator[list[LogLine]]:
        """Yields the lines of a run after a number, in batches, to its end; an empty batch after a while of silence."""
        await self.record(id, caller)
        run = self._runs.get(id)
        async for batch in run.live.follow(after) if run else self._stored_lines(id, caller, after):
            yield batch

    async def _stored_lines(self, id: str, caller: Caller, after: int) -> AsyncIterator[list[LogLine]]:
        """Lines of a run that is over, or of another process: its bus wakes us, and the store has them."""
        heard = time.monotonic()
        while True:
            over = (await self.record(id, caller)).final or self._drain.drained.is_set()
            async for batch in replay(self._store, id, after):
                after, heard = batch[-1].number, time.monotonic()
                yield batch
            if over:
                return
            if time.monotonic() - heard > BEAT:
                heard = time.monotonic()
                yield []
            async with self._publisher.lines.subscribe(subject_of_lines(id)) as news:
                with anyio.move_on_after(_POLL_SECONDS):
                    async for _ in news:
                        break
