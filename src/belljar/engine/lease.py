"""An open box with the decisions that led to it: every run in it is announced, heard, diagnosed and recorded here."""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from belljar.backends.base import Box, Drawing, Emit, Imaged, Networked
from belljar.backends.guest_text import python_program, text
from belljar.backends.turn import AGENT_ENV, AGENT_FOLDER, MAX_RESULTS_BYTES
from belljar.control.callbacks import Listener
from belljar.control.control import Control
from belljar.core import errors, policy, routing
from belljar.core.capabilities import Capabilities, Guarantees
from belljar.core.display import is_image, neutralise
from belljar.core.model import ours
from belljar.core.net_change import NetworkChange, NetworkRecord
from belljar.core.plan import FIGURES, OFFLINE_ENV, Command, Plan
from belljar.core.request import Egress, Limits, RunRequest
from belljar.core.result import Event, EventKind, Failure, MimeBundle, Result, Status
from belljar.core.values import WORKSPACE, few
from belljar.engine import audit
from belljar.engine.tracing import span
from belljar.host import git_settings

if TYPE_CHECKING:
    from belljar.engine.engine import Engine

_log = logging.getLogger("belljar.runs")
_log.addHandler(logging.NullHandler())  # whoever logs nothing has the result, and needs no line on stderr

IN_MEMORY = "tmpfs size"  # how a backend says that a guest's files are kept in memory
_ANY_PUBLIC = "open: any public host, through a filtering proxy"
_ENGINES_OWN = "open: whatever the network that was set up for it reaches"
ON_DISK = "size of its file system"
NO_MODULE = "ModuleNotFoundError"


