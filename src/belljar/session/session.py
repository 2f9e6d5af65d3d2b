"""Stateful sessions: one interpreter across calls. Variables, imports and files stay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, Unpack

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from belljar.backends.base import Backend, Copyable, Emit, Interpreting
from belljar.backends.snapshot import Snapshot
from belljar.backends.turn import AGENT_FOLDER
from belljar.control.callbacks import Cancel, Listener, OutputCallback, listening
from belljar.core import errors, policy
from belljar.core.options import IDLE_SECONDS, LIFETIME_SECONDS, SessionOptions, StrPath, check_seconds
from belljar.core.result import Entry, Result
from belljar.core.values import MIB
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease
from belljar.host import portal
from belljar.host.lifetime import Openable
from belljar.host.loops import lone_errors
from belljar.host.source import turn_code
from belljar.living.conversation import Conversation, named_alike
from belljar.sandbox import AsyncSandbox
from belljar.session import checkpoint_file

if TYPE_CHECKING:
    from belljar.living.network import AsyncNetwork, Network

_PYTHON = "python"


class AsyncSession(Openable):
    """One interpreter across calls: `async with AsyncSession() as s: await s.run("x = 1")`.

    It is Python's, or that of `language="javascript"` or `"bash"`, on backends that have such sessions.

    Or `s = await AsyncSession.open()` and `await s.close()`. `Session` is the same for blocking code.

    A turn over its timeout is interrupted and the session lives on; if it does not react, or the backend cannot
    interrupt it (wasm), the session is ended.

    On backends that can copy (wasm), `checkpoint`, `fork`, `rollback`, `save` and `load` go back to, branch from and
    keep what a session was: memory and files. A copy shares nothing with its original, but it starts with the same
    state of `random`, so two branches draw the same numbers until one of them calls `random.seed()`. Files that are
    open in a turn's variables are not part of a copy.
    """

    _kind: ClassVar[str] = "session"

    def __init__(
        self, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS, **options: Unpack[SessionOptions],
    ) -> None:  # fmt: skip
        """Checks what is asked for; nothing is started before it is opened.

        Args:
            backend: "auto", a backend's name, or a backend object.
            engine: an engine with settings of its own.
            id: the name under which it is recorded; a new one unless given.
            idle: seconds without a turn after which it is ended.
            lifetime: seconds after which it is ended in any case.
            **options: see `SessionOptions`.
        """
        check_seconds(idle=idle, lifetime=lifetime)
        if options.get("deterministic"):
            raise errors.InvalidRequest(
                "deterministic: a session cannot be repeated", fix="use run, with all of its code"
            )
        if "living" in options or "snapshot" in options:
            raise errors.InvalidRequest(
                "living: a session is one interpreter", fix="use Sandbox(living=True), and its interpreter()"
            )
        self._sandbox = AsyncSandbox(backend=backend, engine=engine, id=id, **options)
        self._sandbox.for_session = True
        self._idle = idle
        self._lifetime = lifetime
        self._tasks: TaskGroup
        self._open_conversation: Conversation | None = None
        self._origin: AsyncSession | Checkpoint | Path | None = None

    @classmethod
    async def open(
        cls, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS, **options: Unpack[SessionOptions],
    ) -> Self:  # fmt: skip
        """Makes a session and opens it; `close` it when you are done. Takes what the class takes."""
        return await cls(backend=backend, engine=engine, id=id, idle=idle, lifetime=lifetime, **options)

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """Runs one turn. The value of a last expression and open figures are in the result's `results`.

        Cancelling a turn under way ends the session: an interpreter cannot be stopped in the middle and trusted
        afterwards. One that waits for the turn before it is given up, and that is all.

        Args:
            code: in the session's language.
            path: a file of this machine to run instead.
            timeout: seconds for this turn.
            on_event: called with each event, in order.
            on_stdout: called with each piece of standard output.
            on_stderr: called with each piece of standard error.
            cancel: a handle that stops the turn.
            id: the name under which the turn is recorded; the session's unless given.

        Raises:
            SessionEnded: the session has ended before.
        """
        code = await turn_code(code, path)
        asked = self._sandbox._asked(code=code, timeout=timeout, language=self.language)
        limits = policy.limits(asked.limits, self._lease.plan.limits, self._lease.engine.settings.caps)
        conversation = self._conversation

        async def work(emit: Emit) -> Result:
            return await conversation.turn(code, limits, emit, cancel or Cancel())

        listener = listening(on_event, on_stdout, on_stderr)
        return await self._lease.conduct(asked, work, listener=listener, id=id)

    def interrupt(self) -> bool:
        """Interrupts the turn under way, as Ctrl-C does: it ends with status `aborted`, and the session goes on.

        A turn that does not react within three seconds ends the session.

        Returns:
            False where the backend cannot do this (wasm), or no turn is under way: nothing has happened then.
        """
        return self._conversation.interrupt()

    async def complete(self, text: str) -> tuple[str, ...]:
        """Returns the names that a half-typed one may become: those of the session, or of what is before its last dot.

        They are what the guest says, and none of its code is run to find them.

        Args:
            text: such as "os.pa"; for what is not a dotted name there are none.
        """
        return await named_alike(self._conversation, text, self._lease.plan.limits)

    @property
    def ended(self) -> str:
        """Says how the session ended, if a turn, a limit or its time has ended it; empty while it lives."""
        return self._conversation.ended

    async def checkpoint(self) -> Checkpoint:
        """Copies what this session is now, to go back to or to branch from as often as you like."""
        box = self._copyable
        conversation = self._conversation
        async with conversation.between_turns():
            snapshot = await box.snapshot()
        snapshot.turns = conversation.turns
        return Checkpoint(snapshot)

    def fork(self, checkpoint: Checkpoint | None = None, *, id: str = "") -> AsyncSession:
        """Returns an independent session that goes on from here: `async with s.fork() as branch`, or `await s.fork()`.

        Args:
            checkpoint: where it begins; unless given, with what this session is when the new one is opened.
            id: the name under which it is recorded; a new one unless given.
        """
        branch = AsyncSession(engine=self._sandbox._engine, idle=self._idle, lifetime=self._lifetime)
        branch._sandbox = self._sandbox.another(id)
        branch._origin = checkpoint or self
        return branch

    async def rollback(self, checkpoint: Checkpoint) -> None:
        """Makes this session what it was, even if a turn has ended it since."""
        box = self._copyable
        box.check(checkpoint._snapshot)
        await self._hang_up()
        await self._go_on_from(checkpoint)

    async def save(self, path: StrPath) -> None:
        """Writes a checkpoint to a file, compressed."""
        copy = await self.checkpoint()
        await anyio.to_thread.run_sync(copy.save, path)

    @classmethod
    def load(
        cls, path: StrPath, *, backend: str | Backend = "wasm", engine: Engine | None = None, id: str = "",
        idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS, **options: Unpack[SessionOptions],
    ) -> Self:  # fmt: skip
        """Returns a session that goes on from a file that `save` wrote: `async with AsyncSession.load(path) as s`.

        A file made by another version of the interpreter is refused. It holds what a guest left: it is run in a
        sandbox like any other code, and believed no further. Takes what the class takes.
        """
        checkpoint_file.check(path)
        session = cls(backend=backend, engine=engine, id=id, idle=idle, lifetime=lifetime, **options)
        session._origin = Path(path)
        return session

    @property
    def _copyable(self) -> Copyable:
        lease = self._lease
        if not lease.capabilities.checkpoints or not isinstance(lease.box, Copyable):
            raise errors.NotAvailable(f"{lease.capabilities.backend} cannot copy a session", fix="choose backend=wasm")
        return lease.box

    def _interpreting(self) -> Interpreting:
        lease = self._lease
        if self.language not in lease.capabilities.sessions or not isinstance(lease.box, Interpreting):
            what = f"{lease.capabilities.backend} has no sessions of {self.language}"
            raise errors.NotAvailable(what, fix="choose backend=native")
        return lease.box

    async def write(self, path: str, content: bytes | str) -> None:
        """Writes a file of the session, text or bytes, by its name below /workspace."""
        await self._sandbox.write(path, content)

    async def read(self, path: str) -> bytes:
        """Returns the content of a file of the session, or raises the OSError that its code would get."""
        return await self._sandbox.read(path)

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file as `read` does, for one that is too large to be held: see `AsyncSandbox.reading`."""
        return self._sandbox.reading(path)

    async def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        return tuple(
            entry for entry in await self._sandbox.list() if not f"{entry.path}/".startswith(f"{AGENT_FOLDER}/")
        )

    @property
    def network(self) -> AsyncNetwork:
        """What its code may reach, told and changed at once: `await session.network.allow("example.org")`."""
        from belljar.living.network import AsyncNetwork

        return AsyncNetwork(self._lease.change_network)

    @property
    def _lease(self) -> Lease:
        return self._sandbox.lease

    @property
    def language(self) -> str:
        """The language of its turns."""
        return self._sandbox._engine.languages.get(self._sandbox._request.language).name

    @property
    def _conversation(self) -> Conversation:
        if self._open_conversation is None:
            raise errors.InvalidRequest("this session is not open", fix="use it in a `with` block, or .open() it")
        return self._open_conversation

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        with lone_errors():
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._sandbox)
                self._interpreting()
                self._tasks = await stack.enter_async_context(anyio.create_task_group())
                stack.push_async_callback(self._hang_up)
                if self._origin is not None:
                    await self._go_on_from(await self._beginning(self._origin))
                else:
                    await self._converse()
                yield

    async def _beginning(self, origin: AsyncSession | Checkpoint | Path) -> Checkpoint:
        if isinstance(origin, AsyncSession):
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
        engine, plan = self._lease.engine, self._lease.plan
        policy.check_language(engine.languages.get(self.language), plan.egress, self._lease.capabilities)
        if self.language != _PYTHON and not plan.image:
            await engine.require_language(self.language, self._lease.capabilities.backend)
        env = {**self._lease.usual_env, **self._sandbox._request.env}
        interpreter = self._interpreting().interpreter(env, self._lifetime, self.language)
        box = self._lease.box.id
        conversation = Conversation(interpreter, box, idle=self._idle, lifetime=self._lifetime, turns=turns)
        await conversation.open(self._tasks, self._lease.emitter(None, box))
        self._open_conversation = conversation

    async def _hang_up(self) -> None:
        conversation, self._open_conversation = self._open_conversation, None
        if conversation:
            await conversation.close()


