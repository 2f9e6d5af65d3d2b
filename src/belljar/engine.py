"""The single orchestrator: decide, choose, open, run, diagnose, tell. Every surface comes through here."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any

import anyio

from belljar import audit, backends, errors, languages, policy, routing
from belljar.audit import Audit
from belljar.backends.base import Backend, Box, Control, Emit, Preparable, in_this_loop
from belljar.models import (
    Capabilities,
    Command,
    Event,
    EventKind,
    Failure,
    Guarantees,
    LanguageSupport,
    Limits,
    Plan,
    Result,
    RunRequest,
    Status,
)
from belljar.routing import Choice
from belljar.settings import CONTAINER_ENGINES, Settings
from belljar.settings import load as load_settings
from belljar.tracing import span
from belljar.values import WORKSPACE

Listener = Callable[[Event], Awaitable[None] | None]
_ALWAYS_SPOKEN = ("python", "bash")


def _log_setup(step: str) -> None:
    logging.getLogger("belljar").warning("setting up, once: %s", step)


class Engine:
    """Holds the settings, the backends and the listeners. No state of the process: make as many as you like."""

    def __init__(
        self,
        settings: Settings | None = None,
        extra: Sequence[Backend] = (),
        sinks: Sequence[Listener] = (),
        on_setup: Callable[[str], object] = _log_setup,
        on_box: Callable[[Lease, bool], object] = lambda lease, opened: None,
    ) -> None:
        self.settings = settings or load_settings()
        self.languages = languages.load(self.settings.language_file)
        self._extra = {backend.name: backend for backend in extra}
        self._backends: dict[str, Backend] = {}
        self._offers: dict[str, Capabilities] = {}
        self._spoken: dict[str, tuple[LanguageSupport, ...]] = {}
        self._sinks = tuple(sinks)
        self.on_setup = on_setup  # told each step of what a backend needs once, which may take minutes
        self._on_box = on_box  # told when a box is open, and when it is about to be closed
        self._places = Places(self.settings.max_containers)
        self._audit = Audit(self.settings.audit_log) if self.settings.audit_log else None

    # --- what there is ---

    def backend(self, name: str) -> Backend:
        if name in self._extra:
            return self._extra[name]
        if name not in self._backends:
            self._backends[name] = backends.load(name, self.settings)
        return self._backends[name]

    async def offer(self, name: str, *, again: bool = False) -> Capabilities:
        if again or name not in self._offers:
            self._offers[name] = await self.backend(name).probe()
        return self._offers[name]

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all backends, in the order of preference."""
        names = (*self._extra, *(name for name in backends.NAMES if name not in self._extra))
        return _in_order(names, self.settings.container.engine)

    async def offers(self) -> tuple[Capabilities, ...]:
        """Every backend's word on itself, in the order of preference."""
        return tuple([await self.offer(name) for name in self.known])

    async def spoken(self, name: str) -> tuple[LanguageSupport, ...]:
        if name not in self._spoken:
            self._spoken[name] = await self.backend(name).languages()
        return self._spoken[name]

    async def all_spoken(self) -> list[tuple[str, LanguageSupport]]:
        """What can be run here: the languages of each backend that is available, in the order of preference."""
        able = [offer.backend for offer in await self.offers() if offer.available]
        return [(name, row) for name in able for row in await self.spoken(name)]

    # --- running ---

    async def run(
        self, request: RunRequest, *, listener: Listener | None = None, control: Control | None = None, id: str = ""
    ) -> Result:
        """One request in a sandbox of its own, which has the `id` that is given, or a new one.

        With `retry="stronger"`, code that failed for want of something that its backend lacks (a package, a process,
        a thread, a socket) runs once more on the next backend that can take it: by the same policy, with isolation no
        weaker, and only where `auto` chose, because a backend asked for by name is never changed. The result is that
        of the last run alone, and `reasons` tells of the first. The listener hears the first run only when it has
        ended and stands; the engine's sinks hear both as they go.
        """
        plan, choice = await self._choose(request, id=id)
        if request.retry == "stronger" and plan.backend == "auto":
            return await self._run_or_retry(request, plan, choice, listener, control)
        async with self._lease(plan, choice) as lease:
            return await lease.run(request, listener=listener, control=control)

    async def _run_or_retry(
        self, request: RunRequest, plan: Plan, choice: Choice, listener: Listener | None, control: Control | None
    ) -> Result:
        held: list[Event] = []
        async with self._lease(plan, choice) as lease:
            first = await lease.run(request, listener=held.append, control=control)
        failure = first.error
        if failure and failure.context.get("stronger"):
            try:
                plan, choice = await self._choose(request, id=plan.id, after=lease.offer)
            except errors.BelljarError as error:
                told = (*first.reasons, f"not run again: {error.message}")
                first = first.model_copy(update={"reasons": told})
                held[-1] = held[-1].model_copy(update={"result": first})
            else:
                before = f"{first.backend} ran it first: {failure.message}"
                async with self._lease(plan, Choice(choice.backend, (before, *choice.reasons))) as lease:
                    return await lease.run(request, listener=listener, control=control)
        for event in held:
            await _hear(listener, event)
        return first

    @asynccontextmanager
    async def open(self, request: RunRequest, *, keep_files: bool = False, id: str = "") -> AsyncIterator[Lease]:
        """A sandbox for several requests. It stays where it is: its files cannot be run again elsewhere."""
        if request.retry != "never":
            raise errors.InvalidRequest("retry: an open sandbox stays where it is", fix="use `run`, or name a backend")
        plan, choice = await self._choose(request, id=id, keep_files=keep_files)
        async with self._lease(plan, choice) as lease:
            yield lease

    async def _choose(
        self, request: RunRequest, *, id: str, keep_files: bool = False, after: Capabilities | None = None
    ) -> tuple[Plan, Choice]:
        """What is allowed, and where; `after` a run on one backend, only on those next in line and no weaker."""
        try:
            with span("policy"):
                plan, choice = await self._weigh(request, keep_files=keep_files, after=after)
        except errors.BelljarError as error:
            kind = "refused" if isinstance(error, errors.PolicyDenied) else "failed"
            about = {"run": id} if id else {}
            await self.record(kind, **about, error=error.kind, message=error.message, **audit.asked(request))
            raise
        return plan.model_copy(update={"id": id}) if id else plan, choice

    async def _weigh(self, request: RunRequest, *, keep_files: bool, after: Capabilities | None) -> tuple[Plan, Choice]:
        language = None
        if request.code is not None:  # by its own name: policy and routing know no aliases
            language = self.languages.get(request.language)
            request = request.model_copy(update={"language": language.name})
        plan = policy.decide(_resolved(request), self.settings, keep_files=keep_files, language=language)
        if after is not None and after.guarantees is not None:
            strict = max(plan.isolation, after.guarantees.isolation, key=lambda isolation: isolation.rank)
            plan = plan.model_copy(update={"isolation": strict})
        return plan, routing.choose(plan, await self._candidates(plan, after=after))

    @asynccontextmanager
    async def _lease(self, plan: Plan, choice: Choice) -> AsyncIterator[Lease]:
        backend, offer = self.backend(choice.backend), await self.offer(choice.backend)
        async with AsyncExitStack() as stack:
            leaving = stack.enter_context(ExitStack())
            await stack.enter_async_context(self._places)
            await self.record("created", run=plan.id, backend=choice.backend, reasons=choice.reasons)
            stack.push_async_callback(self._record_end, plan.id)
            async with self.recording_failure(run=plan.id):
                with span("start", run=plan.id, backend=choice.backend):
                    box = await stack.enter_async_context(backend.open(plan))
            lease = Lease(self, plan, box, offer, choice.reasons)
            self._on_box(lease, True)
            stack.callback(self._on_box, lease, False)
            stack.callback(leaving.enter_context, span("cleanup", run=plan.id))  # ends when all of it is gone
            yield lease

    @property
    def full(self) -> bool:
        """There are as many sandboxes as there may be: another would wait."""
        return self._places.full

    @property
    def audited(self) -> bool:
        return self._audit is not None

    async def record(self, kind: str, **facts: Any) -> None:
        """In the audit log, if there is one. It is there when this returns; if it cannot be, nothing goes on."""
        if self._audit:
            await self._audit.record(kind, **facts)

    @asynccontextmanager
    async def recording_failure(self, **about: str) -> AsyncIterator[None]:
        try:
            yield
        except errors.BelljarError as error:
            await self._record_late("failed", **about, error=error.kind, message=error.message)
            raise

    async def record_result(self, result: Result, **about: str) -> None:
        if result.error and result.error.context.get("signal") == "SIGSYS":
            await self._record_late("seccomp", **about, message="ended by the kernel for a system call that is closed")
        failure = result.error.error_type if result.error else None
        await self._record_late(
            "finished", **about, status=result.status, exit_code=result.exit_code, error=failure,
            duration_ms=result.duration_ms,
        )  # fmt: skip

    async def _record_end(self, run: str) -> None:
        with anyio.CancelScope(shield=True):
            await self._record_late("destroyed", run=run)

    async def _record_late(self, kind: str, **facts: Any) -> None:
        """What has happened has happened: a record that cannot be made any more takes no result away."""
        try:
            await self.record(kind, **facts)
        except errors.BelljarError as error:
            logging.getLogger("belljar").error("%s of %s: %s", kind, facts["run"], error)

    async def _candidates(self, plan: Plan, after: Capabilities | None = None) -> tuple[Capabilities, ...]:
        """For `auto` the offers up to the first that suits, for a named backend its own: nobody waits for the rest."""
        known = self.known
        if plan.backend in (*known, *backends.NEVER_CHOSEN):
            return (await self._named_offer(plan.backend),)
        if plan.backend != "auto":
            return tuple(Capabilities(backend=name, available=False) for name in known)
        offers: list[Capabilities] = []
        for name in known[known.index(after.backend) + 1 :] if after else known:
            offers.append(await self.offer(name))
            if routing.suits(plan, offers[-1]):
                break
        return tuple(offers)

    async def _named_offer(self, name: str) -> Capabilities:
        """A backend that was asked for by name is made ready if that is all it needs; `auto` makes nobody wait."""
        offer = await self.offer(name)
        if not offer.available and offer.setup:
            await self.setup(name)
            offer = await self.offer(name)
        return offer

    async def setup(self, name: str) -> None:
        """Does what a backend needs once, and asks it again what it can do."""
        backend = self.backend(name)
        if isinstance(backend, Preparable):
            await backend.setup(self.on_setup)
        await self.offer(name, again=True)

    async def tell(self, event: Event, listener: Listener | None) -> None:
        for hear in (*self._sinks, listener):
            await _hear(hear, event)

    async def require_language(self, name: str, backend: str) -> None:
        if name in _ALWAYS_SPOKEN or backend in self._extra:
            return
        for support in await self.spoken(backend):
            if support.name == name and not support.available:
                raise errors.NotAvailable(f"{name} cannot be run by {backend} here", fix=support.fix)


