"""A wasm worker seen from the host: one process in its jail, a socket for requests, a pipe for answers.

The messages are described in `worker/messages.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends.native import jail
from belljar.backends.native.backend import Native
from belljar.backends.wasm.bytecode import INSIDE, own_modules
from belljar.backends.wasm.store import ENV, FRESH, CompiledStore, wasmtime_folder
from belljar.backends.wasm.worker.messages import Facts, FreshImage, Request, SessionRequest
from belljar.core import errors
from belljar.core.plan import Plan
from belljar.core.request import Limits, Workspace
from belljar.core.result import Status, Usage
from belljar.core.values import MIB, WORKSPACE
from belljar.host import files, lending, process, procfs, tmpfs
from belljar.host.lending import LentFolder

_OVERHEAD_BYTES = 64 * MIB  # that wasmtime, the worker and the next guest's interpreter may take beside the guest
_START_SECONDS = 30.0
_REAP_SECONDS = 1.0
_MAX_LINE_BYTES = MIB  # of a frame, its payload aside
_MAX_PAYLOAD_BYTES = 17 * MIB


_HERE = Path(__file__).parent
_SCRIPTS = (_HERE.parents[1] / "guest" / "javascript", _HERE / "vendor")


@cache
def _texts() -> dict[str, bytes]:
    """Returns what a jailed worker finds: its own modules, and JavaScript's prelude and type stripper."""
    modules = {inside: path.read_bytes() for inside, path in own_modules().items()}
    scripts = {
        f"{INSIDE}/scripts/{path.name}": path.read_bytes() for folder in _SCRIPTS for path in folder.glob("*.js")
    }
    return modules | scripts


def _command(python: str, folder: str, facts: str, compiled: str = "") -> list[str]:
    """Returns the command line of a worker.

    Args:
        python: the interpreter.
        folder: where the package `worker` is.
        facts: the worker's `Facts`.
        compiled: where it finds its modules compiled, if they are.
    """
    return [python, "-I", "-S", f"{folder}/worker/start.py", facts, str(wasmtime_folder().parent), compiled]


class WorkerKind(NamedTuple):
    """What cannot change once a worker has started: guests that differ in it need another worker."""

    disk: int
    memory: int
    cpus: float
    io_bps: int | None = None
    io_iops: int | None = None
    workspace: Workspace | None = None

    @classmethod
    def of(cls, plan: Plan) -> WorkerKind:
        asked = plan.limits
        return cls(asked.kept_bytes, asked.memory, asked.cpus, asked.io_bps, asked.io_iops, plan.workspace)