class Checkpoint:
    """What a session was at one moment. It holds memory of this process for as long as you hold it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @property
    def bytes(self) -> int:
        """How much it holds: the written pages of the memory, and the files."""
        return self._snapshot.bytes

    def save(self, path: StrPath) -> None:
        """Writes it to a file, compressed; `Session.load` goes on from there."""
        checkpoint_file.save(self._snapshot, path)

    def __repr__(self) -> str:
        return f"<Checkpoint of {self.bytes / MIB:.1f} MB>"


class Session(portal.Blocking[AsyncSession]):
    """One interpreter across calls: `with Session() as s: s.run("x = 1"); s.run("x + 1").results`.

    Or `s = Session.open()` and `s.close()`. What holds for turns and copies is told at `AsyncSession`.
    """

    def __init__(
        self, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS, **options: Unpack[SessionOptions],
    ) -> None:  # fmt: skip
        """Checks what is asked for; nothing is started before it is opened.

        Args:
            backend: "auto", a backend's name, or a backend object.
            engine: an engine with settings of its own.
            id: the name under which it is recorded; a new one unless given.
            idle: seconds without a turn after which it is ended.
            lifetime: seconds after which it is ended in any case.
            **options: see `SessionOptions`.
        """
        super().__init__(
            AsyncSession(backend=backend, engine=engine, id=id, idle=idle, lifetime=lifetime, **options)
        )  # fmt: skip

    @classmethod
    def open(
        cls, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS, **options: Unpack[SessionOptions],
    ) -> Self:  # fmt: skip
        """Makes a session and opens it; `close` it when you are done. Takes what the class takes."""
        return cls(backend=backend, engine=engine, id=id, idle=idle, lifetime=lifetime, **options)._open()

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """Runs one turn: see `AsyncSession.run`. Callbacks are called from another thread."""
        return portal.call(
            lambda: self._core.run(
                code, path=path, timeout=timeout, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr,
                cancel=cancel, id=id,
            )
        )  # fmt: skip

    def interrupt(self) -> bool:
        """Interrupts the turn under way, from another thread: see `AsyncSession.interrupt`."""

        async def interrupt() -> bool:
            return self._core.interrupt()

        return portal.call(interrupt)

    def complete(self, text: str) -> tuple[str, ...]:
        """Returns the names that a half-typed one may become: see `AsyncSession.complete`."""
        return portal.call(self._core.complete, text)

    @property
    def network(self) -> Network:
        """What its code may reach, told and changed at once: `session.network.allow("example.org")`."""
        from belljar.living.network import Network

        return Network(self._core.network)

    @property
    def ended(self) -> str:
        """Says how the session ended, if a turn, a limit or its time has ended it; empty while it lives."""
        return self._core.ended

    @property
    def language(self) -> str:
        """The language of its turns."""
        return self._core.language

    def checkpoint(self) -> Checkpoint:
        """Copies what this session is now, to go back to or to branch from as often as you like."""
        return portal.call(self._core.checkpoint)

    def fork(self, checkpoint: Checkpoint | None = None, *, id: str = "") -> Self:
        """Opens an independent session that goes on from here: `with s.fork() as branch`, or `close` it later.

        Args:
            checkpoint: where it begins; unless given, with what this session is now.
            id: the name under which it is recorded; a new one unless given.
        """
        return self._of(self._core.fork(checkpoint, id=id))._open()

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Makes this session what it was, even if a turn has ended it since."""
        portal.call(self._core.rollback, checkpoint)

    def save(self, path: StrPath) -> None:
        """Writes a checkpoint to a file, compressed."""
        portal.call(self._core.save, path)

    @classmethod
    def load(
        cls, path: StrPath, *, backend: str | Backend = "wasm", engine: Engine | None = None, id: str = "",
        idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS, **options: Unpack[SessionOptions],
    ) -> Self:  # fmt: skip
        """Opens a session that goes on from a file that `save` wrote: see `AsyncSession.load`."""
        core = AsyncSession.load(
            path, backend=backend, engine=engine, id=id, idle=idle, lifetime=lifetime, **options
        )  # fmt: skip
        return cls._of(core)._open()

    def write(self, path: str, content: bytes | str) -> None:
        """Writes a file of the session, text or bytes, by its name below /workspace."""
        portal.call(self._core.write, path, content)

    def read(self, path: str) -> bytes:
        """Returns the content of a file of the session, or raises the OSError that its guest would get."""
        return portal.call(self._core.read, path)

    def reading(self, path: str) -> AbstractContextManager[Iterator[bytes]]:
        """Opens a file as `read` does, for one that is too large to be held: `with box.reading("big") as pieces`."""
        return portal.reading(self._core.reading(path))

    def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        return portal.call(self._core.list)
