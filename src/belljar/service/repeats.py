"""Requests that need no run of their own: sent again under their idempotency key, or the same as one that is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.protocol.records import Caller, RunRecord, now
from belljar.service.claims import another_request
from belljar.service.run_lifecycle import KeyTaken, Run, RunLifecycle
from belljar.service.store.statements import Claim, KeyOwner
from belljar.service.store.store import Store

_NO_LOG_MEMORY = 1  # bytes: such a run has no lines of its own to keep


class Repeats:
    """Finds the run that a request means, where there is one already."""

    def __init__(self, store: Store, engine: Engine, lifecycle: RunLifecycle) -> None:
        self._store = store
        self._engine = engine
        self._lifecycle = lifecycle

    async def once(
        self, caller: Caller, key: str, fingerprint: str, id: str, start: Callable[[Claim | None], Awaitable[Run]]
    ) -> Run:
        """Starts one run for one idempotency key, however often the request comes.

        Args:
            caller: Whose key it is.
            key: The idempotency key; empty: there is none, and a run is started.
            fingerprint: Of the request; a key is good for one request only.
            id: Of the run that `start` starts.
            start: Starts it, and records it together with the claim of its key. If it is turned away, there is none.
        """
        if not key:
            return await start(None)
        if owner := await self._store.owner(caller.name, key):
            return await self._run_of(owner, fingerprint)
        try:
            return await start(Claim(caller.name, key, fingerprint))
        except KeyTaken as taken:  # by its twin, in between
            return await self._run_of(taken.owner, fingerprint)
        except errors.NotAvailable:  # it may have been recorded even so
            with suppress(errors.NotAvailable):
                await self._store.release(caller.name, key, id)
            raise

    async def _run_of(self, first: KeyOwner, fingerprint: str) -> Run:
        if first.fingerprint != fingerprint:
            raise another_request()
        owner = first.id
        if owner in self._lifecycle.runs:
            return self._lifecycle.runs[owner]
        record, large = await self._store.brief_run(owner)
        if record is None:  # claimed a moment ago by its twin
            raise errors.Busy("a request with this idempotency key is just being taken in", retry_after=1, status=503)
        if not record.final:
            raise errors.Busy("another server of this store is at it", retry_after=1, status=503)
        run = self._lifecycle.new_run(record, _NO_LOG_MEMORY)
        run.stored = large
        if record.problem:
            run.error = errors.from_dict(record.problem)
        run.done.set()
        return run

    async def kept(self, record: RunRecord) -> RunRecord | None:
        """Returns the record of an identical deterministic run of the same caller that succeeded, if there is one."""
        return await self._store.same(record.fingerprint, record.caller) if record.fingerprint else None

    async def serve(self, found: RunRecord, record: RunRecord) -> Run:
        """Answers a request with the result of another run, and records that."""
        assert found.result is not None, "only runs that succeeded are kept for this"
        reasons = (*found.result.reasons, f"served from the store: {found.id} was the same run")
        run = self._lifecycle.new_run(record, _NO_LOG_MEMORY)
        await self._engine.record("served", run=record.id, message=f"from {found.id}")
        run.change(
            state="finished", started=record.created, ended=now(), backend=found.backend, fingerprint="",
            result=found.result.model_copy(update={"reasons": reasons, "container_id": found.id}),
        )  # fmt: skip
        await self._store.begin(run.record)
        run.done.set()
        return run
