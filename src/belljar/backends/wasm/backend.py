"""CPython and QuickJS as WebAssembly: a fresh interpreter in milliseconds, behind two walls.

The guest is a wasm instance that can only call WASI; the worker that holds it runs in the native jail (where there is
none, it is a plain process, and `guarantees` says so). A worker is a process that serves many guests, one after the
other; an instance serves one and is thrown away.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from belljar.backends.native.backend import Native, stamp
from belljar.backends.wasm import bytecode
from belljar.backends.wasm import profiles as wasm_profiles
from belljar.backends.wasm.box import WasmBox
from belljar.backends.wasm.modules import bundled, distributions
from belljar.backends.wasm.snapshots import take_after_imports
from belljar.backends.wasm.store import FRESH, CompiledStore, check_versions, sources, wasmtime_folder
from belljar.backends.wasm.worker_process import WorkerKind, WorkerProcess
from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.model import ours
from belljar.core.plan import Plan
from belljar.core.values import GIB, MIB

_MAX_IDLE = 8  # workers kept for the next runs
_QUICKJS = "QuickJS, with a part of Node's modules"
_SCRIPTS = ("javascript", "typescript")
_OUTDATED = "its profiles are of another version, so it starts more slowly: `belljar setup wasm` makes them anew"
_WALLS = ("webassembly memory", "no system calls, WASI only")


class Wasm:
    """The backend `wasm`."""

    name = "wasm"

    def __init__(
        self,
        native: Native,
        store: CompiledStore,
        probe_native: Callable[[], Awaitable[Capabilities]] | None = None,
    ) -> None:
        """Remembers what it is made of; nothing is started yet.

        Args:
            native: the jail that its workers run in, where that works.
            store: the compiled interpreters.
            probe_native: tells what is known of `native`; without it, `native` is probed.
        """
        self._native = native
        self._probe_native = probe_native or native.probe
        self._store = store
        self._jailed: bool | None = None  # once probed
        self._facts: dict[str, dict[str, Any]] = {}
        self._profiles: dict[str, wasm_profiles.Profile] = {}
        self._idle: dict[WorkerKind, list[WorkerProcess]] = {}
        self._pid = os.getpid()
        atexit.register(self.close)

    # --- what it can do here ---

    async def probe(self) -> Capabilities:
        setup = ""
        try:
            version = check_versions()
            setup = "its interpreters must be compiled, which takes about two minutes"
            self._store.check()
            return await self._probe(version)
        except errors.BelljarError as error:
            return Capabilities(
                backend=self.name, available=False, why_not=error.message, fix=error.fix, setup=setup, commands=False,
                languages=frozenset({"python", *_SCRIPTS}), sessions=frozenset({"python"}), workspace=True,
            )  # fmt: skip
        except (OSError, TimeoutError) as error:
            return Capabilities(backend=self.name, available=False, why_not=str(error), fix="run `belljar doctor`")

    async def _probe(self, version: str) -> Capabilities:
        outer = await self._probe_native()
        self._jailed = outer.available and outer.guarantees is not None
        return Capabilities(
            backend=self.name, available=True, version=version, commands=False, processes=False,
            languages=frozenset({"python", *_SCRIPTS}), partly=dict.fromkeys(_SCRIPTS, _QUICKJS), modules=bundled(),
            distributions=distributions(),
            workspace=True, fuel=True, figures=True, grace=False,
            sessions=frozenset({"python"}), checkpoints=True, least_memory=48 * MIB, memory=4 * GIB,
            profiles=frozenset(wasm_profiles.PROFILES).intersection(self._store.profiles()),
            guarantees=_in_jail(outer.guarantees) if outer.guarantees else _alone(outer.why_not),
            notes=() if FRESH in self._store.profiles() else (_OUTDATED,),
        )  # fmt: skip

    def depends_on(self) -> Mapping[str, Any]:
        start = Path(__file__).parent / "worker" / "python.py"
        parts: list[str | Path] = [__file__, start, *sources().values(), wasmtime_folder()]
        parts += [self._store.folder / "parts.json"]
        return {"parts": [stamp(path) for path in parts], "jail": self._native.depends_on()}

    def found(self) -> Mapping[str, str]:
        return self._native.found() if self._jailed else {}

    def recall(self, found: Mapping[str, str]) -> None:
        self._store.check()
        if found:
            self._native.recall(found)
        self._jailed = bool(found)

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return (
            LanguageSupport(name="python", available=True, version="3.15", program="python.wasm"),
            LanguageSupport(name="javascript", available=True, version="ES2023", program="quickjs.wasm"),
            LanguageSupport(name="typescript", available=True, version="types stripped", program="quickjs.wasm"),
        )

    async def reap(self) -> int:
        return await self._native.reap()

    async def setup(self, told: Callable[[str], object], image: str | None = None) -> None:
        """Builds what is missing: the compiled interpreters, the worker's own bytecode, the profiles."""
        check_versions()
        await anyio.to_thread.run_sync(self._store.build, told, abandon_on_cancel=True)
        lock = await anyio.to_thread.run_sync(self._store.locked)
        with lock:
            if await self._in_jail() and (python := self._native.toolchains.find("python3")):
                await bytecode.build(self._store.bytecode, python.path)
            await self._build_missing_profiles(told)

    async def _build_missing_profiles(self, told: Callable[[str], object]) -> None:
        built, self._facts = self._store.profiles(), {}
        for name, modules in {FRESH: (), **wasm_profiles.PROFILES}.items():
            if name not in built:
                told(f"the profile {name}")
                async with self.open(Plan(keep_files=True)) as box:
                    copy = await take_after_imports(box, modules)
                built[name] = wasm_profiles.keep(self._store.folder / f"{name}.pages", copy)
        self._store.record(self._store.folder, built)

    # --- sandboxes ---

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[WasmBox]:
        if plan.workspace and not os.path.isdir(plan.workspace.path):
            raise errors.InvalidRequest(f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path")
        box = WasmBox(await self._worker(plan), plan, self._worker, self._profile(plan))
        try:
            if plan.keep_files:
                await box.make_folder()
            yield box
        finally:
            with anyio.CancelScope(shield=True):
                if box.worker.alive and await box.dispose() and not plan.workspace:
                    self._put_back(box.worker)
                else:
                    await box.worker.end()

    def _profile(self, plan: Plan) -> wasm_profiles.Profile | None:
        unknown = plan.language is None  # a session or a sandbox, whose code is still to come
        built = self._built() if plan.profile or unknown or plan.needs.modules & _PROFILED else {}
        name = plan.profile or wasm_profiles.covering(plan.needs.modules, built) or ("standard" if unknown else None)
        if not name or name not in built or built[name]["size"] > plan.limits.memory:
            return None
        if name not in self._profiles:
            path = self._store.folder / f"{name}.pages"
            self._profiles[name] = wasm_profiles.opened(str(path), name, built[name])
        return self._profiles[name]

    def _built(self) -> dict[str, dict[str, Any]]:
        """What the store has, read once: it is built before we are asked."""
        if not self._facts:
            self._facts = self._store.profiles()
        return self._facts

    async def _in_jail(self) -> bool:
        if self._jailed is None:
            outer = await self._probe_native()
            self._jailed = outer.available and outer.guarantees is not None
        return self._jailed

    async def _worker(self, plan: Plan) -> WorkerProcess:
        """Returns an idle worker of the right kind, or a new one."""
        if self._pid != os.getpid():  # after a fork the idle ones are our parent's: two would talk to one
            self._idle, self._pid = {}, os.getpid()
        kind = WorkerKind.of(plan)
        idle = self._idle.setdefault(kind, [])
        while idle:
            worker = idle.pop()
            if worker.alive:
                return worker
            await worker.end()
        worker = WorkerProcess(kind, self._store, self._native if await self._in_jail() else None)
        try:
            await worker.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await worker.end()
            raise
        return worker

    def close(self) -> None:
        """At the end of the process: its workers die with it in any case, their control groups must be removed."""
        if self._pid != os.getpid():  # a forked child: they are its parent's
            return
        for worker in [worker for idle in self._idle.values() for worker in idle]:
            worker.abandon()
        self._idle.clear()
        for profile in self._profiles.values():
            os.close(profile.file)
        self._profiles.clear()

    def _put_back(self, worker: WorkerProcess) -> None:
        self._idle.setdefault(worker.kind, []).append(worker)
        kept = [(kind, idle) for kind, idle in self._idle.items() if idle]
        if sum(len(idle) for _, idle in kept) > _MAX_IDLE:
            kind, oldest = kept[0]
            oldest.pop(0).abandon()
            if not oldest:
                del self._idle[kind]


_PROFILED = frozenset(module.split(".")[0] for modules in wasm_profiles.PROFILES.values() for module in modules)


def _in_jail(outer: Guarantees) -> Guarantees:
    walls = (*_WALLS, *(f"worker: {wall}" for wall in outer.walls))
    limits = _LIMITS | {"disk": "tmpfs size", "cpus": outer.limits["cpus"], "io": outer.limits["io"]}
    return ours(Guarantees)(isolation=Isolation.NAMESPACE, walls=walls, limits=limits, network="none")


def _alone(why: str) -> Guarantees:
    limits = _LIMITS | {"disk": "not limited", "cpus": "not limited", "io": "not limited"}
    weaker = (f"its worker is a plain process, for want of the native jail ({why})", "disk and cpus are not limited")
    return Guarantees(isolation=Isolation.WASM, walls=_WALLS, limits=limits, network="none", weaker=weaker)


_LIMITS = {
    "memory": "wasm", "pids": "no processes", "timeout": "epoch and watchdog", "output": "watchdog", "fuel": "wasm",
}  # fmt: skip