class WorkerProcess:
    """One worker process with its socket and its pipe. Nothing reads the pipe between requests."""

    def __init__(self, kind: WorkerKind, store: CompiledStore, native: Native | None) -> None:
        """Without `native` it is a plain process: the only wall is WebAssembly's own."""
        self.kind = kind
        self._store = store
        self._native = native
        self._fds = ExitStack()
        self._child: process.Child | None = None
        self._pending = bytearray()
        self._asked = 0
        self._condemned = False
        self._busy = False  # from a request to its answer: whoever goes away in between leaves a guest that still runs
        self.profiles: set[str] = set()  # those whose copy it holds
        self.uid: int | None = None
        self.private: str = "/tmp"
        self.project: str = WORKSPACE
        self.tmp: int = -1
        self.granted: int = -1  # the granted folder as the guest sees it, if there is one
        self._lent: LentFolder | None = None
        self.group: Any = None
        self._init = 0  # the pid of the jail's first process, if there is a jail
        self._resting = 0  # bytes that it held before its first guest

    @property
    def alive(self) -> bool:
        return self._child is not None and not self._condemned and not self._busy and not self._child.ended()

    async def start(self) -> None:
        """Starts the process, and returns when it is ready for a request.

        Raises:
            StartFailed: it ended instead.
        """
        if self._native:
            await self._prepare_jail(self._native)
        elif self.kind.workspace:
            self.granted = self._fds.enter_context(files.opened(self.kind.workspace.path))
        status = self._spawn_jailed(self._native) if self._native else self._spawn_plain()
        deadline = time.monotonic() + _START_SECONDS
        frame = await self._frame(deadline)
        if not frame or not frame.get("ready"):
            raise errors.StartFailed(f"the wasm worker did not start: {(frame or {}).get('noise', 'it is gone')}")
        inside = self.private
        if status >= 0:
            with anyio.fail_after(_START_SECONDS):
                self._init = json.loads((await process.read_some(status)).splitlines()[0])["child-pid"]
            inside = f"/proc/{self._init}/root/tmp"
        self.tmp = self._fds.enter_context(files.opened(inside))
        if self._native:
            with suppress(OSError):  # where we may not, the control group counts what files cost
                tmpfs.limit_files(self.tmp, Limits(disk=self.kind.disk, memory=self.kind.memory).kept_inodes)
        self._resting = (figures.memory or 0) if (figures := self.figures()) else 0

    def _facts(self, places: Mapping[str, str], scripts: list[str]) -> str:
        kept = self._store.profiles().get(FRESH)
        image: FreshImage | None = None
        if kept and FRESH in places:
            image = {"path": places[FRESH], "size": kept["size"], "pages": kept["pages"]}
        facts: Facts = {
            "python": places["python"], "javascript": places["javascript"], "library": places["library"],
            "fonts": places["fonts"], "scripts": scripts, "memory": self.kind.memory, "private": self.private,
            "env": ENV, "plain": self._native is None, "image": image,
        }  # fmt: skip
        return json.dumps(facts)

    async def _prepare_jail(self, native: Native) -> None:
        """Chooses the worker's uid, and opens the granted folder for both of us."""
        native.prepare()
        if native.uids:
            self.uid, release = native.uid_for(self.kind.workspace)
            self._fds.callback(release)
        if workspace := self.kind.workspace:
            self.granted, self._lent = await anyio.to_thread.run_sync(
                lending.open_grant, workspace.path, self.uid, native.place, self._fds
            )

    def _spawn_jailed(self, native: Native) -> int:
        """Starts it in the native jail; returns the pipe on which bubblewrap tells its pid."""
        kind = self.kind
        limits = Limits(
            cpus=kind.cpus, memory=kind.memory + _OVERHEAD_BYTES, pids=64, io_bps=kind.io_bps, io_iops=kind.io_iops
        )
        self.group = native.group_for(limits)
        walls, places = self._walls(native)
        with ExitStack() as theirs:
            args, fds = jail.arguments(walls, theirs)
            told, status = os.pipe()
            theirs.callback(os.close, status)
            self._fds.callback(os.close, told)
            args += ["--json-status-fd", str(status)]
            listing = jail.memory_file(b"\0".join(arg.encode() for arg in args) + b"\0", theirs)
            python = native.toolchains.find("python3")
            join_files = self.group.join_files if self.group else ()
            line = jail.launcher(join_files, self.uid, 0, self._lent.path if self._lent else "")
            line += [native.bubblewrap, "--args", str(listing), "--"]
            facts = self._facts(places, [f"{INSIDE}/scripts"])
            line += _command(python.path if python else "python3", INSIDE, facts, places.get("bytecode", ""))
            self._spawn(line, theirs, (*fds, listing, status))
        return told

    def _walls(self, native: Native) -> tuple[jail.Jail, dict[str, str]]:
        """Describes the native jail, with the interpreters, their libraries and wasmtime in reach, and no file of the
        guest's; and says where the interpreters are in it."""
        package = wasmtime_folder()
        found = self._store.places()
        places = {name: f"{INSIDE}/{name}" for name in found}
        binds = {f"{INSIDE}/{name}": path for name, path in found.items()}
        workspace = self.kind.workspace
        if workspace and self._lent:
            workspace = workspace.model_copy(update={"path": native.place})
        walls = jail.Jail(
            env=ENV | {"PATH": "/usr/bin:/bin"}, cwd="/tmp", disk=self.kind.disk, files={}, inputs=WORKSPACE,
            grants=(str(package),), workspace=workspace, space=jail.Space(), binds=binds, texts=_texts(),
            granted=self.granted, uid=self.uid,
        )  # fmt: skip
        return walls, places

    def _spawn_plain(self) -> int:
        self.private = tempfile.mkdtemp(prefix="belljar-wasm-")
        self._fds.callback(shutil.rmtree, self.private, ignore_errors=True)
        if self.kind.workspace:
            self.project = self.kind.workspace.path
        with ExitStack() as theirs:
            facts = self._facts(self._store.places(), [str(folder) for folder in _SCRIPTS])
            self._spawn(_command(sys.executable, str(_HERE), facts), theirs, ())
        return -1

    def _spawn(self, line: Sequence[str], theirs: ExitStack, fds: Sequence[int]) -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        self._socket = self._fds.enter_context(near)
        theirs.callback(far.close)
        self._stdout, stdout = os.pipe()
        self._fds.callback(os.close, self._stdout)
        theirs.callback(os.close, stdout)
        self._child = process.Child(line, stdin=far.fileno(), stdout=stdout, stderr=stdout, fds=fds)

    async def _frame(self, deadline: float) -> dict[str, Any] | None:
        """Returns the next frame, or None at the worker's end.

        Where a frame has a payload, that is the bytes that follow its line.

        Raises:
            TimeoutError: the deadline has passed.
        """
        line = b""
        while not line:
            if (end := self._pending.find(b"\n", 0, _MAX_LINE_BYTES)) >= 0:
                line = self._take(end + 1)
            elif len(self._pending) >= _MAX_LINE_BYTES:
                raise errors.ExecutionFailed("the wasm worker says too much at once")
            elif not await self._fill(deadline):
                return None
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError):
            return {"noise": line.decode(errors="replace").rstrip("\n")}
        if not isinstance(frame, dict):
            return {}
        if type(size := frame.get("payload")) is int and size >= 0:
            if size > _MAX_PAYLOAD_BYTES:
                raise errors.ExecutionFailed("the wasm worker says too much at once")
            while len(self._pending) < size:
                if not await self._fill(deadline):
                    return None
            frame["payload"] = self._take(size)
        return frame

    def _take(self, size: int) -> bytes:
        data = bytes(self._pending[:size])
        del self._pending[:size]
        return data

    async def _fill(self, deadline: float) -> bool:
        """Reads what there is; False at the worker's end."""
        with anyio.move_on_after(deadline - time.monotonic()) as clock:
            data = await process.read_some(self._stdout)
        if clock.cancelled_caught:
            raise TimeoutError
        self._pending += data
        return bool(data)

    async def ask(
        self, request: Request | SessionRequest, seconds: float, fds: Sequence[int] = (), payload: bytes | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Sends a request and yields what the worker says to it, to the frame with `done`.

        If the worker ends before, there is no such frame.

        Raises:
            TimeoutError: it takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        self._asked += 1
        self._busy = True
        message: dict[str, Any] = {"run": self._asked, **request}
        if payload is not None:
            message["payload"] = len(payload)
        await self._send(json.dumps(message).encode() + b"\n" + (payload or b""), fds)
        while (frame := await self._frame(deadline)) is not None:
            self._busy = frame.get("done") != self._asked
            yield frame
            if not self._busy:
                return
            if time.monotonic() > deadline:
                raise TimeoutError

    async def answer(
        self, request: Request | SessionRequest, seconds: float, fds: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Sends a request and returns the last frame of what the worker says to it.

        Raises:
            ExecutionFailed: the worker is gone.
            TimeoutError: it takes longer than `seconds`.
        """
        last: dict[str, Any] = {}
        async for frame in self.ask(request, seconds, fds):
            last = frame
        if "done" not in last:
            raise errors.ExecutionFailed(f"the wasm worker is gone: {last.get('noise', 'it said nothing')}")
        return last

    async def _send(self, message: bytes, fds: Sequence[int]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: its last frames say why
            if fds:  # a first byte carries them
                socket.send_fds(self._socket, [message[:1]], list(fds))
            await process.write_all(self._socket.fileno(), message[1:] if fds else message)

    def figures(self) -> Usage | None:
        """Returns what all its guests have used; but memory is what the present one adds to what the worker held before
        the first. None if it is gone."""
        if self._child is None or self._condemned:
            return None
        pid = self._child.pid
        figures = procfs.of_group(self.group) if self.group else procfs.of_processes([pid, *procfs.descendants(pid)])
        if figures is None:
            return None
        rx, tx = procfs.network(self._init or pid)
        return figures._replace(memory=max(0, (figures.memory or 0) - self._resting), rx=rx, tx=tx)

    def ending(self) -> Status:
        """Says why it ended, if it did so without an answer."""
        usage = self.group.usage() if self.group else None
        return Status.OOM_KILLED if usage and usage.oom_kills else Status.KILLED

    def kill(self) -> None:
        """Kills it, without waiting for that."""
        self._condemned = True
        if self._child:
            self._child.kill()
        if self.group:
            self.group.kill()

    def abandon(self) -> None:
        """Does what `end` does, where nobody can wait for long."""
        self.kill()
        if self._child:
            self._child.reap(_REAP_SECONDS)
        self._fds.close()
        if self.group:
            self.group.destroy()

    async def gone(self) -> None:
        """Kills it, and returns when it is dead."""
        self.kill()
        if self._child:
            await self._child.wait()

    async def end(self) -> None:
        """Kills it, and removes what it leaves."""
        await self.gone()
        self._fds.close()
        if self.group:
            await anyio.to_thread.run_sync(self.group.destroy)