def _in_order(names: Sequence[str], preferred: str) -> tuple[str, ...]:
    """The same names, the container engines among them with the preferred one first."""
    engines = [name for name in names if name in CONTAINER_ENGINES]
    order = iter(sorted(engines, key=lambda name: name != preferred))
    return tuple(next(order) if name in engines else name for name in names)


class Places:
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


async def _hear(listener: Listener | None, event: Event) -> None:
    if listener is not None and inspect.isawaitable(answer := listener(event)):
        await answer


def _resolved(request: RunRequest) -> RunRequest:
    """A granted folder by its real name: policy judges names, and a link could be called anything."""
    if request.workspace is None:
        return request
    path = request.workspace.path
    if os.path.islink(path.rstrip("/")):
        raise errors.PolicyDenied(f"workspace.path: {path} is a link", fix="grant the folder it points to by its name")
    real = request.workspace.model_copy(update={"path": os.path.realpath(path)})
    return request.model_copy(update={"workspace": real})


class Lease:
    """An open box with the decisions that led to it."""

    def __init__(self, engine: Engine, plan: Plan, box: Box, offer: Capabilities, reasons: tuple[str, ...]) -> None:
        self.engine = engine
        self.plan = plan
        self.box = box
        self.offer = offer
        self.reasons = reasons

    async def run(
        self, request: RunRequest, *, listener: Listener | None = None, control: Control | None = None, id: str = ""
    ) -> Result:
        async def work(emit: Emit) -> Result:
            return await self.box.run(await self.command(request), emit, control or Control())

        return await self.conduct(request, work, listener=listener, id=id)

    async def conduct(
        self, request: RunRequest, work: Callable[[Emit], Awaitable[Result]], *, listener: Listener | None, id: str
    ) -> Result:
        """What `work` comes to, with all that is to be told of it before, meanwhile and after. `id`: its own name,
        where the box has another because it is a session's."""
        run = id or self.box.id
        async with self.engine.recording_failure(**self._about(run)):
            await self._announce(request, run)
            emit = self.emitter(listener, run)
            with span("run", run=run, backend=self.offer.backend, language=self._language(request)) as seen:
                result = await work(emit)
                seen.set(status=result.status)
            result = await self._finish(request, result)
            await emit("finished", "", result=result)
        return result

    def _about(self, run: str) -> dict[str, str]:
        """Who looks for a run finds its session, and the other way round."""
        return {"run": run} if run == self.box.id else {"run": run, "session": self.box.id}

    async def command(self, request: RunRequest) -> Command:
        """The request as one program with its files: a snippet becomes its language's main file."""
        limits = self.limits(request)
        own_files = {name: data for name, data in request.files.items() if name not in self.plan.files}
        if request.command is not None and not self.offer.commands:
            raise errors.PolicyDenied(f"{self.offer.backend} runs code, not commands", fix="ask for backend=native")
        if request.command is not None:
            return Command(
                argv=request.command, env=request.env, stdin=request.stdin, cwd=request.workdir, limits=limits,
                files=own_files, type=request.type,
            )  # fmt: skip
        if request.code is None:
            raise errors.InvalidRequest("code: give `code` or `command`")
        language = self.engine.languages.get(request.language)
        if self.offer.languages is not None and language.name not in self.offer.languages:
            raise errors.NotAvailable(
                f"{self.offer.backend} does not speak {language.name}", fix="ask for backend=native"
            )
        policy.check_language(language, self.plan.egress, self.offer)
        await self.engine.require_language(language.name, self.offer.backend)
        main, env, argv = language.filename, dict(language.env), language.argv
        if main in request.files:
            raise errors.InvalidRequest(f"files: {main!r} is where the code goes", fix="rename the file")
        argv = tuple(f"{self.plan.inputs}/{main}" if word == main else word for word in argv)
        if self.plan.workspace:
            env.setdefault("PYTHONPATH", WORKSPACE)
        return Command(
            argv=argv, env=env | dict(request.env), stdin=request.stdin, cwd=request.workdir, limits=limits,
            language=language.name, files={main: request.code.encode(), **own_files}, fixed=request.deterministic,
            type=request.type,
        )  # fmt: skip

    async def _announce(self, request: RunRequest, run: str) -> None:
        """To the audit log, before anything is run."""
        if not self.engine.audited:
            return
        facts = audit.asked(request) | {"limits": self.limits(request).model_dump(exclude_none=True)}
        await self.engine.record("requested", **self._about(run), backend=self.offer.backend, **facts)

    def limits(self, request: RunRequest) -> Limits:
        language = None if request.code is None else self.engine.languages.get(request.language)
        return policy.command_limits(request, self.plan, self.engine.settings, language)

    async def _finish(self, request: RunRequest, result: Result) -> Result:
        """The backend's raw result with its files, its diagnosis, and where and why it ran."""
        reasons = self.reasons + result.reasons
        changes: dict[str, Any] = {}
        if request.collect:
            collected = await self.box.get(request.collect)
            changes["files"] = collected.files
            reasons += tuple(f"not collected: {left_out}" for left_out in collected.left_out)
        failure = self.diagnose(request, result)
        changes |= {"error": failure, "backend": self.offer.backend, "reasons": reasons}
        return result.model_copy(update=changes | {"guarantees": self._guarantees()})

    def _guarantees(self) -> Guarantees | None:
        promise, hosts = routing.promise(self.plan, self.offer), sorted(self.plan.egress.hosts)
        if promise and self.plan.egress.mode == "open":
            return promise.model_copy(update={"network": "open: whatever the network that was set up for it reaches"})
        if promise is None or not hosts:
            return promise
        return promise.model_copy(update={"network": f"only {', '.join(hosts)}, through a filtering proxy"})

    def diagnose(self, request: RunRequest, result: Result) -> Failure | None:
        if result.status is Status.SUCCESS:
            return None
        from belljar import diagnose  # its tables cost 20 ms, and most runs succeed

        language, limits = self._language(request), self.limits(request)
        return diagnose.diagnose(result, language=language, limits=limits, backend=self.offer.backend)

    def _language(self, request: RunRequest) -> str:
        return "" if request.command else self.engine.languages.get(request.language).name

    async def _record(self, event: Event) -> None:
        if event.kind in ("limit", "denied"):
            await self.engine.record(event.kind, **self._about(event.run), message=event.text)
        elif event.result is not None:
            await self.engine.record_result(event.result, **self._about(event.run))

    def emitter(self, listener: Listener | None, run: str) -> Any:
        sequence = 0

        async def emit(kind: EventKind, text: str, result: Result | None = None) -> None:
            nonlocal sequence
            sequence += 1
            event = Event(run=run, seq=sequence, kind=kind, text=text, result=result)
            await self._record(event)
            await self.engine.tell(event, listener)

        return emit
