"""The single orchestrator: decide, choose, open, run, diagnose, tell. Every surface comes through here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from belljar.backends.base import Backend, Box, Finding, LastingBox, Preparable, Rememberable
from belljar.backends.outcome import WENT_ON
from belljar.control.callbacks import Listener, notify
from belljar.control.control import Control
from belljar.core import errors, policy, routing
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.languages import Languages
from belljar.core.net_entries import NAMED_SETS
from belljar.core.plan import Plan
from belljar.core.request import Egress, RunRequest
from belljar.core.result import Event, Result, Status
from belljar.core.routing import Choice
from belljar.core.settings import CONTAINER_ENGINES, Settings
from belljar.engine import audit, language_file
from belljar.engine.audit import Audit
from belljar.engine.backends import NAMES, Backends
from belljar.engine.capacity import Capacity
from belljar.engine.lease import Lease
from belljar.engine.libraries import LibrarySearch
from belljar.engine.probe_cache import ProbeCache
from belljar.engine.tracing import span
from belljar.settings import load as load_settings

if TYPE_CHECKING:
    from belljar.core.lasting import BoxMark, Lasting, Place

_KEEPERS = ("docker", "podman")  # the backends that can keep a container
_USUAL_LANGUAGE = "python"
_ALWAYS_AVAILABLE = ("python", "bash")
_SIGSYS = "ended by SIGSYS: of a seccomp profile that kills (ours answers with an error), or sent by the guest itself"
_LIMIT_NAMES = {  # what is told of output and processes is recorded while a run goes on
    Status.TIMEOUT: "timeout", Status.OOM_KILLED: "memory", Status.FUEL_EXHAUSTED: "fuel", Status.DISK_LIMIT: "disk",
}  # fmt: skip


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
        probes: ProbeCache | None = None,
    ) -> None:
        """Makes an engine; nothing is probed or started yet.

        Args:
            settings: those in force; without them, they are read from files and the environment.
            extra: backends of your own, preferred to the others.
            sinks: called with every event of every run.
            on_setup: called with each step of what a backend needs once, which may take minutes.
            on_box: called with a lease and True when its box is open, and with False when it is about to be closed.
            probes: what earlier processes proved. Short-lived processes go by it; without it, all is proved anew.
        """
        self.settings: Settings = settings or load_settings()
        self.languages: Languages = language_file.load(self.settings.language_file)
        self._extra = {backend.name: backend for backend in extra}
        own_native = None if "native" in self._extra else lambda: self.capabilities("native")
        self._backends = Backends(self.settings, self.languages, own_native, self._tell_step)
        self._capabilities: dict[str, Capabilities] = {}
        self._languages: dict[str, tuple[LanguageSupport, ...]] = {}
        self._sinks = tuple(sinks)
        self.on_setup = on_setup
        self._on_box = on_box
        self._probes = probes
        self._recalled: set[str] = set()  # the backends that this process did not probe itself
        self._libraries = LibrarySearch(self)
        self._capacity = Capacity(self.settings.max_containers)
        self._audit = Audit(self.settings.audit_log) if self.settings.audit_log else None

    # --- what there is ---

    def backend(self, name: str) -> Backend:
        return self._extra[name] if name in self._extra else self._backends[name]

    async def capabilities(self, name: str, *, again: bool = False) -> Capabilities:
        """Returns what a backend can do here; the first time, or `again`, it is probed.

        With a probe cache, the first time may be that of an earlier process; `again` never is.
        """
        if again or name not in self._capabilities:
            kept = None if again else self._recall(name)
            self._capabilities[name] = kept or await self._probe(name)
        return self._capabilities[name]

    def _recall(self, name: str) -> Capabilities | None:
        backend = self.backend(name)
        kept = self._probes.recall(backend) if self._probes and isinstance(backend, Rememberable) else None
        if kept:
            self._recalled.add(name)
        return kept

    async def _probe(self, name: str) -> Capabilities:
        backend = self.backend(name)
        found = await backend.probe()
        self._recalled.discard(name)
        if self._probes and isinstance(backend, Rememberable):
            self._probes.keep(backend, found)
        return found

    def _forget_recalled(self, error: errors.BelljarError) -> None:
        """After a start that failed: what earlier processes proved does not count any more."""
        names = ", ".join(sorted(self._recalled))
        logging.getLogger("belljar").warning("%s: %s; probing again, as the last probe was earlier", names, error)
        for name in self._recalled:
            backend = self.backend(name)
            if self._probes and isinstance(backend, Rememberable):
                self._probes.forget(backend)
            del self._capabilities[name]
        self._recalled.clear()

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all backends, in the order of preference."""
        names = (*self._extra, *(name for name in NAMES if name not in self._extra))
        return _in_order(names, self.settings.container.engine or _USUAL_ENGINES.get(sys.platform, ""))

    async def backends(self) -> tuple[Capabilities, ...]:
        """Probes every backend and returns their capabilities, in the order of preference."""
        return tuple([await self.capabilities(name) for name in self.known])

    async def languages_of(self, name: str) -> tuple[LanguageSupport, ...]:
        if name not in self._languages:
            self._languages[name] = await self.backend(name).languages()
        return self._languages[name]

    async def supported_languages(self) -> list[tuple[str, LanguageSupport]]:
        """What can be run here: the languages of each backend that is available, in the order of preference."""
        able = [backend.backend for backend in await self.backends() if backend.available]
        return [(name, row) for name in able for row in await self.languages_of(name)]

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

        A start that fails on a backend that only an earlier process probed is tried once more after a new probe.
        """
        if request.living is not None:
            raise errors.InvalidRequest(
                "living: is asked of a sandbox that stays open", fix="open one: Sandbox(living=True)"
            )
        try:
            return await self._run(request, listener, control, id)
        except errors.StartFailed as error:
            if not self._recalled:
                raise
            self._forget_recalled(error)
        return await self._run(request, listener, control, id)

    async def _run(self, request: RunRequest, listener: Listener | None, control: Control | None, id: str) -> Result:
        because = ""
        if request.require_libraries:
            request, because = await self._libraries.settle(request)
        plan, choice = await self._choose(request, id=id)
        if because:
            choice = Choice(choice.backend, (because, *choice.reasons[1:]))
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
                plan, choice = await self._choose(request, id=plan.id, after=lease.capabilities)
            except errors.BelljarError as error:
                told = (*first.reasons, f"not run again: {error.message}")
                first = first.model_copy(update={"reasons": told})
                held[-1] = held[-1].model_copy(update={"result": first})
            else:
                before = f"{first.backend} ran it first: {failure.message}"
                async with self._lease(plan, Choice(choice.backend, (before, *choice.reasons))) as lease:
                    return await lease.run(request, listener=listener, control=control)
        for event in held:
            await notify(listener, event)
        return first

    @asynccontextmanager
    async def open(
        self, request: RunRequest, *, keep_files: bool = False, session: bool = False, id: str = "",
        lasting: Lasting | None = None,
    ) -> AsyncIterator[Lease]:  # fmt: skip
        """A sandbox for several requests. It stays where it is: its files cannot be run again elsewhere.

        Args:
            request: what every run in it is asked for.
            keep_files: whether its files will be put or got.
            session: whether it is for one Python interpreter.
            id: its name; a new one unless given.
            lasting: it is to go on where this process ends, or was found and is taken over.

        Raises:
            SessionEnded: what was found is not there any more, or policy would not open it like that today.
        """
        if request.require_libraries:
            raise errors.InvalidRequest("require_libraries: is asked of one run", fix="use `run`, or name a backend")
        if request.retry != "never":
            raise errors.InvalidRequest("retry: an open sandbox stays where it is", fix="use `run`, or name a backend")
        plan, choice = await self._choose(request, id=id, keep_files=keep_files, session=session)
        found = lasting.found if lasting else None
        if lasting:
            plan = plan.model_copy(update={"absence": lasting.absence, "latest": lasting.latest})
        if found and found.walls != plan.walls:
            raise errors.SessionEnded("the settings give it other walls or limits today", fix="open a new one")
        async with self._lease(plan, choice, found) as lease:
            yield lease

    async def _choose(
        self, request: RunRequest, *, id: str, keep_files: bool = False, session: bool = False,
        after: Capabilities | None = None,
    ) -> tuple[Plan, Choice]:  # fmt: skip
        """What is allowed, and where; `after` a run on one backend, only on those next in line and no weaker."""
        try:
            with span("policy"):
                plan, choice = await self._weigh(request, keep_files=keep_files, session=session, after=after)
        except errors.BelljarError as error:
            kind = "refused" if isinstance(error, errors.PolicyDenied) else "failed"
            about = {"run": id} if id else {}
            await self.record(kind, **about, error=error.kind, message=error.message, **audit.asked(request))
            raise
        named = {"id": id} if id else {}
        return plan.model_copy(update={**named, "egress": await self.reachable(plan.egress)}), choice

    async def reachable(self, egress: Egress) -> Egress:
        """Returns the same with the hosts of named sets in the place of their names.

        Raises:
            InvalidRequest: nobody here knows the hosts of a set.
        """
        names = sorted(egress.hosts.intersection(NAMED_SETS))
        if not names:
            return egress
        from belljar.host.egress.named_sets import hosts_of

        known = [await anyio.to_thread.run_sync(hosts_of, name, self.settings) for name in names]
        return egress.model_copy(update={"hosts": egress.hosts.difference(names).union(*known)})

    async def suits(self, request: RunRequest) -> bool:
        """Tells whether the backend that a request names can take it, and has all that its code seems to need.

        Raises:
            BelljarError: it cannot take it.
        """
        plan, choice = await self._weigh(request, keep_files=False, session=False, after=None)
        return routing.suits(plan, await self.capabilities(choice.backend))

    async def _weigh(
        self, request: RunRequest, *, keep_files: bool, session: bool, after: Capabilities | None
    ) -> tuple[Plan, Choice]:
        language = None
        if request.code is not None or (session and self.languages.get(request.language).name != _USUAL_LANGUAGE):
            language = self.languages.get(request.language)  # by its own name: policy and routing know no aliases
            request = request.model_copy(update={"language": language.name})
        plan = policy.decide(
            _resolved(request), self.settings, keep_files=keep_files, session=session, language=language
        )
        if after is not None and after.guarantees is not None:
            strict = max(plan.isolation, after.guarantees.isolation, key=lambda isolation: isolation.rank)
            plan = plan.model_copy(update={"isolation": strict})
        choice = routing.choose(plan, await self._candidates(plan, after=after))
        if plan.packages and (await self.capabilities(choice.backend)).packages:
            policy.check_packages(plan, self.settings)
        notes = plan.notes
        if not plan.auto_remove and choice.backend not in _KEEPERS:
            notes = (*notes, f"auto_remove=False has no effect: {choice.backend} has no container to keep")
        return await self._with_figures(plan, choice.backend), choice._replace(reasons=(*choice.reasons, *notes))

    async def _with_figures(self, plan: Plan, backend: str) -> Plan:
        """What is drawn is brought back as files are, from a backend that can."""
        figures = plan.figures and (await self.capabilities(backend)).figures
        return plan.model_copy(update={"figures": figures, "keep_files": plan.keep_files or figures})

    async def discard(self, backend: str, id: str, place: Place) -> None:
        """Removes a living sandbox that an earlier process left on a backend, if it is there and still what it was."""
        found = self.backend(backend) if backend in self.known else None
        if isinstance(found, Finding):
            await found.discard(id, place)

    @asynccontextmanager
    async def _lease(self, plan: Plan, choice: Choice, found: BoxMark | None = None) -> AsyncIterator[Lease]:
        backend, capabilities = self.backend(choice.backend), await self.capabilities(choice.backend)
        async with AsyncExitStack() as stack:
            leaving = stack.enter_context(ExitStack())
            await stack.enter_async_context(self._capacity.place(living=plan.living))
            how = "found" if found else "created"
            await self.record(how, run=plan.id, backend=choice.backend, reasons=choice.reasons)
            stack.push_async_callback(self._record_end, plan.id, opened := list[Box]())
            async with self.recording_failure(run=plan.id):
                with span("start", run=plan.id, backend=choice.backend):
                    opening = backend.open(plan)
                    if found:
                        assert isinstance(backend, Finding)  # else there would be no mark of it
                        opening = backend.find(plan, found.place)
                    opened.append(box := await stack.enter_async_context(opening))
            lease = Lease(self, plan, box, capabilities, choice.reasons)
            self._on_box(lease, True)
            stack.callback(self._on_box, lease, False)
            stack.push_async_callback(lease.tidy_git)
            stack.callback(leaving.enter_context, span("cleanup", run=plan.id))  # ends when all of it is gone
            yield lease

    @property
    def full(self) -> bool:
        """There are as many sandboxes as there may be: another would wait."""
        return self._capacity.full

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
        """In the audit log: what struck, and how the run ended."""
        if result.error and result.error.context.get("signal") == "SIGSYS":
            await self._record_late("seccomp", **about, message=_SIGSYS)
        for message in _struck(result):
            await self._record_late("limit", **about, message=message)
        failure = result.error.error_type if result.error else None
        await self._record_late(
            "finished", **about, status=result.status, exit_code=result.exit_code, error=failure,
            duration_ms=result.duration_ms,
        )  # fmt: skip

    async def _record_end(self, run: str, opened: Sequence[Box]) -> None:
        left = any(isinstance(box, LastingBox) and box.left for box in opened)
        with anyio.CancelScope(shield=True):
            await self._record_late("left" if left else "destroyed", run=run)

    async def _record_late(self, kind: str, **facts: Any) -> None:
        """What has happened has happened: a record that cannot be made any more takes no result away."""
        try:
            await self.record(kind, **facts)
        except errors.BelljarError as error:
            logging.getLogger("belljar").error("%s of %s: %s", kind, facts["run"], error)

    async def _candidates(self, plan: Plan, after: Capabilities | None = None) -> tuple[Capabilities, ...]:
        """Probes the named backend, or for `auto` one after the other until one suits: nobody waits for the rest."""
        known = self.known
        if plan.backend in known:
            return (await self._named_capabilities(plan.backend, plan.image),)
        if plan.backend != "auto":
            return tuple(Capabilities(backend=name, available=False) for name in known)
        candidates: list[Capabilities] = []
        for name in known[known.index(after.backend) + 1 :] if after else known:
            asked_for = plan.image and name in CONTAINER_ENGINES  # no other backend has images
            found = await (self._with_image(name, plan.image) if asked_for else self.capabilities(name))
            candidates.append(await self._with_languages(found, plan.language))
            if routing.suits(plan, candidates[-1]):
                break
        return tuple(candidates)

    async def _with_languages(self, found: Capabilities, language: str | None) -> Capabilities:
        """The same, with whether the language is installed there: `auto` goes on to a backend that has it."""
        fixed = found.languages is not None or found.images or found.backend in self._extra
        if not found.available or fixed or language is None or language in _ALWAYS_AVAILABLE:
            return found
        rows = {row.name: row for row in await self.languages_of(found.backend)}
        if (row := rows.get(language)) is None or row.available:
            return found
        return found.model_copy(update={"not_installed": {language: row.fix}})

    async def _named_capabilities(self, name: str, image: str | None) -> Capabilities:
        """A backend that was asked for by name is made ready if that is all it needs; `auto` makes nobody wait."""
        capabilities = await self.capabilities(name)
        if not capabilities.available and capabilities.setup:
            await self.setup(name, image)
            capabilities = await self.capabilities(name)
        return capabilities

    async def _with_image(self, name: str, image: str | None) -> Capabilities:
        """What a container engine can do with the image that was named; one that cannot have it leaves the next."""
        try:
            return await self._named_capabilities(name, image)
        except errors.BelljarError as error:
            return Capabilities(backend=name, available=False, why_not=error.message, fix=error.fix)

    async def way_to_wasm(self, plan: Plan) -> tuple[str, frozenset[str]]:
        """Says how code that lacks a package gets to the wasm runtime, and which modules it would find there.

        Empty if there is no way: this installation has no such backend, or the plan asks for what it cannot do.
        """
        if "wasm" not in self.known or "wasm" in self._extra:
            return "", frozenset()
        from belljar.backends.wasm.modules import bundled

        found = await self.capabilities("wasm")
        if found.setup and not found.available:
            return "run `belljar setup wasm` once and ask for backend=wasm", bundled()
        able = plan.model_copy(update={"backend": "auto"})
        return ("ask for backend=wasm" if routing.able(able, found) else ""), found.modules or frozenset()

    def needs_setup(self, name: str) -> bool:
        """Whether there is something to be done once for this backend."""
        return name in self.known and isinstance(self.backend(name), Preparable)

    async def setup(self, name: str, image: str | None = None) -> None:
        """Does what a backend needs once, and asks it again what it can do; `image`: the one that is to be run."""
        backend = self.backend(name)
        if isinstance(backend, Preparable):
            await backend.setup(self._tell_step, image)
        await self.capabilities(name, again=True)

    def _tell_step(self, step: str) -> None:
        self.on_setup(step)  # which may have been changed since a backend was made

    async def publish(self, event: Event, listener: Listener | None) -> None:
        for one in (*self._sinks, listener):
            await notify(one, event)

    async def require_language(self, name: str, backend: str) -> None:
        if name in _ALWAYS_AVAILABLE or backend in self._extra:
            return
        for support in await self.languages_of(backend):
            if support.name == name and not support.available and not support.setup:
                raise errors.NotAvailable(f"{name} cannot be run by {backend} here", fix=support.fix)


_USUAL_ENGINES = {"darwin": "apple"}  # platform -> the container engine that is looked for first


def _in_order(names: Sequence[str], preferred: str) -> tuple[str, ...]:
    """The same names, the container engines among them with the preferred one first."""
    engines = [name for name in names if name in CONTAINER_ENGINES]
    order = iter(sorted(engines, key=lambda name: name != preferred))
    return tuple(next(order) if name in engines else name for name in names)


def _struck(result: Result) -> Iterator[str]:
    """The limits that ended a run, or a process of its own."""
    if name := _LIMIT_NAMES.get(result.status):
        yield f"{name}: {result.error.message if result.error else result.status}"
    if WENT_ON in result.warnings:
        yield f"memory: {WENT_ON}"


def _resolved(request: RunRequest) -> RunRequest:
    """A granted folder by its real name: policy judges names, and a link could be called anything."""
    if request.workspace is None:
        return request
    path = request.workspace.path
    if os.path.islink(path.rstrip("/")):
        raise errors.PolicyDenied(f"workspace.path: {path} is a link", fix="grant the folder it points to by its name")
    real = request.workspace.model_copy(update={"path": os.path.realpath(path)})
    return request.model_copy(update={"workspace": real})
