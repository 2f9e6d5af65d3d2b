"""Stateful sessions: one interpreter across calls. Variables, imports and files stay."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from belljar.backends.base import Backend, Copyable, Emit, Interpreting
from belljar.backends.snapshot import Snapshot
from belljar.core import errors, policy
from belljar.core.result import Entry, Result
from belljar.core.values import MIB
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease, Listener
from belljar.host import portal
from belljar.host.loops import lone_errors
from belljar.sandbox import Cancel, Sandbox, listening
from belljar.session import checkpoint_file
from belljar.session.conversation import Conversation

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
        self._open_conversation: Conversation | None = None
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
        conversation = self._conversation

        async def work(emit: Emit) -> Result:
            return await conversation.turn(code, limits, emit, cancel or Cancel())

        listener = listening(on_event, on_stdout, on_stderr)
        return await self._lease.conduct(asked, work, listener=listener, id=id)

    async def checkpoint(self) -> Checkpoint:
        """What this session is now, to go back to or to branch from as often as you like."""
        box = self._copyable
        conversation = self._conversation
        async with conversation.between_turns():
            snapshot = await box.snapshot()
        snapshot.turns = conversation.turns
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
        if not lease.offer.checkpoints or not isinstance(lease.box, Copyable):
            raise errors.NotAvailable(f"{lease.offer.backend} cannot copy a session", fix="choose backend=wasm")
        return lease.box

    def _interpreting(self) -> Interpreting:
        lease = self._lease
        if "python" not in lease.offer.sessions or not isinstance(lease.box, Interpreting):
            raise errors.NotAvailable(f"{lease.offer.backend} has no sessions", fix="choose backend=native")
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
    def _conversation(self) -> Conversation:
        if self._open_conversation is None:
            raise errors.InvalidRequest("this session is not open", fix="use it inside `with` or `async with`")
        return self._open_conversation

    async def __aenter__(self) -> Self:
        if self._open_conversation is not None:
            raise errors.InvalidRequest("this session is already open", fix="make a second Session")
        try:
            await self._stack.enter_async_context(self._sandbox)
            self._interpreting()
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
        policy.check_language(python, self._lease.plan.egress, self._lease.offer)
        interpreter = self._interpreting().interpreter(self._sandbox._request.env, self._lifetime)
        box = self._lease.box.id
        conversation = Conversation(interpreter, box, idle=self._idle, lifetime=self._lifetime, turns=turns)
        await conversation.open(self._tasks, self._lease.emitter(None, box))
        self._open_conversation = conversation

    async def _hang_up(self) -> None:
        conversation, self._open_conversation = self._open_conversation, None
        if conversation:
            await conversation.close()

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
