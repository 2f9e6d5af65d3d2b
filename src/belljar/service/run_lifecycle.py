"""The life of a run: it is queued, runs, and ends as finished, failed or refused.

No record, no run: a run is in the store before it starts, and one that cannot be recorded is refused.

    start ── Run.wait_in_queue ── Run.begin ──┬── Run.finish
      │  (only if there is no place)          └── Run.fail (also from the queue)
      └── Busy (no place, and no room in the queue: it was never a run)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel

from belljar.control.callbacks import Listener
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.result import STREAMS, Event, Result, Status
from belljar.core.settings import ServiceSettings
from belljar.core.spelling import respelled, told
from belljar.engine import audit
from belljar.engine.tracing import span
from belljar.protocol.records import Alert, Caller, RunRecord, now
from belljar.service.admission.queue import Admission, Ticket
from belljar.service.budget import ByteBudget, Share
from belljar.service.instances import ServerInstance
from belljar.service.pace import OutputPace
from belljar.service.publisher import Publisher
from belljar.service.refusals import Refusals
from belljar.service.store.result_text import LargeText, ResultText, parse, result_text
from belljar.service.store.statements import Claim, KeyOwner
from belljar.service.store.store import Store
from belljar.service.store.tables import as_json
from belljar.service.telemetry.log_lines import Live
from belljar.service.telemetry.metrics import Metrics
from belljar.service.telemetry.server_log import facts

Work = Callable[[Listener, Control], Awaitable[Result]]
Spawn = Callable[..., None]  # starts a task beside everything else: a function, and its arguments
_WIDE = 3  # bytes of memory for a character of a text that is not ASCII, about
_ANSWER_FIRST_SECONDS = 0.01  # between an answer and its record
_LIMITS = frozenset((Status.OOM_KILLED, Status.FUEL_EXHAUSTED, Status.OUTPUT_LIMIT, Status.DISK_LIMIT))
_log = logging.getLogger("belljar")


class Demand(NamedTuple):
    """What a run takes from the service. No CPUs: it runs in a box that has its place already."""

    cpus: float = 0.0
    memory: int = 0
    request_bytes: int = 0


class KeyTaken(Exception):
    """The idempotency key that a run came with belongs to another one, which came just before."""

    def __init__(self, owner: KeyOwner) -> None:
        super().__init__(owner.id)
        self.owner: KeyOwner = owner


class Run:
    """One run, as the process that carries it out knows it."""

    def __init__(self, record: RunRecord, live: Live, request: Share, output: Share, pace: OutputPace) -> None:
        self.record: RunRecord = record
        self.live = live
        self.request = request  # what it holds of memory to be run
        self.output = output  # and by what it printed, until that is in a file or was small
        self._pace = pace
        self._printed = 0
        self.warnings: tuple[str, ...] = ()  # of ours, for its result
        self.control: Control = Control()
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.opened: bool = bool(record.session)  # there is a box, which `control` can stop
        self.done: anyio.Event = anyio.Event()
        self.error: errors.BelljarError | None = None  # what `record.problem` was made of
        self.text: ResultText | None = None  # the result, serialised once for the answer and for the store
        self.stored: LargeText | None = None  # a large result of a run that ended before

    @property
    def id(self) -> str:
        return self.record.id

    def change(self, **fields: Any) -> None:
        """Replaces fields of the record; the store hears of it elsewhere."""
        self.record = self.record.model_copy(update=fields)

    # --- from one state to the next

    def wait_in_queue(self, position: int) -> None:
        """It has no place yet. Called whenever its position changes."""
        self.change(state="queued", position=position)

    def begin(self) -> None:
        """It has a place."""
        self.change(state="running", started=now(), position=None)

    def finish(self, text: ResultText) -> None:
        """It ran, and this is what happened."""
        self.text = text
        self.change(state="finished", result=text.brief, backend=text.brief.backend, ended=now())

    def fail(self, error: errors.BelljarError) -> None:
        """It has no result, but an error."""
        self.error = error
        state = "refused" if isinstance(error, errors.PolicyDenied) else "failed"
        self.change(state=state, problem=told(error, "http"), position=None, ended=now())

    def stop(self, reason: Status = Status.ABORTED) -> None:
        """Ends the guest if it runs; a run that waits or is being started is given up."""
        self.control.stop(reason)
        if not self.opened:  # it waits, for a place here or in the engine, or for its box
            self.scope.cancel()

    async def hear(self, event: Event) -> None:
        """Takes what the guest wrote. One whose caller has too much of it in our memory is ended."""
        try:
            if event.kind in STREAMS:
                self.output.add(len(event.text) * (1 if event.text.isascii() else _WIDE))
        except errors.Busy as refusal:
            if not self.control.stopping:
                self.warnings = (f"it was ended: {refusal.message}",)
                self.control.stop(Status.OUTPUT_LIMIT)
            return
        await self.live.hear(event)
        if event.kind in STREAMS:
            self._printed += len(event.text)
            await self._pace.passed(len(event.text), self._printed)

    # --- how it ended

    async def brief_result(self) -> Result:
        """Waits for the end, and returns the result or raises the error that came instead.

        Of a large result this is the head: `large` has all of it.
        """
        await self.done.wait()
        if self.record.result is None:
            raise self.error or errors.ExecutionFailed(f"{self.id} ended without a result")
        return self.record.result

    async def result(self) -> Result:
        """Returns the same with all of its output."""
        brief = await self.brief_result()
        return await parse(self.large) if self.large else brief

    @property
    def large(self) -> LargeText | None:
        """The result as JSON, if it is a large one; its outputs are not in the record then."""
        return self.text if self.text and self.text.is_large else self.stored

    @property
    def result_json(self) -> str:
        """The result of a run that has one, and not a large one, as JSON."""
        assert self.record.result is not None, "it has no result"
        return self.text.json if self.text else as_json(self.record.result)


class RunLifecycle:
    """The runs that are under way in this process, and what takes each of them to its end."""

    def __init__(
        self, store: Store, admission: Admission, metrics: Metrics, refusals: Refusals, publisher: Publisher,
        instance: ServerInstance, *, spawn: Spawn, folder: str, settings: ServiceSettings,
    ) -> None:  # fmt: skip
        self.runs: dict[str, Run] = {}
        self._store = store
        self._admission = admission
        self._metrics = metrics
        self._refusals = refusals
        self._publisher = publisher
        self._instance = instance
        self._spawn = spawn
        self._folder = folder
        self._log_memory = settings.log_memory
        self._ends: set[anyio.CancelScope] = set()  # of runs whose end is being recorded
        self._ends_until = math.inf
        self._pace = OutputPace()
        self._requests = ByteBudget("requests that run or wait", 2 * settings.request_size, 3 * settings.request_size)
        self._outputs = ByteBudget("outputs of runs", settings.output_memory, 4 * settings.output_memory)

    def new_run(self, record: RunRecord, log_memory: int | None = None) -> Run:
        """Returns a run for a record, which is not started yet."""
        room = self._log_memory if log_memory is None else log_memory
        live = Live(record.id, self._store, self._publisher.line, room)
        return Run(record, live, self._requests.share(record.caller), self._outputs.share(record.caller), self._pace)

    def alert(self, alert: Alert) -> None:
        """Tells an alert among the lines of the run that its sandbox works on."""
        for run in self.runs.values():
            if run.record.box == alert.container_id and not run.done.is_set():
                run.live.alert(alert)

    async def start(
        self, record: RunRecord, caller: Caller, work: Work, demand: Demand, claim: Claim | None = None
    ) -> Run:
        """Starts a run; returns when it is recorded, and runs or waits.

        Args:
            record: Names the run, and is written to the store.
            caller: Whose quotas count.
            work: Carries it out, and returns its result.
            demand: What it takes.
            claim: The idempotency key that it came with.

        Raises:
            Busy: It was turned away.
            KeyTaken: Its key is another run's.
            NotAvailable: It could not be recorded.
        """
        run = self.new_run(record)
        try:
            run.request.add(demand.request_bytes)
            ticket = self._admission.ask(
                caller, cpus=demand.cpus, memory=demand.memory, on_position=run.wait_in_queue
            )  # fmt: skip
        except errors.Busy as refusal:
            run.request.close()
            await self._refusals.record(refusal, run=run.id)
            raise
        self.runs[run.id] = run
        try:
            await self._write_begin(run, ticket, claim)
        except BaseException:
            self._admission.leave(ticket)
            run.request.close()
            self.runs.pop(run.id, None)
            run.done.set()
            raise
        self._spawn(self._carry_out, run, ticket, work)
        return run

    async def _write_begin(self, run: Run, ticket: Ticket, claim: Claim | None) -> None:
        if ticket.has_place:
            run.begin()
        owner = await self._store.begin(run.record, claim)
        if owner.id != run.id:
            raise KeyTaken(owner)

    async def _carry_out(self, run: Run, ticket: Ticket, work: Work) -> None:
        audit.caller.set(ticket.caller.name)
        try:
            with run.scope, span("request", run=run.id, caller=ticket.caller.name):
                with span("queue"):
                    await self._admission.wait(ticket)
                self._metrics.waited(ticket.waited)
                await self._run(run, work)
            if run.scope.cancelled_caught and not run.record.final:
                run.fail(errors.Aborted("it was cancelled before it ran", fix="send it again"))
        except errors.Busy as refusal:
            run.fail(refusal)
        except Exception as error:
            run.fail(_our_bug(run, error))
        finally:
            self._admission.leave(ticket)
            run.request.close()
            run.output.close()
            with anyio.CancelScope(shield=True):
                await self._end(run)

    async def _run(self, run: Run, work: Work) -> None:
        try:
            if run.record.state != "running":  # it waited
                run.begin()
                await self._store.change(run.id, state="running", started=run.record.started)
            self._publisher.run("running", run.record)
            result = await work(run.hear, run.control)
            if run.warnings:
                result = result.model_copy(update={"warnings": result.warnings + run.warnings})
            run.finish(await result_text(respelled(result, "http"), self._folder))
        except errors.BelljarError as error:
            run.fail(error)
        except Exception as error:
            run.fail(_our_bug(run, error))

    async def _end(self, run: Run) -> None:
        """Whatever happened: nobody is left waiting, and the record says how it ended.

        The answer does not wait for the record: until it is written the run is among ours, and is known from there.
        """
        if not run.record.final:
            run.fail(errors.Aborted("the service ended while it was under way"))
        run.live.close(run.record.ended or 0.0)
        if not run.record.fingerprint:  # else the next may be answered from the record of this one
            run.done.set()
            await anyio.lowlevel.checkpoint()  # the answer goes out
        self._metrics.hear(run.record)
        _log_limit(run.record)
        if not run.record.fingerprint:
            await anyio.sleep(_ANSWER_FIRST_SECONDS)  # more ends go into one commit
        self._publisher.run("ended", run.record)
        await self._record_end(run)
        self.runs.pop(run.id, None)
        run.done.set()

    async def _record_end(self, run: Run) -> None:
        """Tries until the end is written: a run that is over must not be `running` in the records for ever."""
        record = run.record
        with anyio.CancelScope(deadline=self._ends_until) as scope:
            self._ends.add(scope)
            try:
                await self._store.change(
                    record.id, state=record.state, started=record.started, ended=record.ended, backend=record.backend,
                    result=record.result, problem=record.problem, text=run.text, patience=math.inf,
                )  # fmt: skip
                return
            except errors.BelljarError as error:  # it cannot be written, and never will be
                _log.error("the end of %s could not be recorded: %s", record.id, error)
                await self._record_loss(record, error)
                return
            finally:
                self._ends.discard(scope)
        _log.error("the end of %s could not be recorded before the service ended", record.id)
        self._instance.owes = True  # the next start says that it is `lost`

    async def _record_loss(self, record: RunRecord, error: errors.BelljarError) -> None:
        """Records that there was an end, where how it was cannot be told."""
        with suppress(errors.NotFound):
            await self._store.change(
                record.id, state="failed", started=record.started, ended=record.ended, problem=told(error, "http"),
                patience=math.inf,
            )  # fmt: skip

    def hurry(self, seconds: float) -> None:
        """Gives ends that could not be recorded yet so much time: the service is about to end."""
        self._ends_until = anyio.current_time() + seconds
        for scope in self._ends:
            scope.deadline = self._ends_until


def _log_limit(record: RunRecord) -> None:
    """Warns of a run that a limit has ended, as the engine does of a timeout: whoever looks after this should know."""
    result = record.result if record.state == "finished" else None
    if result is None or result.status not in _LIMITS:
        return
    named = facts(
        run=record.id, status=str(result.status), caller=record.caller, language=record.language or "command",
        backend=record.backend, seconds=round(result.duration_ms / 1000, 3),
    )  # fmt: skip
    _log.warning("a limit has ended a run", extra=named)


def _our_bug(run: Run, error: Exception) -> errors.BelljarError:
    """A bug of ours ends one run, and not the service."""
    _log.exception("run %s", run.id, exc_info=error)
    return errors.ExecutionFailed(f"{type(error).__name__}: {error}", fix="please report this")