class Lease:
    """An open box with the decisions that led to it."""

    def __init__(
        self, engine: Engine, plan: Plan, box: Box, capabilities: Capabilities, reasons: tuple[str, ...]
    ) -> None:
        self.engine = engine
        self.plan: Plan = plan
        self.box = box
        self.capabilities = capabilities
        self.reasons = reasons
        self._git_at_first: Mapping[str, git_settings.Stamp] = {}

    async def run(
        self, request: RunRequest, *, listener: Listener | None = None, control: Control | None = None, id: str = ""
    ) -> Result:
        async def work(emit: Emit) -> Result:
            return await self.box.run(await self.command(request), emit, control or Control())

        return await self.conduct(request, work, listener=listener, id=id)

    async def conduct(
        self, request: RunRequest, work: Callable[[Emit], Awaitable[Result]], *, listener: Listener | None, id: str,
        again: bool = False,
    ) -> Result:  # fmt: skip
        """What `work` comes to, with all that is to be told of it before, meanwhile and after. `id`: its own name,
        where the box has another because it is a session's; `again`: it was announced by an earlier server."""
        run = id or self.box.id
        async with self.engine.recording_failure(**self._about(run)):
            if not again:
                await self._announce(request, run)
            emit = self.emitter(listener, run)
            with span("run", run=run, backend=self.capabilities.backend, language=self._language(request)) as seen:
                result = await self._watching_git(work, emit)
                seen.set(status=result.status)
            result = await self._finish(request, await self._with_figures(result, emit))
            await emit("finished", "", result=result)
        if result.status is Status.TIMEOUT:
            spent = result.duration_ms / 1000
            facts = {"run": run, "status": "timeout", "caller": audit.caller.get("")}
            facts["language"] = self._language(request)
            told = "run %s on %s was ended by its timeout, after %.1f s"
            _log.warning(told, run, result.backend, spent, extra={"facts": facts})
        return result

    async def _with_figures(self, result: Result, emit: Emit) -> Result:
        """The same, with what the code drew among its `results`."""
        if not self.plan.figures or not isinstance(self.box, Drawing):
            return result
        found = await self.box.figures(MAX_RESULTS_BYTES)
        pictures = [(file.path, base64.b64encode(file.content).decode()) for file in found.files]
        drawn: list[MimeBundle] = [
            {"image/png": picture, "text/plain": f"<figure {path.removesuffix('.png').lstrip('0')}>"}
            for path, picture in sorted(pictures)
            if is_image("image/png", picture, MAX_RESULTS_BYTES)
        ]
        for bundle in drawn:
            await emit("display", bundle["text/plain"])
        left_out = (*result.left_out, *found.left_out)
        return result.model_copy(update={"results": (*result.results, *drawn), "left_out": left_out})

    async def _watching_git(self, work: Callable[[Emit], Awaitable[Result]], emit: Emit) -> Result:
        """What `work` comes to, with warnings of what became of git's settings in a folder that it may write to."""
        folder = self.plan.workspace
        if folder is None or not folder.write or folder.write_git:
            return await work(emit)
        before = await anyio.to_thread.run_sync(git_settings.look, folder.path)
        self._git_at_first = self._git_at_first or before
        try:
            result = await work(emit)
        except BaseException:
            await self.tidy_git()
            raise
        warnings = [_aside_warning(names)] if (names := await self.tidy_git()) else []
        after = await anyio.to_thread.run_sync(git_settings.look, folder.path)
        if changed := git_settings.changed(before, after):
            warnings.append(_git_warning(changed))
        return result.model_copy(update={"warnings": (*result.warnings, *warnings)}) if warnings else result

    async def tidy_git(self) -> list[str]:
        """Renames what a guest made that git would go by, since the first run; returns the new names."""
        folder, before = self.plan.workspace, self._git_at_first
        if folder is None or not before:
            return []
        renamed: list[str] = []
        with anyio.CancelScope(shield=True):
            renamed += await anyio.to_thread.run_sync(git_settings.set_aside, folder.path, before)
        return renamed

    async def change_network(self, change: NetworkChange | None) -> NetworkRecord:
        """Changes what may be reached from the box, at once; without a change, it tells what is in force.

        Raises:
            PolicyDenied: the administrator does not allow that.
            NotAvailable: this box has no way out that could be opened now.
        """
        if change is None:
            return NetworkRecord.of(self.plan.egress)
        policy.check_reach(change.asked, self.engine.settings)
        wanted = change.applied(self.plan.egress) if not change.named_sets else await self._with_sets(change)
        if wanted.mode not in self.capabilities.egress or not isinstance(self.box, Networked):
            raise errors.NotAvailable(
                f"network: {self.capabilities.backend} cannot change it in an open sandbox",
                fix="ask for backend=native, or for docker or podman on this machine",
            )
        await self.engine.record(
            "network", **self._about(self.box.id), network=wanted.entries, denied=sorted(wanted.denied)
        )
        await self.box.change_network(wanted)
        self.plan = self.plan.model_copy(update={"egress": wanted})
        return NetworkRecord.of(wanted)

    async def _with_sets(self, change: NetworkChange) -> Egress:
        """What is in force after a change that names sets, with their hosts in their place."""
        hosts = {name: await self.engine.reachable(Egress.of([name])) for name in change.named_sets}

        def plain(entries: Sequence[str]) -> tuple[str, ...]:
            return tuple(host for one in entries for host in (hosts[one].entries if one in hosts else (one,)))

        net = None if change.net is None else plain(change.net)
        return NetworkChange(net=net, allow=plain(change.allow), deny=plain(change.deny)).applied(self.plan.egress)

    def _about(self, run: str) -> dict[str, str]:
        """Who looks for a run finds its session, and the other way round."""
        return {"run": run} if run == self.box.id else {"run": run, "session": self.box.id}

    async def command(self, request: RunRequest) -> Command:
        """The request as one program with its files: a snippet becomes its language's main file."""
        limits = self.limits(request)
        own_files = {name: data for name, data in request.files.items() if name not in self.plan.files}
        if request.command is not None and not self.capabilities.commands:
            raise errors.PolicyDenied(
                f"{self.capabilities.backend} runs code, not commands", fix="ask for backend=native"
            )
        if request.command is not None:
            own_files, env = self._finding_proxy(own_files, {**self.usual_env, **request.env})
            return ours(Command)(
                argv=request.command, env=env, stdin=request.stdin, cwd=request.workdir, limits=limits,
                files=own_files, type=request.type,
            )  # fmt: skip
        if request.code is None:
            raise errors.InvalidRequest("code: give `code` or `command`")
        language = self.engine.languages.get(request.language)
        if self.capabilities.languages is not None and language.name not in self.capabilities.languages:
            raise errors.NotAvailable(
                f"{self.capabilities.backend} does not speak {language.name}", fix="ask for backend=native"
            )
        policy.check_language(language, self.plan.egress, self.capabilities)
        if not self.plan.image:  # else what the named image has is its own affair
            await self.engine.require_language(language.name, self.capabilities.backend)
        main, env, argv = language.filename, {**self.usual_env, **language.env}, language.argv
        if main in request.files:
            raise errors.InvalidRequest(f"files: {main!r} is where the code goes", fix="rename the file")
        argv = tuple(f"{self.plan.inputs}/{main}" if word == main else word for word in argv)
        if self.plan.workspace or self.plan.living:  # the code lies among the inputs, its modules here
            env.setdefault("PYTHONPATH", WORKSPACE)
        env |= dict(request.env)
        if self.plan.figures:
            own_files[f"{AGENT_FOLDER}/sitecustomize.py"] = python_program("figures").encode()
            env = _drawing(env, f"{self.plan.inputs}/{AGENT_FOLDER}")
        own_files, env = self._finding_proxy(own_files, env)
        return ours(Command)(
            argv=(*argv, *request.args), args=request.args, env=env, stdin=request.stdin,
            cwd=request.workdir, limits=limits, language=language.name, type=request.type,
            files={main: request.code.encode(), **own_files}, deterministic=request.deterministic,
        )  # fmt: skip

    def _finding_proxy(
        self, files: dict[str, bytes], env: Mapping[str, str]
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        """Adds what lets clients find the proxy that do not look for it by themselves: Node.js before 24.5, aiohttp."""
        found = dict(env)
        if self.plan.egress.mode == "none" or not self.capabilities.processes:
            return files, found
        folder, customize = f"{self.plan.inputs}/{AGENT_FOLDER}", f"{AGENT_FOLDER}/sitecustomize.py"
        ours = python_program("find_proxy").encode()
        more = {f"{AGENT_FOLDER}/proxy.cjs": text("javascript/proxy.cjs").encode()}
        more[customize] = files[customize] + b"\n\n" + ours if customize in files else ours
        found.setdefault("NODE_OPTIONS", f"--require={folder}/proxy.cjs")
        if "PYTHONPATH" in found or not (self.plan.living and self.plan.packages):  # which has a path of its own
            paths = [path for path in found.get("PYTHONPATH", "").split(":") if path and path != folder]
            found["PYTHONPATH"] = ":".join((folder, *paths))
        return {**files, **more}, found

    @property
    def usual_env(self) -> Mapping[str, str]:
        """What every program finds in its environment, unless the request says otherwise."""
        return OFFLINE_ENV if self.plan.egress.mode == "none" and self.capabilities.processes else {}

    async def _announce(self, request: RunRequest, run: str) -> None:
        """To the audit log, before anything is run."""
        if not self.engine.audited:
            return
        facts = audit.asked(request) | {"limits": self.limits(request).model_dump(exclude_none=True)}
        facts |= {"backend": self.capabilities.backend} | await self._image(request)
        await self.engine.record("requested", **self._about(run), **facts)

    async def _image(self, request: RunRequest) -> dict[str, str]:
        """The image that the request runs in, where there is one; a run that cannot have one says so itself."""
        if isinstance(self.box, Imaged):
            with suppress(errors.BelljarError):
                name, id = await self.box.image(self._language(request) or None, request.type)
                return {"image": name, "image_id": id} if id else {"image": name}
        return {}

    def limits(self, request: RunRequest) -> Limits:
        language = None if request.code is None else self.engine.languages.get(request.language)
        return policy.command_limits(request, self.plan, self.engine.settings, language)

    async def _finish(self, request: RunRequest, result: Result) -> Result:
        """The backend's raw result with its files, its diagnosis, and where and why it ran."""
        changes: dict[str, Any] = {"reasons": self.reasons + result.reasons}
        if request.collect:
            collected = await self.box.get(request.collect)
            changes |= {"files": collected.files, "left_out": result.left_out + collected.left_out}
        failure = await self._diagnose(request, result)
        changes |= {"error": failure, "backend": self.capabilities.backend}
        return result.model_copy(update=changes | {"guarantees": self._guarantees()})

    def _guarantees(self) -> Guarantees | None:
        promise, hosts = routing.promise(self.plan, self.capabilities), sorted(self.plan.egress.hosts)
        if promise and getattr(self.box, "on_disk", False):
            promise = promise.model_copy(update={"limits": {**promise.limits, "disk": ON_DISK}})
        if promise and self.plan.egress.mode == "open":
            by_proxy = getattr(self.box, "proxied", isinstance(self.box, Networked))
            return promise.model_copy(update={"network": _ANY_PUBLIC if by_proxy else _ENGINES_OWN})
        if promise is None or not hosts:
            return promise
        return promise.model_copy(update={"network": f"only {', '.join(hosts)}, through a filtering proxy"})

    async def _diagnose(self, request: RunRequest, result: Result) -> Failure | None:
        if result.status is Status.SUCCESS:
            return None
        from belljar.core import diagnose  # its tables cost 20 ms, and most runs succeed

        capabilities, promise = self.capabilities, self._guarantees()
        in_memory = promise is not None and promise.limits.get("disk") == IN_MEMORY
        around = diagnose.Around(
            egress=self.plan.egress, read_only=bool(self.plan.workspace and not self.plan.workspace.write),
            counts_fuel=capabilities.fuel, disk_in_memory=in_memory and capabilities.processes,
            installs=capabilities.packages, packages=self.engine.settings.packages.names,
        )  # fmt: skip
        if capabilities.processes and NO_MODULE in result.stderr:
            way, modules = await self.engine.way_to_wasm(self.plan)
            around = around._replace(wasm=way, wasm_modules=modules)
        if around.disk_in_memory and (files := await self._held()):
            around = around._replace(files=files, memory=self.plan.limits.memory)
        language, limits = self._language(request), self.limits(request)
        failure = diagnose.diagnose(
            result, language=language, limits=limits, processes=capabilities.processes, around=around
        )
        told = result.error.exception if result.error else None
        return failure.model_copy(update={"exception": told}) if told else failure

    async def _held(self) -> int | None:
        """Bytes that the files of a living sandbox hold, where that can be looked up; None for any other."""
        if not self.plan.living:
            return None
        from belljar.host.box_tree import HostTree

        tree = getattr(self.box, "tree", None)
        return await tree.held() if isinstance(tree, HostTree) else None

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
            event = ours(Event)(run=run, seq=sequence, kind=kind, text=text, result=result)
            await self._record(event)
            await self.engine.publish(event, listener)

        return emit


def _drawing(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """The variables by which matplotlib draws without a window, and its figures are kept."""
    paths = filter(None, (folder, env.get("PYTHONPATH")))
    return {**AGENT_ENV, **env, "PYTHONPATH": ":".join(paths), "BELLJAR_FIGURES": f"/tmp/{FIGURES}"}


def _aside_warning(names: Sequence[str]) -> str:
    return f"it made what git would go by in the granted folder, and that was renamed: {neutralise(few(names))}"


def _git_warning(names: Sequence[str]) -> str:
    return (
        f"while it ran, {neutralise(few(names))} changed in the granted folder: look before you use git there, "
        "which runs what these say"
    )
