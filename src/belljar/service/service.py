"""The one that runs other people's requests: takes them in, records them, waits for their turn, and tells their end.

No record, no run: a run is in the store before it starts, and one that cannot be recorded is refused.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from belljar.backends.control import Control
from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.core.result import Event, Result, Status
from belljar.core.settings import Settings
from belljar.core.values import MIB
from belljar.engine import audit
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease, Listener
from belljar.engine.tracing import span
from belljar.protocol.records import Alert, Caller, LogLine, RunRecord, Sample, new_id
from belljar.service import projects
from belljar.service.admission.queue import Admission
from belljar.service.auth.access import Access
from belljar.service.bus.bus import Bus, open_bus
from belljar.service.claims import another_request
from belljar.service.instances import ServerInstance
from belljar.service.run_lifecycle import Run
from belljar.service.sinks import Sink, Sinks
from belljar.service.store.store import Store, store_url
from belljar.service.store.sync import Syncer
from belljar.service.telemetry.log_lines import BEAT, Live, replay
from belljar.service.telemetry.metrics import Metrics, Watched
from belljar.service.telemetry.sampler import Sampler

Work = Callable[[Listener, Control], Awaitable[Result]]
_ENDING = 10.0  # seconds that a run has to end when it was told to
_STREAMS = 2000  # of one caller at once
_REQUESTS = 256 * MIB  # of one caller's requests that run or wait: a queue is bounded by what it holds, too
_AFTER = 0.01  # seconds between an answer and its record
_log = logging.getLogger("belljar")


class Service:
    """`async with Service(settings) as service`: everything that a server needs, and nothing that listens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sinks = Sinks([Sink("events", self._publish_event, kinds=("started", "limit", "denied"))])
        self.engine = Engine(settings, sinks=[self.sinks.hear], on_box=self._watch)
        self.store = Store(store_url(settings), outbox=bool(settings.service.shared_store))
        self.access = Access(settings, self.store)
        self.admission = Admission(settings)
        self.metrics = Metrics(self.engine.languages, self.engine.known)
        self.sampler = Sampler(self._sampled)
        shared = settings.service.shared_store
        self.syncer = Syncer(self.store, shared) if shared else None
        self.lines: Bus
        self.events: Bus
        self.instance = ServerInstance(Path(settings.data_dir))
        self.runs: dict[str, Run] = {}
        self.grants = projects.Grants(settings.service.projects)
        self.streams: Counter[str] = Counter()  # that each caller listens to
        self._bytes: Counter[str] = Counter()  # of the requests of each caller
        self.draining = anyio.Event()
        self.drained = anyio.Event()  # no run is under way, and none will be
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup

    async def __aenter__(self) -> Self:
        settings = self.settings.service
        async with AsyncExitStack() as stack:
            stack.enter_context(self.instance)
            await stack.enter_async_context(self.store)
            await stack.enter_async_context(self.sampler)
            self.lines, self.events = await stack.enter_async_context(
                open_bus(redis=settings.redis, nats=settings.nats)
            )
            await stack.enter_async_context(self.sinks)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            if self.syncer:
                self._tasks.start_soon(self.syncer.run)
            stack.push_async_callback(self._end_all)
            self._tasks.start_soon(self._drain_when_told)
            await self._mend()
            self._stack = stack.pop_all()
        self._show()
        return self

    def _show(self) -> None:
        """Figures that are looked up when somebody asks for them."""
        for name, read in _FIGURES.items():
            self.metrics.show(name, partial(read, self))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # somebody is in a hurry: nobody would wait for runs to end by themselves
            self.stop_all()
        await self._stack.__aexit__(kind, error, trace)

    async def _mend(self) -> None:
        """What a server that was killed left: its runs get a final state, its sandboxes are removed."""
        lost = await self.store.lose(self.instance.is_dead)
        if lost:
            _log.warning("%d runs were under way when another Belljar died: %s", len(lost), ", ".join(lost[:20]))
        for id in lost:
            await self.engine.record("lost", run=id, message="the service died while it was under way")
        if self.instance.clear():
            self._tasks.start_soon(self._reap)

    async def _reap(self) -> None:
        """Beside the first requests: an engine that does not answer keeps nobody waiting."""
        for name in self.engine.known:
            with anyio.move_on_after(_ENDING):
                try:
                    await self.engine.backend(name).reap()
                except (errors.BelljarError, OSError) as error:
                    _log.info("%s could not be asked for what was left: %s", name, error)

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Beside everything else, and no longer than the service is there."""
        self._tasks.start_soon(work)

    # --- taking in ---

    async def submit(self, request: RunRequest, caller: Caller, *, key: str = "", cached: bool = False) -> Run:
        """Takes a request in: returns when it is recorded and runs or waits, raises when it is turned away."""
        request = await self.check(request)
        record = self._record_of(request, caller, cached)
        if cached and record.fingerprint and (found := await self.store.same(record.fingerprint, caller.name)):
            await self.admission.count(caller)
            return await self._served_again(found, record)
        size, held = _size(request), self._bytes[caller.name]
        if held and held + size > _REQUESTS:
            raise errors.Busy("your requests that run or wait are as large as they may be", retry_after=5)
        limits = self._limits(request)

        async def work(listener: Listener, control: Control) -> Result:
            folder = request.workspace
            with self.grants.given((request.packages, False), (folder.path, folder.write) if folder else (None, False)):
                return await self.engine.run(request, listener=listener, control=control, id=record.id)

        def take() -> Awaitable[Run]:
            return self.take(record, caller, work, cpus=limits[0], memory=limits[1], size=size)

        return await self.once(caller, key, _fingerprint(request) if key else "", record.id, take)

    async def once(self, caller: Caller, key: str, asked: str, id: str, take: Callable[[], Awaitable[Run]]) -> Run:
        """One run for one idempotency key, whoever sends it again; who was turned away may come back with theirs."""
        if not key:
            return await take()
        owner, fingerprint = await self.store.claim(caller.name, key, asked, id)
        if owner != id:
            return await self._same_again(owner, fingerprint == asked)
        try:
            return await take()
        except errors.BelljarError:
            with suppress(errors.NotAvailable):
                await self.store.release(caller.name, key, id)
            raise

    async def check(self, request: RunRequest) -> RunRequest:
        """By the rules for folders of ours."""
        try:
            return projects.check(request, self.settings.service.projects)
        except errors.PolicyDenied as refusal:
            await self.refuse(refusal, **audit.asked(request))
            raise

    async def refuse(self, refusal: errors.PolicyDenied, **facts: Any) -> None:
        """A refusal is counted and recorded, whoever pronounces it."""
        self.metrics.refused(refusal.kind)
        await self.engine.record("refused", error=refusal.kind, message=refusal.message, **facts)

    async def take(
        self, record: RunRecord, caller: Caller, work: Work, *, cpus: float, memory: int, size: int = 0
    ) -> Run:
        run = Run(record, Live(record.id, self.store, self._publish, self.settings.service.log_memory))
        self.runs[run.id] = run
        self._bytes[caller.name] += size
        self._tasks.start_soon(self._carry_out, run, caller, work, cpus, memory, size)
        try:
            await run.seen.wait()
            if run.refusal:
                raise run.refusal
            await self.store.begin(run.record)
            run.recorded = True
        except errors.Busy as refusal:
            await self.refuse(refusal, run=run.id)
            raise
        finally:
            run.begun.set()
            if not run.recorded:
                run.scope.cancel()
        return run

    async def _carry_out(self, run: Run, caller: Caller, work: Work, cpus: float, memory: int, size: int) -> None:
        audit.caller.set(caller.name)
        try:
            with run.scope, span("request", run=run.id, caller=caller.name):
                place = self.admission.place(caller, cpus=cpus, memory=memory, told=run.wait_in_line)
                try:
                    async with AsyncExitStack() as stack:
                        with span("queue"):
                            await stack.enter_async_context(place)
                        await self._go(run, work)
                except errors.Busy as refusal:
                    self._turn_away(run, refusal)
            if run.scope.cancelled_caught and not run.record.final:
                self._fail(run, errors.Aborted("it was cancelled before it ran", fix="send it again"))
        except Exception as error:  # a bug of ours ends one run, not the service
            _log.exception("run %s", run.id)
            self._fail(run, errors.ExecutionFailed(f"{type(error).__name__}: {error}", fix="please report this"))
            run.refusal = run.refusal or run.error
        finally:
            self._bytes[caller.name] -= size
            if not self._bytes[caller.name]:
                del self._bytes[caller.name]
            with anyio.CancelScope(shield=True):
                await self._end(run)

    async def _go(self, run: Run, work: Work) -> None:
        waited = run.record.position is not None
        run.change(state="running", started=time.time(), position=None)
        run.seen.set()
        await run.begun.wait()
        if not run.recorded:
            return
        try:
            if waited:
                await self.store.change(run.id, state="running", started=run.record.started)
            self._tell("running", run)
            result = await work(run.live.hear, run.control)
            run.change(state="finished", result=result, backend=result.backend)
        except errors.BelljarError as error:
            self._fail(run, error)
        except Exception as error:  # a bug of ours ends one run, not the service
            _log.exception("run %s", run.id)
            self._fail(run, errors.ExecutionFailed(f"{type(error).__name__}: {error}", fix="please report this"))

    def _turn_away(self, run: Run, refusal: errors.Busy) -> None:
        if run.seen.is_set():  # it waited, and the service goes away
            self._fail(run, refusal)
        else:
            run.refusal = refusal

    def _fail(self, run: Run, error: errors.BelljarError) -> None:
        run.error = error
        state = "refused" if isinstance(error, errors.PolicyDenied) else "failed"
        run.change(state=state, problem=error.as_dict(), position=None)

    async def _end(self, run: Run) -> None:
        """Whatever happened: nobody is left waiting, and the record says how it ended.

        The answer does not wait for the record: until it is written the run is among ours, and is told from there.
        """
        run.change(ended=time.time())
        run.live.close(run.record.ended or 0.0)
        run.seen.set()
        await run.begun.wait()
        if run.recorded and not run.record.final:
            self._fail(run, errors.Aborted("the service ended while it was under way"))
        if run.recorded:
            self.metrics.hear(run.record)
        if not run.record.fingerprint:  # else the next may be answered from the record of this one
            run.done.set()
            await anyio.sleep(_AFTER)  # the answer goes first, and more ends go into one commit
        if run.recorded:
            self._tell("ended", run)
            await self._write_end(run.record)
        self.runs.pop(run.id, None)
        run.done.set()

    async def _write_end(self, record: RunRecord) -> None:
        try:
            await self.store.change(
                record.id, state=record.state, started=record.started, ended=record.ended, backend=record.backend,
                result=record.result, problem=record.problem,
            )  # fmt: skip
        except errors.BelljarError as error:  # the answer is not taken away; after a restart the run is `lost`
            _log.error("the end of %s could not be recorded: %s", record.id, error)
            self.instance.owes = True

    # --- what is known ---

    async def record(self, id: str, caller: Caller) -> RunRecord:
        """A run of this caller; others' do not exist for them."""
        run = self.runs.get(id)
        record = run.record if run else await self.store.run(id)
        if record is None or not sees(caller, record.caller):
            raise errors.NotFound(f"there is no run {id[:80]!r}", fix="GET /api/sandbox/runs lists yours")
        return record

    async def history(self, caller: Caller, **wanted: Any) -> list[RunRecord]:
        found = await self.store.runs(caller=None if caller.may("admin") else caller.name, **wanted)
        live = [self.runs[record.id].record if record.id in self.runs else record for record in found]
        return [record for record in live if wanted.get("state") in (None, record.state)]

    async def cancel(self, id: str, caller: Caller) -> RunRecord:
        record = await self.record(id, caller)
        run = self.runs.get(id)
        if run is None:
            if not record.final and record.instance != self.instance.name:
                raise errors.Elsewhere(
                    f"{id} is under way on another server", fix=f"cancel it there: {record.instance}",
                    context={"instance": record.instance},
                )  # fmt: skip
            return record
        run.stop()
        with anyio.move_on_after(_ENDING):
            await run.done.wait()
        return run.record

    async def follow(self, id: str, caller: Caller, after: int) -> AsyncIterator[list[LogLine]]:
        await self.record(id, caller)
        run = self.runs.get(id)
        async for batch in run.live.follow(after) if run else self._elsewhere(id, caller, after):
            yield batch

    @contextmanager
    def listening(self, caller: Caller) -> Iterator[None]:
        """A reader that stands still costs megabytes: nobody has any number of them."""
        if self.streams[caller.name] >= _STREAMS:
            raise errors.Busy(f"{_STREAMS} streams of yours are open, which is all you may have", retry_after=5)
        self.streams[caller.name] += 1
        try:
            yield
        finally:
            self.streams[caller.name] -= 1
            if not self.streams[caller.name]:
                del self.streams[caller.name]

    async def _elsewhere(self, id: str, caller: Caller, after: int) -> AsyncIterator[list[LogLine]]:
        """Lines of a run that is over, or of another process: its bus wakes us, the store tells them."""
        heard = time.monotonic()
        while True:
            over = (await self.record(id, caller)).final or self.drained.is_set()
            async for batch in replay(self.store, id, after):
                after, heard = batch[-1].number, time.monotonic()
                yield batch
            if over:
                return
            if time.monotonic() - heard > BEAT:
                heard = time.monotonic()
                yield []
            async with self.lines.subscribe(f"belljar.logs.{id}") as news:
                with anyio.move_on_after(0.5):
                    async for _ in news:
                        break

    # --- the end ---

    async def _drain_when_told(self) -> None:
        await self.draining.wait()
        self.admission.drain()
        with anyio.move_on_after(self.settings.service.drain):
            await self._all_done()
        self.stop_all()
        with anyio.move_on_after(_ENDING):
            await self._all_done()
        self.drained.set()

    async def _all_done(self) -> None:
        for run in [*self.runs.values()]:
            await run.done.wait()

    def stop_all(self) -> None:
        """Ends every run now; each is still recorded with what it had printed."""
        for run in [*self.runs.values()]:
            run.stop(Status.KILLED)

    async def _end_all(self) -> None:
        self.draining.set()
        with anyio.move_on_after(self.settings.service.drain + 2 * _ENDING, shield=True):
            await self.drained.wait()
        self._tasks.cancel_scope.cancel()

    # --- telling ---

    def _watch(self, lease: Lease, opened: bool) -> None:
        if opened:
            if run := self.runs.get(lease.plan.id):
                run.opened = True
                run.change(backend=lease.offer.backend)
            self.sampler.watch(lease.plan.id, lease.box, lease.plan.limits, lease.plan.egress.mode != "none")
        else:
            self.sampler.forget(lease.plan.id)

    def _sampled(self, told: Sample | Alert) -> None:
        self.store.add(told)
        if isinstance(told, Alert):
            if not told.over:
                self.metrics.alerted(told.kind)
            self.events.publish(f"belljar.events.alert.{told.container_id}", told.model_dump(mode="json"))

    def _publish(self, line: LogLine) -> None:
        self.lines.publish(f"belljar.logs.{line.container_id}", line.model_dump())

    def _publish_event(self, event: Event) -> None:
        self.events.publish(f"belljar.events.{event.kind}.{event.run}", event.model_dump(mode="json"))

    def _tell(self, what: str, run: Run) -> None:
        body = run.record.model_dump(mode="json", exclude={"result", "position"})
        body["status"] = run.record.result.status if run.record.result else None
        self.events.publish(f"belljar.events.{what}.{run.id}", body)

    # --- the same again ---

    def _record_of(self, request: RunRequest, caller: Caller, cached: bool) -> RunRecord:
        text = request.code if request.code is not None else "\0".join(request.command or ())
        return RunRecord(
            id=new_id(), caller=caller.name, instance=self.instance.name, created=time.time(),
            language=request.language if request.code is not None else "",
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            fingerprint=_fingerprint(request) if request.deterministic and request.workspace is None else "",
        )  # fmt: skip

    async def _served_again(self, found: RunRecord, record: RunRecord) -> Run:
        """The result of an identical deterministic run, and whose it was."""
        assert found.result is not None
        told = (*found.result.reasons, f"served from the store: {found.id} was the same run")
        run = Run(record, Live(record.id, self.store, self._publish, 1))
        await self.engine.record("served", run=record.id, message=f"from {found.id}")
        run.change(
            state="finished", started=record.created, ended=time.time(), backend=found.backend, fingerprint="",
            result=found.result.model_copy(update={"reasons": told, "container_id": found.id}),
        )  # fmt: skip
        await self.store.begin(run.record)
        run.done.set()
        return run

    async def _same_again(self, owner: str, same: bool) -> Run:
        """A request that was sent before under the same idempotency key gets the same run."""
        if not same:
            raise another_request()
        if owner in self.runs:
            return self.runs[owner]
        record = await self.store.run(owner)
        if record is None:  # claimed a moment ago by its twin
            raise errors.Busy("a request with this idempotency key is just being taken in", retry_after=1, status=503)
        if not record.final:
            raise errors.Busy("another server of this store is at it", retry_after=1, status=503)
        run = Run(record, Live(owner, self.store, self._publish, 1))
        if record.problem:
            run.error = errors.from_dict(record.problem)
        run.done.set()
        return run

    def _limits(self, request: RunRequest) -> tuple[float, int]:
        named = {**self.settings.defaults.model_dump(), **request.limits.named()}
        return float(named["cpus"]), int(named["memory"])


def _size(request: RunRequest) -> int:
    return len(request.code or "") + len(request.stdin) + sum(map(len, request.files.values()))


def sees(caller: Caller, owner: str) -> bool:
    return caller.name == owner or caller.may("admin")


def _fingerprint(request: RunRequest) -> str:
    return hashlib.sha256(request.model_dump_json().encode()).hexdigest()


_FIGURES: dict[Watched, Callable[[Service], float]] = {
    "running": lambda service: service.admission.running,
    "waiting": lambda service: service.admission.waiting,
    "store_up": lambda service: not service.store.status,
    "bus_up": lambda service: not (service.lines.status or service.events.status),
    "store_dropped": lambda service: service.store.dropped,
    "bus_dropped": lambda service: service.lines.dropped + service.events.dropped,
    "sinks_dropped": lambda service: sum(service.sinks.missed.values()),
    "sync_behind": lambda service: service.syncer.behind if service.syncer else 0,
}
