"""One sandbox of the wasm backend: runs, sessions, and the copying of sessions."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from belljar.backends.base import Emit
from belljar.backends.control import Control
from belljar.backends.pipe_interpreter import PipeInterpreter
from belljar.backends.snapshot import Snapshot
from belljar.backends.wasm import store
from belljar.backends.wasm.profiles import Profile
from belljar.backends.wasm.run import GRACE, WasmRun, judge_trap
from belljar.backends.wasm.worker_process import ENV, Worker
from belljar.core import errors
from belljar.core.plan import INPUTS, Command, Plan
from belljar.core.request import Limits
from belljar.core.result import Collected, Entry, File, FileTree, Result, Status, Usage
from belljar.core.values import MIB, WORKSPACE, format_size
from belljar.host import files

PROJECT = "/mnt/project"
_OWN = ("workspace/", "tmp/")
_VERDICT = '{"done"'  # how the agent's last words of a turn begin
_COPY_SECONDS = 60.0
_IDLE_TURN = 10.0  # seconds for what is no guest's work: opening a session, measuring a memory

_Number = TypeVar("_Number", int, float)


class WasmBox:
    """A sandbox in a worker that is ours until we close; its folder is made when files are to outlive a run."""

    def __init__(
        self, worker: Worker, plan: Plan, another: Callable[[Plan], Awaitable[Worker]], profile: Profile | None,
        project: FileTree | None,
    ) -> None:  # fmt: skip
        self.id = plan.id
        self.worker = worker
        self.plan = plan
        self.profile = profile
        self._another = another
        self._project = project  # a granted folder that had to be copied
        self._stack = ExitStack()
        self._root = -1
        self._workspace = -1
        self._turn = anyio.Lock()  # one interpreter, two pipes: one thing after the other
        self._restored = False
        self._conversed = False  # the worker holds an instance of ours
        self._running = False
        self._before: tuple[Worker, Usage] | None = None  # what the worker's earlier guests had used

    # --- its folder ---

    def prepare(self) -> None:
        for folder in ("workspace", "tmp"):  # in this thread: a hand-over to another costs more than two mkdirs
            files.make_folder(self.worker.tmp, f"{self.id}/{folder}", owner=self.worker.uid)
        self._root = self._stack.enter_context(files.below(self.worker.tmp, self.id))
        if self.plan.workspace:
            files.make_folder(self._root, "inputs", owner=self.worker.uid)
        if self._project is not None:
            copied = [file.model_copy(update={"path": f"project/{file.path}"}) for file in self._project]
            files.make_folder(self._root, "project", owner=self.worker.uid)
            files.write(self._root, copied, owner=self.worker.uid)
        workspace = "workspace" if self._project is None else "project"
        self._workspace = self._stack.enter_context(files.below(self._root, workspace))

    @property
    def kept(self) -> bool:
        return self._root >= 0

    async def _revive(self) -> None:
        """After a command that cost the worker (a cancel, a flood): the same files in another one.

        The old tmpfs outlives its worker for as long as we hold a descriptor of it.
        """
        await self.worker.gone()  # else it may still write while we copy
        fresh = await self._another(self.plan)
        with anyio.CancelScope(shield=True):  # half a change of hands would leave us with closed descriptors
            gone, self.worker, old, before = self.worker, fresh, self._root, self._stack
            self._stack = ExitStack()
            with before:
                if old >= 0:
                    self.prepare()
                    await anyio.to_thread.run_sync(lambda: self._lay(*self._tree(old)))
            await gone.end()

    def _tree(self, root: int, *, whole: bool = False) -> tuple[FileTree, tuple[str, ...]]:
        """/workspace and /tmp, empty folders too; links stay behind, and nothing else if it must be `whole`."""
        folders = tuple(entry.path for entry in files.entries(root, most=files.MANY) if entry.kind == "folder")
        found = files.collect(root, ["**"], most=files.MANY, limit=2 * self.plan.limits.disk)
        lost = [left for left in found.left_out if ": link, " not in left]
        if whole and lost:
            raise errors.ExecutionFailed(
                f"the session's files cannot all be copied: {lost[0]}", fix="remove it, or give it a plainer name"
            )
        return found.files, folders

    def _lay(self, tree: FileTree, folders: tuple[str, ...]) -> None:
        for folder in folders:
            files.make_folder(self._root, folder, owner=self.worker.uid)
        files.write(self._root, tree, owner=self.worker.uid)

    async def dispose(self) -> bool:
        """Removes its folder; False if something of it would not go, and the worker must."""
        self._stack.close()
        if self._conversed:
            await self.worker.answer({"do": "drop"}, _IDLE_TURN)
        if not self.kept:  # the worker made it, if anybody, and removes it before it does anything else
            return True
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

    # --- running ---

    def interpreter(self, env: Mapping[str, str], lifetime: float) -> PipeInterpreter:
        return PipeInterpreter(self, self.plan, env, lifetime)

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        self._running = True
        try:
            return await self._run_or_converse(command, emit, control)
        finally:
            self._running = False

    async def measure(self) -> Usage | None:
        """Counted from the first look: to look before each guest would cost those that nobody looks at."""
        worker = self.worker
        if not self._running or (now := worker.figures()) is None:
            return None
        if self._before is None or self._before[0] is not worker:
            self._before = worker, now
        before = self._before[1]
        return now._replace(
            cpu_ms=_since(before.cpu_ms, now.cpu_ms), disk_read=_since(before.disk_read, now.disk_read),
            disk_write=_since(before.disk_write, now.disk_write),
        )  # fmt: skip

    async def _run_or_converse(self, command: Command, emit: Emit, control: Control) -> Result:
        if control.feed is not None:
            return await self._converse(command, emit, control)
        async with self._turn:
            if not self.worker.alive:
                await self._revive()
            result = await self._run(command, emit, control)
            if left_out := await self._copy_back_project():
                result = result.model_copy(update={"left_out": tuple(f"not copied back: {what}" for what in left_out)})
            return result

    async def _copy_back_project(self) -> tuple[str, ...]:
        if self._project is None or self.plan.workspace is None or not self.plan.workspace.write:
            return ()
        return await anyio.to_thread.run_sync(self._copy_back, self.plan.workspace.path)

    def _copy_back(self, path: str) -> tuple[str, ...]:
        assert self._project is not None
        with files.below(self._root, "project") as copied:
            after = files.copy_back(copied, self._project, path, self.plan.limits.disk)
        self._project = after.files
        return after.left_out

    async def _run(self, command: Command, emit: Emit, control: Control) -> Result:
        run = WasmRun(self.worker, self.id, command.limits or self.plan.limits, emit)
        inputs = {**self.plan.files, **command.files}
        request = self.request(command, run.limits) | {"do": "run", "main": command.argv[-1]}
        request |= {"language": command.language or "python"}
        made: Sequence[str] = ()
        fds: Sequence[int] = ()
        if self.kept:
            made = self._write_inputs(inputs, command)
        else:
            given = {self._input(name): base64.b64encode(data).decode() for name, data in inputs.items()}
            stdin = {"stdin": base64.b64encode(command.stdin).decode()} if command.stdin else {}
            main = self._input(command.argv[-1].rpartition("/")[2])
            request["make"] = {"name": self.id, "files": given | stdin, "main": main}
        if self.profile and request["language"] == "python" and not command.deterministic and not self.plan.workspace:
            fds = self._use_profile(request)
        try:
            result = await run.go(request, control, fds)
            if not run.turned_away:
                return result
        except BaseException:  # cancelled, or the listener failed: the guest must not go on
            with anyio.CancelScope(shield=True):
                await self.worker.gone()
            raise
        finally:
            if self.kept:
                files.discard(self._root, [*made, "stdin"])
        await self._revive()  # the guest before us left what the worker could not remove, and ours has not begun
        return await self._run(command, emit, control)

    def _input(self, name: str) -> str:
        return f"{'inputs' if self.plan.workspace else 'workspace'}/{name}"

    def _write_inputs(self, inputs: dict[str, bytes], command: Command) -> Sequence[str]:
        """Into the folder of a box that is kept; returns what was not there before."""
        names = [self._input(name) for name in inputs]
        made = files.missing(self._root, names)
        files.clear(self._root, names)
        given = [File(path=self._input(name), content=data, read_only=True) for name, data in inputs.items()]
        try:
            if command.stdin:
                given.append(File(path="stdin", content=command.stdin))
            files.write(self._root, given, owner=self.worker.uid)
        except OSError as error:
            raise errors.ExecutionFailed(f"the input could not be written: {error.strerror}") from None
        if command.cwd.startswith(f"{WORKSPACE}/"):
            files.make_folder(self._root, command.cwd.lstrip("/"), owner=self.worker.uid)
        return made

    def request(self, command: Command, limits: Limits) -> dict[str, Any]:
        root = f"{self.worker.private}/{self.id}"
        stdin = f"{root}/stdin" if command.stdin else os.devnull
        return {
            "root": root, "stdin": stdin, "cwd": command.cwd, "env": {**ENV, **command.env},
            "folders": self._folders(root), "memory": limits.memory, "timeout": limits.timeout, "fuel": limits.fuel,
            "deterministic": command.deterministic.model_dump() if command.deterministic else None,
        }  # fmt: skip

    def _folders(self, root: str) -> Sequence[tuple[str, str, bool]]:
        """What the guest is given: (where it is, its name inside, may it write). The order is part of a checkpoint."""
        if not self.plan.workspace:
            return [(f"{root}/workspace", WORKSPACE, True), (f"{root}/tmp", "/tmp", True)]
        write = self.plan.workspace.write
        project = f"{root}/project" if self._project is not None else self.worker.project
        return [
            (project, WORKSPACE, write), (f"{root}/tmp", "/tmp", True), (f"{root}/inputs", INPUTS, False),
            (project, PROJECT, write),
        ]  # fmt: skip

    def _use_profile(self, request: dict[str, Any]) -> Sequence[int]:
        """Names the profile; its copy goes along the first time. Returns the descriptors to send."""
        assert self.profile is not None
        request["profile"] = self.profile.facts()
        if self.profile.name in self.worker.profiles:
            return []
        self.worker.profiles.add(self.profile.name)
        return [self.profile.file]

    # --- sessions ---

    async def _converse(self, command: Command, emit: Emit, control: Control) -> Result:
        """The life of a session: the agent goes in, and then one request for each line of the feed."""
        assert control.feed is not None
        started = time.perf_counter()
        verdict: Status | None = None
        with anyio.move_on_after(command.limits.timeout if command.limits else None) as life:
            control.on_stop(lambda reason: life.cancel())
            async with self._turn:
                self._conversed = True
                if not self._restored:
                    await self._open(command)
                self._restored = False
            await emit("started", self.id)
            await emit("stdout", '{"ready": true}\n')
            async for line in control.feed:
                async with self._turn:
                    if verdict := await self._take_turn(json.loads(line), emit):
                        break
        if life.cancelled_caught:
            verdict = control.reason if control.stopping else Status.TIMEOUT
            self.worker.kill()
        elapsed = (time.perf_counter() - started) * 1000
        return Result(status=verdict or Status.SUCCESS, duration_ms=round(elapsed, 3), container_id=self.id)

    async def _open(self, command: Command) -> None:
        agent = command.files[next(iter(command.files))].decode()
        self._write_inputs(dict(self.plan.files), command)
        request = self.request(command, self.plan.limits) | {"do": "open", "agent": agent, "fuel": None}
        request |= {"timeout": _IDLE_TURN}
        fds = self._use_profile(request) if self.profile and not command.deterministic else []
        frame = await self.worker.answer(request, _IDLE_TURN + GRACE, fds)
        if frame.get("trap") or frame.get("exit_code"):
            raise errors.StartFailed(f"the session did not start: {frame.get('trap') or frame.get('exit_code')}")

    async def _take_turn(self, turn: dict[str, Any], emit: Emit) -> Status | None:
        """One turn; a status if the session cannot go on after it."""
        limits = self.plan.limits
        request = {"do": "turn", "turn": turn, "timeout": turn["timeout"], "memory": limits.memory, "fuel": limits.fuel}
        done: dict[str, Any] = {}
        held = ""
        try:
            async for frame in self.worker.ask(request, turn["timeout"] + GRACE):
                done = frame if "done" in frame else done
                if isinstance(words := frame.get("words"), str):
                    if words.startswith(_VERDICT):
                        held = words
                    else:
                        await emit("stdout", words.replace("\n", " ") + "\n")
        except TimeoutError:
            self.worker.kill()
            return Status.TIMEOUT
        if not done:
            return self.worker.ending()
        await self._copy_back_project()
        if done.get("ended") or done.get("exit_code") or not held:  # the agent itself is gone
            return judge_trap(str(done.get("trap", ""))) or Status.ERROR
        # Only now is the worker idle again: whoever hears this may close the session at once.
        await emit("stdout", held.replace("\n", " ") + "\n")
        return None

    # --- copying a session ---

    async def imported(self, modules: Sequence[str]) -> Snapshot:
        """A fresh interpreter after these imports, and nothing else: what a profile is made of."""
        request = self.request(Command(argv=("python3",)), self.plan.limits)
        frame = await self.worker.answer(request | {"do": "import", "modules": modules}, _COPY_SECONDS)
        if frame.get("trap") or frame.get("exit_code"):
            raise errors.StartFailed(f"{', '.join(modules)} cannot be imported: {frame.get('trap') or 'it raised'}")
        return await self.snapshot()

    async def snapshot(self) -> Snapshot:
        """The pages are ours to allocate: the memory of a copy must not count against the guest's limit."""
        async with self._turn:
            measured = await self.worker.answer({"do": "measure"}, _COPY_SECONDS)
            count, size = int(measured["pages"]), int(measured["size"])
            if not 0 <= count * 4096 <= size <= self.plan.limits.memory + MIB:
                raise errors.ExecutionFailed("the wasm worker does not know its own memory")
            copy = Snapshot(store.binary(), size, count, files.unnamed())
            if count and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(copy.pages, 0, count * (4096 + 4))
            await self.worker.answer({"do": "copy_out"}, _COPY_SECONDS, [copy.pages])
            files.seal(copy.pages)  # branches map it
            tree, folders = await anyio.to_thread.run_sync(lambda: self._tree(self._root, whole=True))
            copy.files = tuple(file for file in tree if file.path.startswith(_OWN))  # not what was granted
            copy.folders = tuple(folder for folder in folders if f"{folder}/".startswith(_OWN))
        return copy

    def check(self, snapshot: Snapshot) -> None:
        """Raises if `restore` could not use it."""
        if snapshot.size > self.plan.limits.memory:
            raise errors.ExecutionFailed(
                f"the checkpoint needs {format_size(snapshot.size)} of memory, more than this session may have",
                fix=f'ask for memory="{format_size(snapshot.size)}" or more',
            )
        if snapshot.binary != store.binary():
            raise errors.InvalidRequest(
                f"this checkpoint was made by {snapshot.binary}, and here is {store.binary()}",
                fix="use it where it was made",
            )

    async def restore(self, snapshot: Snapshot) -> None:
        """Makes this box what another was; its session then goes on from there."""
        self.check(snapshot)
        async with self._turn:
            if not self.worker.alive:
                await self._revive()
            await anyio.to_thread.run_sync(self._replace_files, snapshot)
            if self.plan.workspace:
                self._write_inputs(dict(self.plan.files), Command(argv=("python3",)))
            request = self.request(Command(argv=("python3",)), self.plan.limits)
            request |= {"do": "copy_in", "size": snapshot.size, "pages": snapshot.count}
            with _only_read(snapshot.pages) as pages:
                frame = await self.worker.answer(request, _COPY_SECONDS, [pages])
        if refused := frame.get("refused"):
            raise errors.ExecutionFailed(f"the checkpoint cannot be used: {refused}", fix="make a new one")
        self._restored = True

    def _replace_files(self, snapshot: Snapshot) -> None:
        for folder in ("workspace", "tmp"):
            with files.below(self._root, folder) as inside:
                for name in os.listdir(inside):
                    files.discard(inside, [name])
                    files.erase(inside, name, owner=self.worker.uid)
        self._lay(snapshot.files, snapshot.folders)


def _since(before: _Number | None, now: _Number | None) -> _Number | None:
    return None if before is None or now is None else now - before


@contextmanager
def _only_read(fd: int) -> Iterator[int]:
    """The same file, not to be written: a branch must not change what others start from."""
    try:
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # not Linux
        reading = os.dup(fd)
    try:
        yield reading
    finally:
        os.close(reading)
