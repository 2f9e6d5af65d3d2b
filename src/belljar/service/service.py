"""The service: admits, records, queues and runs requests of others. Surfaces (HTTP, MCP) ask it, and nothing below.

Its parts each have a file: `run_lifecycle` takes a run to its end, `queries` answers about runs, `repeats` finds runs
that need not be run again, `drain` is how it leaves, `recovery` settles what a killed server left.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from belljar.control.callbacks import Listener
from belljar.control.control import Control
from belljar.core import errors, policy
from belljar.core.package_names import both
from belljar.core.request import RunRequest
from belljar.core.result import LIFE_KINDS, Event, EventKind, Result
from belljar.core.settings import Settings
from belljar.engine import audit
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease
from belljar.host.source import read_files
from belljar.protocol.records import Alert, Caller, RunRecord, Sample, new_id, now
from belljar.protocol.requests import Execute
from belljar.service import projects, recovery
from belljar.service.admission.queue import Admission
from belljar.service.auth.access import Access
from belljar.service.auth.first_key import add_first_key
from belljar.service.auth.hosts import check_hosts
from belljar.service.drain import ENDING_SECONDS, Drain
from belljar.service.instances import ServerInstance
from belljar.service.publisher import Publisher
from belljar.service.queries import RunQueries
from belljar.service.refusals import Refusals
from belljar.service.repeats import Repeats
from belljar.service.run_lifecycle import Demand, Run, RunLifecycle
from belljar.service.sandboxes.ended import EndedSandboxes
from belljar.service.sinks import Sink, Sinks
from belljar.service.store import retention
from belljar.service.store.store import Store, store_url
from belljar.service.store.sync import Syncer
from belljar.service.telemetry.metrics import Metrics, Watched
from belljar.service.telemetry.sampler import Sampler
from belljar.service.telemetry.server_log import facts

_log = logging.getLogger("belljar")
_DENIALS_KNOWN = 1000  # that are told as alerts once, and not again


class Service:
    """`async with Service(settings) as service`: everything that a server needs, and nothing that listens."""

    _tasks: TaskGroup

    def __init__(self, settings: Settings) -> None:
        settings = _with_service_caps(settings)
        self.settings: Settings = settings
        self.publisher: Publisher = Publisher(settings)
        told: tuple[EventKind, ...] = ("started", "limit", "denied", "finding", *LIFE_KINDS)
        self.sinks: Sinks = Sinks(
            [
                Sink("events", self.publisher.event, kinds=told, wanted=self.publisher.hears_events),
                Sink("alerts", self._on_denied, kinds=("denied",)),
            ]
        )
        self._denied: deque[tuple[str, str]] = deque(maxlen=_DENIALS_KNOWN)
        self.engine: Engine = Engine(settings, sinks=[self.sinks.hear], on_box=self._on_box)
        self.store: Store = Store(store_url(settings), outbox=bool(settings.service.shared_store))
        self.access: Access = Access(settings, self.store)
        self.admission: Admission = Admission(settings)
        self.metrics: Metrics = Metrics(self.engine.languages, self.engine.known)
        self.refusals: Refusals = Refusals(self.engine, self.metrics)
        self.sampler: Sampler = Sampler(self._on_sample)
        shared = settings.service.shared_store
        self.syncer: Syncer | None = Syncer(self.store, shared) if shared else None
        self.instance: ServerInstance = ServerInstance(Path(settings.data_dir))
        self.ended: EndedSandboxes = EndedSandboxes(Path(settings.data_dir), self.instance)
        self.grants: projects.Grants = projects.Grants(settings.service.projects)
        self.lifecycle: RunLifecycle = RunLifecycle(
            self.store, self.admission, self.metrics, self.refusals, self.publisher, self.instance,
            spawn=self.start_soon, folder=settings.data_dir, settings=settings.service,
        )  # fmt: skip
        self.drain: Drain = Drain(self.lifecycle, self.admission, settings.service.drain)
        self.queries: RunQueries = RunQueries(self.store, self.lifecycle, self.publisher, self.drain)
        self.repeats: Repeats = Repeats(self.store, self.engine, self.lifecycle)
        self._stack = AsyncExitStack()

    # --- opening and closing

    async def __aenter__(self) -> Self:
        settings = self.settings.service
        async with AsyncExitStack() as stack:
            stack.enter_context(self.instance)
            for part in (self.store, self.sampler, self.publisher, self.sinks):
                await stack.enter_async_context(part)
            if settings.first_key_file:
                await add_first_key(settings.first_key_file, self.store)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.push_async_callback(self._finish)
            self._tasks.start_soon(self.drain.run)
            if self.syncer:
                self._tasks.start_soon(self.syncer.run)
            if settings.prune_every:
                self._tasks.start_soon(retention.prune_regularly, self.store, settings.prune_every, settings.keep)
            await anyio.to_thread.run_sync(self.ended.settle)  # before the dead servers are forgotten
            if await recovery.settle_lost_runs(self.store, self.engine, self.instance):
                self._tasks.start_soon(recovery.reap, self.engine)
            self._stack = stack.pop_all()
        for name, read in _FIGURES.items():
            self.metrics.show(name, partial(read, self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # somebody is in a hurry: nobody would wait for runs to end by themselves
            self.drain.stop_all()
        await self._stack.__aexit__(kind, error, trace)

    async def _finish(self) -> None:
        await self.drain.finish()
        self.lifecycle.hurry(ENDING_SECONDS)
        self._tasks.cancel_scope.cancel()

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Starts a task beside everything else, which lives no longer than the service."""
        self._tasks.start_soon(work, *arguments)

    # --- runs

    async def submit(self, request: RunRequest, caller: Caller, *, key: str = "", cached: bool = False) -> Run:
        """Takes a request in: returns when it is recorded and runs or waits.

        Args:
            request: What is to be run.
            caller: Who asks.
            key: An idempotency key: the same request with the same key is run once.
            cached: The kept result of the same deterministic run will do, if there was one.

        Raises:
            PolicyDenied: It was turned away; Busy says for how long.
            NotAvailable: It could not be recorded.
        """
        request = await self.check(request, caller)
        record = self.new_record(request, caller)
        if cached and (found := await self.repeats.kept(record)):
            await self.admission.count(caller)
            return await self.repeats.serve(found, record)
        demand = self.demand(request)
        work = partial(self._run_request, request, record.id)
        start = partial(self.lifecycle.start, record, caller, work, demand)  # and the claim of its key
        return await self.repeats.once(caller, key, _fingerprint(request) if key else "", record.id, start)

    async def _run_request(self, request: RunRequest, id: str, listener: Listener, control: Control) -> Result:
        folder = request.workspace
        environment = request.packages if isinstance(request.packages, str) else None
        with self.grants.given((environment, False), (folder.path, folder.write) if folder else (None, False)):
            return await self.engine.run(request, listener=listener, control=control, id=id)

    async def check(self, request: RunRequest, caller: Caller) -> RunRequest:
        """Returns the request with the real names of the folders it asks for.

        Raises:
            PolicyDenied: The caller may not have one of its folders or hosts.
        """
        try:
            check_hosts(request.egress, caller, self.settings.service.egress)
            return projects.check(request, self.settings.service.projects)
        except errors.PolicyDenied as refusal:
            await self.refusals.record(refusal, **audit.asked(request))
            raise

    async def asked(self, body: Execute, caller: Caller) -> RunRequest:
        """Returns the run that a body asks for, with the code of the file that its `path` names.

        Raises:
            InvalidRequest: it makes no sense, or the file cannot be read.
            PolicyDenied: the folder is not below a root of service.projects.
        """
        request = body.request()
        if body.path is None and not body.named_files:
            return request
        granted = (await self.check(request, caller)).workspace
        assert granted is not None  # else the body would have been refused
        if body.named_files:
            room = self.settings.service.request_size
            found = await anyio.to_thread.run_sync(read_files, granted.path, body.named_files, "context_files", room)
            request = request.model_copy(update={"files": {**request.files, **found}})
        if body.path is None:
            return request
        code = await anyio.to_thread.run_sync(projects.read_code, granted.path, body.path)
        named = body.language if "language" in body.model_fields_set else self.engine.languages.of_file(body.path).name
        return request.model_copy(update={"code": code, "language": named})

    async def cancel(self, id: str, caller: Caller) -> RunRecord:
        """Ends a run, and returns its record as it is then.

        Raises:
            NotFound: This caller has no such run.
            Elsewhere: It is under way on another server.
        """
        record = await self.queries.record(id, caller)
        run = self.lifecycle.runs.get(id)
        if run is None:
            if not record.final and record.instance != self.instance.name:
                raise errors.Elsewhere(
                    f"{id} is under way on another server", fix=f"cancel it there: {record.instance}",
                    context={"instance": record.instance},
                )  # fmt: skip
            return record
        run.stop()
        with anyio.move_on_after(ENDING_SECONDS):
            await run.done.wait()
        return run.record

    def new_record(self, request: RunRequest, caller: Caller) -> RunRecord:
        """Returns the record of a run that a caller asks for."""
        text = request.code if request.code is not None else "\0".join(request.command or ())
        return RunRecord(
            id=new_id(), caller=caller.name, instance=self.instance.name, created=now(),
            language=request.language if request.code is not None else "",
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            fingerprint=_fingerprint(request) if request.deterministic and request.workspace is None else "",
        )  # fmt: skip

    def demand(self, request: RunRequest, *, kept: bool = False) -> Demand:
        """What a request will be granted. One that policy will refuse gets nothing, and waits for nothing.

        Args:
            request: what is asked for.
            kept: whether its sandbox is kept for more than this request.
        """
        size = len(request.code or "") + len(request.stdin) + sum(map(len, request.files.values()))
        try:
            language = self.engine.languages.get(request.language) if request.code is not None else None
            limits = policy.run_limits(request, self.settings, language)
        except errors.BelljarError:  # the engine says so, and records it, when it is the run's turn
            return Demand(request_bytes=size)
        memory = limits.kept_box_bytes if kept or request.collect else limits.memory
        return Demand(limits.cpus, memory, size)

    # --- what the engine and the sampler report

    def _on_box(self, lease: Lease, opened: bool) -> None:
        if opened:
            if run := self.lifecycle.runs.get(lease.plan.id):
                run.opened = True
                run.change(backend=lease.capabilities.backend)
            self.sampler.watch(lease.plan.id, lease.box, lease.plan.limits, lease.plan.egress.mode != "none")
        else:
            self.sampler.forget(lease.plan.id)
            self.metrics.guests.closed(lease.plan.id)

    def _on_denied(self, event: Event) -> None:
        """Makes an alert of a refused connection, the first time that a sandbox is refused it."""
        run = self.lifecycle.runs.get(event.run)
        box = (run.record.box if run else "") or event.run
        if (box, event.text) not in self._denied:
            self._denied.append((box, event.text))
            self._on_sample(Alert(container_id=box, timestamp=now(), kind="network", message=event.text))

    def _on_sample(self, measured: Sample | Alert) -> None:
        self.store.add(measured)
        if isinstance(measured, Alert):
            if not measured.over:
                self.metrics.alerted(measured.kind)
                _log.warning("an alert: %s", measured.message, extra=facts(run=measured.container_id))
            self.publisher.alert(measured)
            self.lifecycle.alert(measured)
        else:
            self.metrics.guests.sampled(measured)


def _with_service_caps(settings: Settings) -> Settings:
    """Returns the settings as they hold for whoever asks the service: outputs are in its memory, and packages that are
    installed for a caller are in everybody's cache."""
    output = min(settings.caps.output, settings.service.output)
    packages = both(settings.packages.names, settings.service.packages)
    return settings.model_copy(
        update={
            "caps": settings.caps.model_copy(update={"output": output}),
            "packages": settings.packages.model_copy(update={"names": packages}),
        }
    )


def _fingerprint(request: RunRequest) -> str:
    return hashlib.sha256(request.model_dump_json().encode()).hexdigest()


_FIGURES: dict[Watched, Callable[[Service], float]] = {  # read when somebody asks for metrics
    "running": lambda service: service.admission.running,
    "waiting": lambda service: service.admission.waiting,
    "store_up": lambda service: not service.store.status,
    "bus_up": lambda service: not service.publisher.status,
    "store_dropped": lambda service: service.store.dropped,
    "bus_dropped": lambda service: service.publisher.dropped,
    "sinks_dropped": lambda service: sum(service.sinks.missed.values()),
    "sync_behind": lambda service: service.syncer.behind if service.syncer else 0,
}
