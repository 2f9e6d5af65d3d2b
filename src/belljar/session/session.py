"""Stateful sessions: one interpreter across calls. Variables, imports and files stay.

The guest runs `guest/session_agent.py`; this is the host's side of the conversation. Every frame comes
from the guest, so it is parsed as hostile: capped, checked, and believed only about itself.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files as package_files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from belljar.backends.base import Backend, Copyable, Emit
from belljar.backends.control import Control
from belljar.backends.snapshot import Snapshot
from belljar.core import errors, policy
from belljar.core.plan import Command
from belljar.core.request import Limits
from belljar.core.result import Entry, EventKind, MimeBundle, Result, Status
from belljar.core.values import MIB
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease, Listener
from belljar.host import portal
from belljar.host.capture import Capture, scrub
from belljar.host.egress import DENIALS
from belljar.host.loops import lone_errors
from belljar.sandbox import Cancel, Sandbox, listening
from belljar.session import checkpoint_file

_AGENT = ".belljar/session_agent.py"  # among the read-only inputs
_FRAME_LIMIT = 32 * MIB
_RESULTS_LIMIT = 64
_GRACE = 1.0  # seconds between asking a turn to end and ending the session
_START = 20.0
_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp/matplotlib"}


class Session(portal.Twinned["SyncSession"]):
    """`with Session() as s: s.run("x = 1"); s.run("x + 1").results`; with `async with`, `await s.run(...)`.

    `idle` and `lifetime` (seconds) end a session that is forgotten. A turn over its timeout is interrupted and the
    session lives on; if it does not react, or the backend cannot interrupt it (wasm), the session is ended.

    On backends that can copy (wasm), `checkpoint`, `fork`, `rollback`, `save` and `load` go back to, branch from and
    keep what a session was: memory and files. A copy shares nothing with its original, but it starts with the same
    state of `random`, so two branches draw the same numbers until one of them calls `random.seed()`. Files that are
    open in a turn's variables are not part of a copy.
    """

    def __init__(
        self, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        idle: float = 600.0, lifetime: float = 3600.0, **options: Any,
    ) -> None:  # fmt: skip
        for name, value in (("idle", idle), ("lifetime", lifetime)):
            if not (math.isfinite(value) and value > 0):
                raise errors.InvalidRequest(f"{name}: must be a positive number of seconds (got {value!r})")
        if options.get("deterministic"):
            raise errors.InvalidRequest(
                "deterministic: a session cannot be repeated", fix="use run, with all of its code"
            )
        self._sandbox = Sandbox(backend=backend, engine=engine, id=id, **options)
        self._idle = idle
        self._lifetime = lifetime
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup
        self._talk: _Talk | None = None
        self._origin: Session | Checkpoint | Path | None = None

    async def run(
        self, code: str, *, timeout: float | None = None, on_event: Listener | None = None,
        on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """One turn. The value of a last expression and open figures are in `results`.

        Cancelling a turn under way ends the session: an interpreter cannot be stopped in the middle and trusted
        afterwards. One that waits for the turn before it is given up, and that is all.
        """
        asked = self._sandbox._asked(code=code, timeout=timeout)
        limits = policy.limits(asked.limits, self._lease.plan.limits, self._lease.engine.settings.caps)
        talk = self._conversation

        async def work(emit: Emit) -> Result:
            return await talk.turn(code, limits, emit, cancel or Cancel())

        listener = listening(on_event, on_stdout, on_stderr)
        return await self._lease.conduct(asked, work, listener=listener, id=id)

    async def checkpoint(self) -> Checkpoint:
        """What this session is now, to go back to or to branch from as often as you like."""
        box = self._copyable
        talk = self._conversation
        async with talk.between_turns():
            snapshot = await box.snapshot()
        snapshot.turns = talk.turns
        return Checkpoint(snapshot)

    def fork(self, checkpoint: Checkpoint | None = None, *, id: str = "") -> Session:
        """An independent session that goes on from a checkpoint of this one, or from how this one is when it is opened:
        `with s.fork() as branch: ...`."""
        branch = Session(engine=self._sandbox._engine, idle=self._idle, lifetime=self._lifetime)
        branch._sandbox = self._sandbox.twice(id)
        branch._origin = checkpoint or self
        return branch

    async def rollback(self, checkpoint: Checkpoint) -> None:
        """Makes this session what it was, even if a turn has ended it since."""
        box = self._copyable
        box.check(checkpoint._snapshot)
        await self._hang_up()
        await self._go_on_from(checkpoint)

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint to a file, compressed."""
        copy = await self.checkpoint()
        await anyio.to_thread.run_sync(copy.save, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Session:
        """A session that goes on from a file that `save` wrote: `with Session.load(path) as s: ...`.

        A file made by another version of the interpreter is refused. It holds what a guest left: it is run in a
        sandbox like any other code, and believed no further.
        """
        checkpoint_file.check(path)
        session = cls(**{"backend": "wasm"} | options)
        session._origin = Path(path)
        return session

    @property
    def _copyable(self) -> Copyable:
        lease = self._lease
        if not lease.capabilities.checkpoints or not isinstance(lease.box, Copyable):
            raise errors.NotAvailable(f"{lease.capabilities.backend} cannot copy a session", fix="choose backend=wasm")
        return lease.box

    async def write(self, path: str, content: bytes | str) -> None:
        await self._sandbox.write(path, content)

    async def read(self, path: str) -> bytes:
        return await self._sandbox.read(path)

    async def list(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in await self._sandbox.list() if not entry.path.startswith(".belljar"))

    @property
    def _lease(self) -> Lease:
        return self._sandbox.lease

    @property
    def _conversation(self) -> _Talk:
        if self._talk is None:
            raise errors.InvalidRequest("this session is not open", fix="use it inside `with` or `async with`")
        return self._talk

    async def __aenter__(self) -> Self:
        if self._talk is not None:
            raise errors.InvalidRequest("this session is already open", fix="make a second Session")
        try:
            await self._stack.enter_async_context(self._sandbox)
            lease = self._lease
            if "python" not in lease.capabilities.sessions:
                raise errors.NotAvailable(f"{lease.capabilities.backend} has no sessions", fix="choose backend=native")
            self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
            self._stack.push_async_callback(self._hang_up)
            if self._origin is not None:
                await self._go_on_from(await self._beginning(self._origin))
            else:
                await self._converse()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _beginning(self, origin: Session | Checkpoint | Path) -> Checkpoint:
        if isinstance(origin, Session):
            return await origin.checkpoint()
        if isinstance(origin, Checkpoint):
            return origin
        limits = self._lease.plan.limits
        return Checkpoint(
            await anyio.to_thread.run_sync(lambda: checkpoint_file.load(origin, memory=limits.memory, disk=limits.disk))
        )

    async def _go_on_from(self, checkpoint: Checkpoint) -> None:
        await self._copyable.restore(checkpoint._snapshot)
        await self._converse(checkpoint._snapshot.turns)

    async def _converse(self, turns: int = 0) -> None:
        python = self._lease.engine.languages.get("python")
        policy.check_language(python, self._lease.plan.egress, self._lease.capabilities)
        talk = _Talk(self._lease, self._sandbox._request.env, self._idle, self._lifetime, turns)
        await talk.open(self._tasks)
        self._talk = talk

    async def _hang_up(self) -> None:
        talk, self._talk = self._talk, None
        if talk:
            await talk.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with lone_errors():
            await self._stack.__aexit__(kind, error, trace)

    def twin(self) -> SyncSession:
        return SyncSession(self)


class Checkpoint:
    """What a session was at one moment. It holds memory of this process for as long as you hold it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @property
    def bytes(self) -> int:
        """How much it holds: the written pages of the memory, and the files."""
        return self._snapshot.bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        checkpoint_file.save(self._snapshot, path)

    def __repr__(self) -> str:
        return f"<Checkpoint of {self.bytes / MIB:.1f} MB>"


class SyncSession:
    """The blocking twin of an open `Session`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def checkpoint(self) -> Checkpoint:
        return portal.call(self._session.checkpoint)

    def fork(self, checkpoint: Checkpoint | None = None) -> Session:
        return self._session.fork(checkpoint)

    def rollback(self, checkpoint: Checkpoint) -> None:
        portal.call(self._session.rollback, checkpoint)

    def save(self, path: str | os.PathLike[str]) -> None:
        portal.call(self._session.save, path)

    def run(self, code: str, **options: Any) -> Result:
        return portal.call(lambda: self._session.run(code, **options))

    def write(self, path: str, content: bytes | str) -> None:
        portal.call(lambda: self._session.write(path, content))

    def read(self, path: str) -> bytes:
        return portal.call(lambda: self._session.read(path))

    def list(self) -> tuple[Entry, ...]:
        return portal.call(self._session.list)


class _Turn:
    """What has been heard of one turn so far."""

    def __init__(self, number: int, output: int, emit: Any) -> None:
        self.number = number
        self.streams = {"stdout": Capture(output), "stderr": Capture(output)}
        self.results: list[MimeBundle] = []
        self.denied: list[str] = []
        self.room = _FRAME_LIMIT  # for all results together
        self.dropped = False
        self.emit = emit
        self.verdict: dict[str, Any] | None = None
        self.over = anyio.Event()

    async def hear(self, frame: dict[str, Any], size: int = 0) -> None:
        stream, text, display = frame.get("stream"), frame.get("text"), frame.get("display")
        if isinstance(stream, str) and stream in self.streams and isinstance(text, str):
            if shown := self.streams[stream].feed(text.encode("utf-8", "replace")):
                await self.emit(stream, shown)
        elif isinstance(display, dict):
            display = scrub(display)
            self.room -= size
            if self.room < 0 or len(self.results) >= _RESULTS_LIMIT:
                self.dropped = True
                return
            self.results.append(display)
            await self.emit("display", str(display.get("text/plain", "")))
        elif "dropped" in frame:
            self.dropped = True
        elif type(frame.get("done")) is int and frame["done"] == self.number:
            self.verdict = frame
            self.over.set()

    async def deny(self, words: str) -> None:
        if len(self.denied) < DENIALS:
            self.denied.append(words)
        await self.emit("denied", words)


class _Talk:
    """The conversation with one agent: a task runs it in the box, turns go in, frames come out."""

    def __init__(self, lease: Lease, env: Any, idle: float, lifetime: float, turns: int) -> None:
        self._lease = lease
        self._env = env
        self._idle = idle
        self._lifetime = lifetime
        self._one_at_a_time = anyio.Lock()
        self.turns = turns  # of the session; a copy goes on counting, so that no turn's name is used twice
        self._closed = False
        self._turn: _Turn | None = None
        self._parts: list[str] = []  # of a line that is not whole yet
        self._size = 0
        self._ready = anyio.Event()
        self._ended: Result | None = None
        self._failure: BaseException | None = None
        self._last_used = time.monotonic()
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self._emit = lease.emitter(None, lease.box.id)
        self._feed: MemoryObjectSendStream[bytes]
        self.control: Control

    async def open(self, tasks: TaskGroup) -> None:
        """Returns when the agent has answered; the tasks are the session's, which may close us from any of its own."""
        self._feed, receive = anyio.create_memory_object_stream[bytes](8)
        self.control = Control(feed=receive)
        tasks.start_soon(self._live_and_watch, receive)
        try:
            with anyio.fail_after(_START):
                await self._ready.wait()
            if self._ended or self._failure:
                raise self._failure or errors.StartFailed(f"the session did not start: {self._last_words()}")
        except TimeoutError:
            await self.close()
            raise errors.StartFailed(f"the session did not start within {_START:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the agent, and returns when nothing of it is left."""
        self._closed = True
        self._feed.close()
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._over.wait()

    async def _live_and_watch(self, receive: MemoryObjectReceiveStream[bytes]) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_idle)
                    await self._live(receive)
                    tasks.cancel_scope.cancel()
        finally:
            self._over.set()

    async def _live(self, receive: MemoryObjectReceiveStream[bytes]) -> None:
        """Runs the agent for as long as the session lives; however it ends, nobody is left waiting."""
        source = package_files("belljar.guest").joinpath("session_agent.py").read_bytes()
        command = Command(
            argv=("python3", f"{self._lease.plan.inputs}/{_AGENT}"), env=_ENV | dict(self._env), language="python",
            files={_AGENT: source},
            limits=self._lease.plan.limits.model_copy(update={"timeout": self._lifetime}),
        )  # fmt: skip
        try:
            with receive:
                self._ended = await self._lease.box.run(command, self._hear, self.control)
        except errors.BelljarError as error:
            self._failure = error
        except Exception as error:  # whatever the guest's words did to us, the user gets a sentence
            self._failure = errors.ExecutionFailed(f"the conversation with the session broke: {error!r}")
        finally:
            self._ready.set()
            if self._turn:
                self._turn.over.set()

    async def _hear(self, kind: EventKind, text: str) -> None:
        if kind == "stderr" and self._turn:  # from before the agent took over its streams, or its own last words
            await self._turn.hear({"stream": "stderr", "text": text})
        if kind == "denied":  # to a turn, or to a thread that one left behind
            await (self._turn.deny(text) if self._turn else self._emit(kind, text))
        if kind != "stdout":
            return
        first, *lines = text.split("\n")
        self._parts.append(first)
        self._size += len(first)
        if self._size > _FRAME_LIMIT:
            self.control.stop(Status.OUTPUT_LIMIT)
            self._parts, self._size = [], 0
        if lines:
            whole, self._parts, self._size = "".join(self._parts), [lines[-1]], len(lines[-1])
            for line in (whole, *lines[:-1]):
                await self._frame(line)

    async def _frame(self, line: str) -> None:
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError):
            return  # the guest wrote into the conversation itself: noise, to be ignored
        if not isinstance(frame, dict):
            return
        if frame.get("ready"):
            self._ready.set()
        elif self._turn:
            await self._turn.hear(frame, len(line))

    async def _watch_idle(self) -> None:
        while not self._ended:
            left = self._last_used + self._idle - time.monotonic()
            if left <= 0 and self._turn is None:
                self.control.stop(Status.TIMEOUT)
                return
            await anyio.sleep(max(left, 0.05))

    @asynccontextmanager
    async def between_turns(self) -> AsyncIterator[None]:
        """While the interpreter is idle."""
        async with self._one_at_a_time:
            self._require_life()
            yield
            self._last_used = time.monotonic()

    def _require_life(self) -> None:
        if self._closed:
            raise errors.ExecutionFailed("the session was closed or rolled back meanwhile", fix="run it again")
        if self._ended or self._failure:
            raise errors.ExecutionFailed(
                f"the session has ended: {self._last_words()}", fix="open a new one", context={"ended": True}
            )

    async def turn(self, code: str, limits: Limits, emit: Emit, cancel: Cancel) -> Result:
        asked = Control()
        cancel.attach(asked)
        with anyio.CancelScope() as waiting:  # whoever gives up here is no concern of those before
            asked.on_stop(lambda _: waiting.cancel())
            await self._one_at_a_time.acquire()
        if waiting.cancelled_caught:
            told = "it was cancelled before its turn came"
            return Result(status=Status.ABORTED, container_id=self._lease.box.id, warnings=(told,))
        try:
            self._require_life()
            return await self._take_turn(code, limits, emit, asked)
        finally:
            self._one_at_a_time.release()

    async def _take_turn(self, code: str, limits: Limits, emit: Emit, asked: Control) -> Result:
        self.turns += 1
        turn = self._turn = _Turn(self.turns, limits.output, emit)
        asked.on_stop(lambda _: self.control.stop() if self._turn is turn else None)  # late, it would end the next one
        started = time.perf_counter()
        try:
            line = json.dumps({"turn": turn.number, "code": code, "timeout": limits.timeout})
            await self._feed.send(line.encode() + b"\n")
            with anyio.move_on_after(limits.timeout + _GRACE) as clock:
                await turn.over.wait()
            if clock.cancelled_caught:
                self.control.stop(Status.TIMEOUT)
                await turn.over.wait()
        except BaseException:  # a cancelled turn leaves the interpreter in the middle of something
            self.control.stop()
            raise
        finally:
            self._turn = None
            self._last_used = time.monotonic()
        return self._result(turn, (time.perf_counter() - started) * 1000)

    def _result(self, turn: _Turn, duration_ms: float) -> Result:
        out, err = turn.streams["stdout"], turn.streams["stderr"]
        cut = bool(out.cut or err.cut or turn.dropped)
        if turn.verdict is None:
            if self._failure:
                raise self._failure
            status, code = (self._ended.status, self._ended.exit_code) if self._ended else (Status.KILLED, None)
            status = Status.ERROR if status is Status.SUCCESS else status
        else:
            exit_code = turn.verdict.get("exit_code")
            code = exit_code if type(exit_code) is int and 0 <= exit_code <= 255 else 1
            status = Status.SUCCESS if turn.verdict.get("ok") is True and code == 0 else Status.ERROR
            if turn.verdict.get("timeout") is True:
                status = Status.TIMEOUT
            elif cut and status is Status.SUCCESS:
                status = Status.OUTPUT_LIMIT
        return Result(
            status=status, exit_code=code, stdout=out.text, stderr=err.text, truncated=cut,
            duration_ms=round(duration_ms, 3), results=tuple(turn.results), container_id=self._lease.box.id,
            denied=tuple(turn.denied),
        )  # fmt: skip

    def _last_words(self) -> str:
        if self._failure:
            return str(self._failure)
        return f"{self._ended.status}, exit code {self._ended.exit_code}" if self._ended else "it is closed"
