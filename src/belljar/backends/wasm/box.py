"""One sandbox of the wasm backend: programs, the files they share, and sessions."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from belljar.backends.base import Emit
from belljar.backends.snapshot import Snapshot
from belljar.backends.wasm import snapshots
from belljar.backends.wasm.folder import BoxFolder
from belljar.backends.wasm.interpreter import WasmInterpreter
from belljar.backends.wasm.profiles import Profile
from belljar.backends.wasm.run import WasmRun
from belljar.backends.wasm.store import ENV
from belljar.backends.wasm.worker.messages import Request
from belljar.backends.wasm.worker_process import WorkerProcess
from belljar.control.control import Control
from belljar.core.plan import Command, Plan
from belljar.core.request import Limits
from belljar.core.result import Collected, Entry, File, Result, Usage

_DROP_SECONDS = 10.0

_Number = TypeVar("_Number", int, float)


class WasmBox:
    """A sandbox in a worker that is its own until it is closed.

    Attributes:
        one_at_a_time: is held while the worker is asked something.
        holds_session: whether an instance may be left in the worker.
        restored: whether the worker holds a session that was copied in, and no interpreter has been opened on it yet.
    """

    def __init__(
        self, worker: WorkerProcess, plan: Plan, another: Callable[[Plan], Awaitable[WorkerProcess]],
        profile: Profile | None,
    ) -> None:  # fmt: skip
        """`another`: gives a worker in the place of one that was lost."""
        self.id: str = plan.id
        self.worker: WorkerProcess = worker
        self.plan = plan
        self.profile = profile
        self.folder: BoxFolder = BoxFolder(worker, plan)
        self.one_at_a_time: anyio.Lock = anyio.Lock()
        self.holds_session = self.session_is_open = self.restored = False
        self._another = another
        self._running = False
        self._before: tuple[WorkerProcess, Usage] | None = None  # what the worker's earlier guests had used

    async def dispose(self) -> bool:
        """Removes what is left of the box; False if something would not go, and the worker must."""
        self.folder.close()
        if self.holds_session:
            await self.worker.answer({"do": "drop"}, _DROP_SECONDS)
        return await self.folder.remove()

    async def make_folder(self) -> None:
        """Makes its folder, when the worker has removed what its last guest left: a full disk has no room for it."""
        await self.worker.answer({"do": "drop"}, _DROP_SECONDS)
        self.folder.make()

    async def revive_if_dead(self) -> None:
        """After a command that cost the worker (a cancel, a flood), brings the same files into another one.

        The old file system outlives its worker for as long as we hold a descriptor of it.
        """
        if not self.worker.alive:
            await self._revive()

    async def _revive(self) -> None:
        await self.worker.gone()  # else it may still write while we copy
        fresh = await self._another(self.plan)
        with anyio.CancelScope(shield=True):  # half a change of hands would leave us with closed descriptors
            gone, self.worker = self.worker, fresh
            old, self.folder = self.folder, BoxFolder(fresh, self.plan)
            try:
                if old.made:
                    await self.make_folder()
                    await anyio.to_thread.run_sync(lambda: self.folder.lay(*old.tree()))
            finally:
                old.close()
            await gone.end()

    async def put(self, files: Sequence[File]) -> None:
        await self.folder.put(files)

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.folder.reading(path)

    async def get(self, patterns: Sequence[str]) -> Collected:
        return await self.folder.get(patterns)

    async def figures(self, limit: int) -> Collected:
        return await self.folder.figures(limit)

    async def list(self) -> tuple[Entry, ...]:
        return await self.folder.list()

    async def measure(self) -> Usage | None:
        """Counts from the first look: to look before each guest would cost those that nobody looks at."""
        worker = self.worker
        if not (self._running or self.session_is_open):
            return None
        now = await anyio.to_thread.run_sync(worker.figures, abandon_on_cancel=True)
        if now is None or not (self._running or self.session_is_open):  # it may have ended meanwhile
            return None
        if self._before is None or self._before[0] is not worker:
            self._before = worker, now
        before = self._before[1]
        return now._replace(
            cpu_ms=_since(before.cpu_ms, now.cpu_ms), disk_read=_since(before.disk_read, now.disk_read),
            disk_write=_since(before.disk_write, now.disk_write),
        )  # fmt: skip

    # --- programs ---

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        self._running = True
        try:
            async with self.one_at_a_time:
                await self.revive_if_dead()
                return await self._run(command, emit, control)
        finally:
            self._running = False

    async def _run(self, command: Command, emit: Emit, control: Control) -> Result:
        run = WasmRun(self.worker, self.id, command.limits or self.plan.limits, emit)
        request = self.request(command, run.limits)
        request |= {"do": "run", "main": command.main, "args": command.args, "language": command.language or "python"}
        clean_up = self._give_inputs(request, command)
        fds: Sequence[int] = ()
        if self.profile and request["language"] == "python" and not command.deterministic and not self.plan.workspace:
            fds = self.use_profile(request)
        try:
            result = await run.go(request, control, fds)
            if not run.turned_away:
                return result
        except BaseException:  # cancelled, or the listener failed: the guest must not go on
            with anyio.CancelScope(shield=True):
                await self.worker.gone()
            raise
        finally:
            clean_up()
        await self._revive()  # the guest before us left what the worker could not remove, and ours has not begun
        return await self._run(command, emit, control)

    def _give_inputs(self, request: Request, command: Command) -> Callable[[], object]:
        """Writes the inputs, or sends them along where the worker makes the folder; returns what removes them."""
        inputs = {**self.plan.files, **command.files}
        if self.folder.made:
            made = self.folder.write_inputs(inputs, command)
            return partial(self.folder.discard, [*made, "stdin"])
        given = {self.folder.input(name): base64.b64encode(data).decode() for name, data in inputs.items()}
        if command.stdin:
            given["stdin"] = base64.b64encode(command.stdin).decode()
        main = self.folder.input(command.main.rpartition("/")[2])
        request["make"] = {"name": self.id, "files": given, "main": main}
        return lambda: None

    def request(self, command: Command, limits: Limits) -> Request:
        """Returns what every request about a guest says: what is around it, and its limits."""
        mode = command.deterministic
        return {
            "stdin": f"{self.folder.inside}/stdin" if command.stdin else os.devnull,
            "cwd": command.cwd, "env": {**ENV, **command.env}, "folders": self.folder.granted(),
            "memory": limits.memory, "timeout": limits.timeout, "fuel": limits.fuel,
            "deterministic": {"seed": mode.seed, "start": mode.start} if mode else None,
        }  # fmt: skip

    def use_profile(self, request: Request) -> Sequence[int]:
        """Names the profile in a request; its copy goes along the first time. Returns the descriptors to send."""
        assert self.profile is not None
        request["profile"] = self.profile.facts()
        if self.profile.name in self.worker.profiles:
            return []
        self.worker.profiles.add(self.profile.name)
        return [self.profile.file]

    # --- sessions ---

    def interpreter(self, env: Mapping[str, str], lifetime: float, language: str = "python") -> WasmInterpreter:
        return WasmInterpreter(self, env)

    async def snapshot(self) -> Snapshot:
        return await snapshots.take(self)

    def check(self, snapshot: Snapshot) -> None:
        snapshots.check(self.plan, snapshot)

    async def restore(self, snapshot: Snapshot) -> None:
        await snapshots.restore(self, snapshot)


def _since(before: _Number | None, now: _Number | None) -> _Number | None:
    return None if before is None or now is None else now - before
