"""CPython as WebAssembly: a fresh interpreter in milliseconds, behind two walls.

The guest is a wasm instance that can only call WASI; the worker that holds it runs in the native jail. A worker
is a process that serves many guests, one after the other; an instance serves one and is thrown away.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from belljar import errors, files, process
from belljar.backends import jail, wasm_cache
from belljar.backends.base import STREAMS, Control, Emit, Stream, hear, lone_errors
from belljar.backends.native import Native
from belljar.backends.native import create as create_native
from belljar.models import (
    MIB,
    WORKSPACE,
    Capabilities,
    Collected,
    Command,
    Entry,
    File,
    Guarantees,
    Isolation,
    LanguageSupport,
    Limits,
    Plan,
    Result,
    Status,
)
from belljar.output import Capture
from belljar.settings import Settings

_LIBRARY = "/belljar/lib"
_MODULE = "/belljar/python.cwasm"
_WORKER = "/belljar/worker.py"
_OVERHEAD = 64 * MIB  # what wasmtime, the worker and the compiled module may take beside the guest
_START_SECONDS = 30.0
_GRACE = 0.5  # seconds between the guest's own deadline and the end of its worker
_FRAME = 1 << 22
_ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONTZPATH": ""}
_IDLE = 4  # workers kept for the next runs


def create(settings: Settings) -> Wasm:
    return Wasm(create_native(settings), wasm_cache.folder(settings))


class Wasm:
    """The backend `wasm`."""

    name = "wasm"

    def __init__(self, native: Native, cache: Path) -> None:
        self._native = native
        self._cache = cache
        self._idle: dict[tuple[float, ...], list[Worker]] = {}
        self._pid = os.getpid()
        atexit.register(self.close)

    async def probe(self) -> Capabilities:
        try:
            return await self._probe()
        except errors.BelljarError as error:
            return Capabilities(backend=self.name, available=False, why_not=error.message, fix=error.fix)
        except (OSError, TimeoutError) as error:
            return Capabilities(backend=self.name, available=False, why_not=str(error), fix="run `belljar doctor`")

    async def _probe(self) -> Capabilities:
        version = wasm_cache.check_versions()
        wasm_cache.compiled(self._cache)
        outer = await self._native.probe()
        if not outer.available or outer.guarantees is None:
            raise errors.NotAvailable(f"its worker needs the native jail: {outer.why_not}", fix=outer.fix)
        walls = ("webassembly memory", "no system calls, WASI only", *(f"worker: {w}" for w in outer.guarantees.walls))
        limits = {
            "memory": "wasm", "pids": "no processes", "disk": "tmpfs size", "timeout": "epoch and watchdog",
            "output": "watchdog", "cpus": outer.guarantees.limits["cpus"], "io": outer.guarantees.limits["io"],
        }  # fmt: skip
        promise = Guarantees(isolation=Isolation.NAMESPACE, walls=walls, limits=limits, network="none")
        return Capabilities(
            backend=self.name, available=True, version=version, guarantees=promise, commands=False,
            processes=False, languages=frozenset({"python"}),
        )  # fmt: skip

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return (LanguageSupport(name="python", available=True, version="3.15", program="python.wasm"),)

    async def reap(self) -> int:
        return await self._native.reap()

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[WasmBox]:
        box = WasmBox(await self._worker(plan.limits), plan, self._worker)
        try:
            box.prepare()
            yield box
        finally:
            with anyio.CancelScope(shield=True):
                if box.worker.alive and await box.dispose():
                    self._put_back(box.worker)
                else:
                    await box.worker.end()

    async def _worker(self, limits: Limits) -> Worker:
        """An idle worker of the right size, or a new one."""
        if self._pid != os.getpid():  # after a fork the idle ones are our parent's: two would talk to one
            self._idle, self._pid = {}, os.getpid()
        idle = self._idle.setdefault(_size(limits), [])
        while idle:
            worker = idle.pop()
            if worker.alive:
                return worker
            await worker.end()
        worker = Worker(self._native, limits)
        try:
            await worker.start(self._cache)
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

    def _put_back(self, worker: Worker) -> None:
        self._idle.setdefault(_size(worker.limits), []).append(worker)
        kept = [(size, idle) for size, idle in self._idle.items() if idle]
        if sum(len(idle) for _, idle in kept) > _IDLE:
            size, oldest = kept[0]
            oldest.pop(0).abandon()
            if not oldest:
                del self._idle[size]


class Worker:
    """One worker process in its jail, and the two pipes to it. Nothing reads them between runs."""

    def __init__(self, native: Native, limits: Limits) -> None:
        self._native = native
        self.limits = limits
        self._fds = ExitStack()
        self._child: process.Child | None = None
        self._pending = b""
        self._runs = 0
        self._condemned = False
        self._busy = False  # from a request to its end: whoever goes away in between leaves a guest that still talks
        self.uid: int | None = None
        self.tmp = -1
        self.group: Any = None

    @property
    def alive(self) -> bool:
        return self._child is not None and not self._condemned and not self._busy and not self._child.ended()

    async def start(self, cache: Path) -> None:
        native = self._native
        native._prepare()
        if native.uids:
            self.uid, release = native._uid_for(Plan())
            self._fds.callback(release)
        self.group = native._group_for(_sized(self.limits))
        status = self._spawn(_walls(self.limits, cache))
        with anyio.fail_after(_START_SECONDS):
            frame = await self._frame()
            said = await process.read_some(status)
        if not frame or not frame.get("ready"):
            raise errors.StartFailed(f"the wasm worker did not start: {(frame or {}).get('noise', 'it is gone')}")
        init = json.loads(said.splitlines()[0])["child-pid"]
        self.tmp = self._fds.enter_context(files.opened(f"/proc/{init}/root/tmp"))

    def _spawn(self, walls: jail.Jail) -> int:
        """Starts the process; returns the pipe on which bubblewrap tells its pid."""
        native = self._native
        with ExitStack() as theirs:
            args, fds = jail.arguments(walls, theirs)
            stdin, self._stdin = os.pipe()
            self._stdout, stdout = os.pipe()
            told, status = os.pipe()
            for fd in (stdin, stdout, status):
                theirs.callback(os.close, fd)
            for fd in (self._stdin, self._stdout, told):
                self._fds.callback(os.close, fd)
            args += ["--json-status-fd", str(status)]
            listing = jail.memory_file(b"\0".join(arg.encode() for arg in args) + b"\0", theirs)
            python = native.toolchains.find("python3")
            line = jail.launcher(self.group.doors if self.group else (), self.uid, 0)
            line += [native.bubblewrap, "--args", str(listing), "--", python.path if python else "python3"]
            line += [_WORKER, _MODULE, _LIBRARY]
            self._child = process.Child(line, stdin=stdin, stdout=stdout, stderr=stdout, fds=(*fds, listing, status))
        return told

    async def _frame(self) -> dict[str, Any] | None:
        """The next line it says, or None at its end."""
        while b"\n" not in self._pending:
            if len(self._pending) > _FRAME:
                raise errors.ExecutionFailed("the wasm worker says too much at once")
            data = await process.read_some(self._stdout)
            if not data:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        with suppress(ValueError):
            frame = json.loads(line)
            return frame if isinstance(frame, dict) else {}
        return {"noise": line.decode(errors="replace")}

    async def ask(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self._runs += 1
        self._busy = True
        await process.write_all(self._stdin, json.dumps({"run": self._runs, **request}).encode() + b"\n")
        while frame := await self._frame():
            self._busy = frame.get("done") != self._runs
            yield frame
            if not self._busy:
                return

    def kill(self) -> None:
        self._condemned = True
        if self._child:
            self._child.kill()
        if self.group:
            self.group.kill()

    def abandon(self) -> None:
        """`end`, where nobody can wait."""
        self.kill()
        self._fds.close()
        if self.group:
            self.group.destroy()

    async def gone(self) -> None:
        """Killed, and seen to be dead."""
        self.kill()
        if self._child:
            await self._child.wait()

    async def end(self) -> None:
        await self.gone()
        self._fds.close()
        if self.group:
            await anyio.to_thread.run_sync(self.group.destroy)


class WasmBox:
    """One sandbox: a folder of its own in a worker that is ours until we close."""

    def __init__(self, worker: Worker, plan: Plan, another: Callable[[Limits], Awaitable[Worker]]) -> None:
        self.id = plan.id
        self.worker = worker
        self._another = another
        self._plan = plan
        self._stack = ExitStack()
        self._root = -1
        self._workspace = -1
        self._turn = anyio.Lock()  # one interpreter, two pipes: one command after the other

    def prepare(self) -> None:
        for folder in ("workspace", "tmp"):  # in this thread: a hand-over to another costs more than two mkdirs
            files.make_folder(self.worker.tmp, f"{self.id}/{folder}", owner=self.worker.uid)
        base = f"/proc/self/fd/{self.worker.tmp}/{self.id}"
        self._root = self._stack.enter_context(files.opened(base))
        self._workspace = self._stack.enter_context(files.opened(f"{base}/workspace"))

    async def _revive(self) -> None:
        """After a command that cost the worker (a timeout, a cancel, a flood): the same files in another one.

        The old tmpfs outlives its worker for as long as we hold a descriptor of it.
        """
        limit = self._plan.limits.disk
        await self.worker.gone()  # else it may still write while we copy
        fresh = await self._another(self._plan.limits)
        with anyio.CancelScope(shield=True):  # half a change of hands would leave us with closed descriptors
            gone, self.worker, old, before = self.worker, fresh, self._root, self._stack
            self._stack = ExitStack()
            with before:
                self.prepare()
                await anyio.to_thread.run_sync(self._take_over, old, 2 * limit)
            await gone.end()

    def _take_over(self, old: int, limit: int) -> None:
        """/workspace and /tmp, empty folders too; links stay behind."""
        for entry in files.entries(old):
            if entry.kind == "folder":
                files.make_folder(self._root, entry.path, owner=self.worker.uid)
        kept = files.collect(old, ["**"], most=files.MANY, limit=limit).files
        files.write(self._root, kept, owner=self.worker.uid)

    async def dispose(self) -> bool:
        """Removes its folder; False if something of it would not go, and the worker must."""
        self._stack.close()
        files.discard(self.worker.tmp, [f"{self.id}/workspace", f"{self.id}/tmp", self.id])
        if not files.missing(self.worker.tmp, [self.id]):  # the guest left something: that may take longer
            return await anyio.to_thread.run_sync(lambda: files.erase(self.worker.tmp, self.id, owner=self.worker.uid))
        return True

    async def put(self, files_in: Sequence[File]) -> None:
        try:
            await anyio.to_thread.run_sync(lambda: files.write(self._workspace, files_in, owner=self.worker.uid))
        except OSError as error:
            raise errors.ExecutionFailed(f"the file could not be written: {error.strerror}") from None

    async def get(self, patterns: Sequence[str]) -> Collected:
        return await anyio.to_thread.run_sync(files.collect, self._workspace, tuple(patterns))

    async def list(self) -> tuple[Entry, ...]:
        return await anyio.to_thread.run_sync(files.entries, self._workspace)

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        async with self._turn:
            return await self._run(command, emit, control)

    async def _run(self, command: Command, emit: Emit, control: Control) -> Result:
        if not self.worker.alive:
            await self._revive()
        run = _WasmRun(self, command, emit, control)
        inputs = {**self._plan.files, **command.files}
        made = files.missing(self._workspace, inputs)
        files.clear(self._workspace, inputs)
        given = [File(path=f"workspace/{name}", content=data, read_only=True) for name, data in inputs.items()]
        try:
            files.write(self._root, [*given, File(path="stdin", content=command.stdin)], owner=self.worker.uid)
        except OSError as error:
            raise errors.ExecutionFailed(f"the input could not be written: {error.strerror}") from None
        if command.cwd.startswith(f"{WORKSPACE}/"):
            files.make_folder(self._root, command.cwd.lstrip("/"), owner=self.worker.uid)
        try:
            return await run.go()
        except BaseException:  # cancelled, or a listener failed: the guest must not go on
            self.worker.kill()
            with anyio.CancelScope(shield=True):
                await self.worker.gone()
            raise
        finally:
            files.discard(self._workspace, made)
            files.discard(self._root, ["stdin"])


class _WasmRun:
    def __init__(self, box: WasmBox, command: Command, emit: Emit, control: Control) -> None:
        self._worker = box.worker
        self._id = box.id
        self._command = command
        self._emit = emit
        self._control = control
        self._limits = command.limits or box._plan.limits
        self._streams: dict[Stream, Capture] = {name: Capture(self._limits.output) for name in STREAMS}
        self._verdict: Status | None = None
        self._done: dict[str, Any] = {}
        self._cpu_before = self._cpu_ms()
        self._started = time.perf_counter()

    async def go(self) -> Result:
        await self._emit("started", self._id)
        startup = (time.perf_counter() - self._started) * 1000
        with lone_errors():
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(self._watch_clock)
                watchers.start_soon(self._watch_control)
                await self._listen()
                watchers.cancel_scope.cancel()
        for name, capture in self._streams.items():
            await hear(capture, name, b"", self._emit)
        return self._result(startup)

    async def _listen(self) -> None:
        request = {
            "root": f"/tmp/{self._id}", "stdin": f"/tmp/{self._id}/stdin", "main": self._command.argv[-1],
            "cwd": self._command.cwd, "env": {**_ENV, **self._command.env}, "memory": self._limits.memory,
            "timeout": self._limits.timeout,
        }  # fmt: skip
        async for frame in self._worker.ask(request):
            for name in STREAMS:
                if frame.get("stream") == name and isinstance(data := frame.get("data"), str):
                    await self._hear(name, data)
            if "done" in frame:
                self._done = frame

    async def _hear(self, name: Stream, data: str) -> None:
        capture = self._streams[name]
        try:
            written = base64.b64decode(data)
        except ValueError:  # not our worker's words
            return
        await hear(capture, name, written, self._emit)
        if capture.flooded:
            self._end(Status.OUTPUT_LIMIT)

    async def _watch_clock(self) -> None:
        """For a guest that sleeps: its own deadline counts only while it computes."""
        await anyio.sleep(self._limits.timeout + _GRACE)
        self._end(Status.TIMEOUT)

    async def _watch_control(self) -> None:
        self._end(await self._control.stopped())

    def _end(self, verdict: Status) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._worker.kill()

    def _result(self, startup: float) -> Result:
        out, err = self._streams["stdout"], self._streams["stderr"]
        code, cut = self._done.get("exit_code"), bool(out.cut or err.cut)
        if (trap := str(self._done.get("trap", ""))) and "interrupt" not in trap:
            err.feed(f"the interpreter was stopped: {trap.splitlines()[-1].strip()}\n".encode())
        memory, cpu = self._done.get("memory"), self._cpu_ms()
        return Result(
            status=self._judge(code, err.text, cut), exit_code=code, stdout=out.text, stderr=err.text, truncated=cut,
            duration_ms=round((time.perf_counter() - self._started) * 1000, 3), startup_ms=round(startup, 3),
            memory_used_mb=round(memory / MIB, 3) if memory else None,
            cpu_ms=None if cpu is None or self._cpu_before is None else round(cpu - self._cpu_before, 3),
            container_id=self._id,
        )  # fmt: skip

    def _cpu_ms(self) -> float | None:
        return self._worker.group.usage().cpu_ms if self._worker.group else None

    def _judge(self, code: int | None, stderr: str, cut: bool) -> Status:
        trap = str(self._done.get("trap", ""))
        if self._verdict:
            return self._verdict
        if not self._done:
            usage = self._worker.group.usage() if self._worker.group else None
            return Status.OOM_KILLED if usage and usage.oom_kills else Status.KILLED
        if "interrupt" in trap:
            return Status.TIMEOUT
        if code == 0:
            return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
        if "MemoryError" in stderr[-2000:] or "memory minimum size" in trap:
            return Status.OOM_KILLED
        return Status.DISK_LIMIT if "No space left on device" in stderr[-2000:] else Status.ERROR


def _walls(limits: Limits, cache: Path) -> jail.Jail:
    """The native jail with the interpreter, its library and wasmtime in reach, and no file of the guest's."""
    package = wasm_cache.wasmtime_folder()
    worker = package_files("belljar.guest").joinpath("wasm_worker.py").read_bytes()
    module, library = wasm_cache.compiled(cache), wasm_cache.library()
    return jail.Jail(
        env=_ENV | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(package.parent)}, cwd="/tmp", disk=limits.disk,
        files={}, inputs=WORKSPACE, grants=(str(package),), workspace=None, space=jail.Space(),
        binds={_MODULE: str(module), f"{_LIBRARY}/{wasm_cache.LIBRARY}": str(library)}, texts={_WORKER: worker},
    )  # fmt: skip


def _size(limits: Limits) -> tuple[float, ...]:
    """What is fixed when a worker starts: guests that differ in it need another worker."""
    return (limits.disk, limits.memory, limits.cpus)


def _sized(limits: Limits) -> Limits:
    return limits.model_copy(update={"memory": limits.memory + _OVERHEAD, "pids": 64})
