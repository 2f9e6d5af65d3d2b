"""Sessions and sandboxes that callers hold open over several requests. Each lives in a task of its own, to its end."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from belljar.control.callbacks import Cancel, Listener
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.options import request
from belljar.core.result import Entry, Result
from belljar.core.values import MIB
from belljar.engine import audit
from belljar.protocol import file_errors
from belljar.protocol.records import Caller, RunRecord, SessionRecord, new_id, now
from belljar.sandbox import AsyncSandbox
from belljar.service import projects
from belljar.service.claims import SessionClaims
from belljar.service.queries import sees
from belljar.service.run_lifecycle import Demand, Run
from belljar.service.service import Service
from belljar.service.store.statements import Claim
from belljar.session.session import AsyncSession, Checkpoint

_CHECKPOINTS = 16  # that one session may hold
_CHECKPOINT_BYTES = 1024 * MIB  # of all of them: it is memory of ours
_TURNS = 32  # of one session that may wait
Kind = Literal["session", "sandbox"]
Grant = tuple[str | None, bool]  # a folder of the host, and whether it may be changed
NO_GRANT: Grant = (None, False)


class Held:
    """One that is open."""

    def __init__(
        self, handle: AsyncSession | AsyncSandbox, record: SessionRecord, idle: float, grant: Grant, memory: int = 0
    ) -> None:
        """`memory`: bytes that its sandbox may take."""
        self.handle = handle
        self.memory = memory
        self.record: SessionRecord = record
        self.idle = idle
        self.lifetime: float = record.expires - record.created
        self.grant = grant
        self.environment: str | None = None  # a Python environment that it is granted, too
        self.checkpoints: dict[str, Checkpoint] = {}
        self.over: anyio.Event = anyio.Event()  # somebody wants it closed
        self.closed: anyio.Event = anyio.Event()
        self.reason: str = ""  # why it is to end, where somebody wants that
        self.copying: anyio.Lock = anyio.Lock()
        self.busy: int = 0
        self._end = anyio.current_time() + min(self.lifetime, record.expires - time.time())
        self._life = anyio.CancelScope()
        self.touch()

    def touch(self, turns: int = 0) -> None:
        """It is told when it ends by the clock on the wall, which may be set; it ends by one that may not."""
        now = anyio.current_time()
        left = min(self._end - now, self.idle)
        self._life.deadline = self._end if self.busy else now + left
        self.record = self.record.model_copy(update={"expires": time.time() + left, "turns": self.record.turns + turns})

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Nobody's session ends in the middle of what they do with it."""
        self.busy += 1
        self.touch()
        try:
            yield
        finally:
            self.busy -= 1
            self.touch()

    async def wait_for(self, run: Run) -> None:
        """One that waits for its turn uses the session too."""
        async with self.used():
            await run.done.wait()

    async def wait_for_end(self) -> None:
        with self._life:
            await self.over.wait()

    def leave(self) -> None:
        """Is called when the service is about to end, before that is ended with it."""

    async def settle(self) -> None:
        """Is called when nothing of it is left."""


class Sessions:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._held: dict[str, Held] = {}
        self.claims: SessionClaims = SessionClaims(self._held.__contains__)
        self._tasks: TaskGroup
        settings = service.settings
        self._most = settings.service.sessions or max(1, settings.max_containers // 2)

    async def __aenter__(self) -> Sessions:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._service.metrics.show("sessions", lambda: len(self._held))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for held in self._held.values():
            held.reason = held.reason or "the service ended"
            held.leave()
            held.over.set()
        with anyio.move_on_after(0 if kind else 10, shield=True):  # who is in a hurry waits for nobody's opening
            for held in [*self._held.values()]:
                await held.closed.wait()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    # --- opening and closing ---

    async def open(self, caller: Caller, kind: Kind, *, idle: float, lifetime: float, **options: Any) -> SessionRecord:
        wanted = await self._service.check(request(**options), caller)
        folder = wanted.workspace
        record = _record(caller, kind, lifetime)
        asked = options | {"engine": self._service.engine, "id": record.id, "workspace": folder}
        asked["packages"] = wanted.packages
        if kind == "session":
            # Idle is judged by `Held`, to which a file that is read and a turn that waits count as use.
            handle: AsyncSession | AsyncSandbox = AsyncSession(idle=lifetime, lifetime=lifetime, **asked)
        else:
            handle = AsyncSandbox(**asked)
        grant = (folder.path, folder.write) if folder else NO_GRANT
        held = Held(handle, record, idle, grant, self._service.demand(wanted, kept=True).memory)
        held.environment = wanted.packages if isinstance(wanted.packages, str) else None
        return await self.hold(caller, held)

    async def hold(self, caller: Caller, held: Held) -> SessionRecord:
        """Opens one and keeps it, if there is a place for it; returns when it is open."""
        return await self._hold(held, caller)

    async def take_over(self, held: Held) -> None:
        """Keeps one that an earlier server had, if there is a place for it."""
        await self._hold(held, None)

    async def _hold(self, held: Held, caller: Caller | None) -> SessionRecord:
        try:
            if caller is not None:
                await self._admit(caller, held.memory)
            else:
                self._make_place(held.memory)
            self._held[held.record.id] = held
            self._service.admission.held = len(self._held)
            await self._tasks.start(self._live, held)
        except BaseExceptionGroup as group:
            raise _alone(group) from None
        except errors.Busy as refusal:
            await self._service.refusals.record(refusal, run=held.record.id)
            raise
        except errors.PolicyDenied as refusal:  # by the engine, which has recorded it
            self._service.refusals.count(refusal)
            raise
        return held.record

    async def _admit(self, caller: Caller, memory: int) -> None:
        if self._service.drain.draining.is_set():
            raise errors.Busy("the service is going away", retry_after=5, status=503)
        await self._service.admission.count(caller)
        mine = sum(held.record.caller == caller.name for held in self._held.values())
        most = caller.concurrency or self._service.settings.service.concurrency
        if 0 < most <= mine or (caller.key and mine >= max(1, self._most - 1)):  # the last one is for somebody else
            raise errors.Busy(f"{mine} sessions of yours are open", retry_after=60, fix="close one")
        self._make_place(memory)

    def _make_place(self, memory: int) -> None:
        if len(self._held) >= self._most:
            soonest = min(held.record.expires for held in self._held.values()) - time.time()
            raise errors.Busy(
                f"there are {self._most} sessions open, which is all there may be", retry_after=max(1, soonest),
                status=503, fix="close one, or have the administrator raise service.sessions",
            )  # fmt: skip
        self._service.admission.keep(memory)

    async def _live(self, held: Held, *, task_status: TaskStatus[None]) -> None:
        audit.caller.set(held.record.caller)
        started = False
        try:
            with self._service.grants.given((held.environment, False), held.grant):
                async with held.handle:
                    sandbox = held.handle._sandbox if isinstance(held.handle, AsyncSession) else held.handle
                    held.record = held.record.model_copy(update={"backend": sandbox.lease.capabilities.backend})
                    held.touch()
                    started = True
                    task_status.started()
                    await held.wait_for_end()
        except Exception:
            if not started:
                raise
            logging.getLogger("belljar").exception("session %s", held.record.id)  # its end, and nobody else's
        finally:
            self._held.pop(held.record.id, None)
            self._service.admission.held = len(self._held)
            held.checkpoints.clear()
            await held.settle()
            held.closed.set()

    async def close(self, id: str, caller: Caller) -> None:
        held = self.get(id, caller)
        held.over.set()
        with anyio.move_on_after(10):
            await held.closed.wait()

    # --- what there is ---

    def get(self, id: str, caller: Caller) -> Held:
        if not self.holds(id, caller):
            raise errors.NotFound(f"there is no open session {id[:80]!r}", fix="GET /api/sandbox/sessions lists yours")
        return self._held[id]

    def holds(self, id: str, caller: Caller) -> bool:
        return id in self._held and sees(caller, self._held[id].record.caller)

    def find(self, id: str, caller: Caller) -> Held | None:
        """Returns one that this caller may know of; None: there is none."""
        return self._held[id] if self.holds(id, caller) else None

    def lives(self, id: str) -> Held | None:
        """Returns one that is open, whoever asks: for whom a name of it was signed."""
        return self._held.get(id)

    def all(self, caller: Caller) -> list[Held]:
        """Returns all that this caller may know of."""
        return [held for held in self._held.values() if sees(caller, held.record.caller)]

    def of(self, caller: Caller) -> list[SessionRecord]:
        return [held.record for held in self.all(caller)]

    # --- using one ---

    async def run(
        self, id: str, caller: Caller, *, code: str | None, command: list[str] | None, path: str | None = None,
        key: str = "", **options: Any,
    ) -> Run:  # fmt: skip
        """Starts one turn, with a record and lines of its own.

        Args:
            id: Of the session.
            caller: Who asks.
            code: What to run.
            command: A command to run instead, in a sandbox.
            path: A file to run instead, below the folder that the session was opened with.
            key: An idempotency key: the same turn with the same key is run once.
            **options: Of `AsyncSession.run`, `AsyncSandbox.run` or `AsyncSandbox.exec`. None: not given.

        Raises:
            InvalidRequest: There is not one thing to run, or the file cannot be read.
        """
        if [code, command, path].count(None) != 2:
            raise errors.InvalidRequest("code: give `code`, `command` or `path`, one of them")
        options = {name: value for name, value in options.items() if value is not None}
        turn, name = _TurnWork(code, command, path, options), new_id()

        async def take(claim: Claim | None) -> Run:
            held = self.get(id, caller)
            return await self._take(name, held, caller, await self._with_code(held, turn), claim)

        return await self._service.repeats.once(caller, key, turn.fingerprint(id) if key else "", name, take)

    async def _with_code(self, held: Held, turn: _TurnWork) -> _TurnWork:
        """Returns a turn with the code of the file that it names."""
        if turn.path is None:
            return turn
        folder, _ = held.grant
        if folder is None:
            raise errors.InvalidRequest(
                "path: is a file below project_path, and this was opened without one", fix="send the code itself"
            )
        code = await anyio.to_thread.run_sync(projects.read_code, folder, turn.path)
        if isinstance(held.handle, AsyncSession) or "language" in turn.options:
            return turn._replace(code=code)
        language = self._service.engine.languages.of_file(turn.path).name
        return turn._replace(code=code, options=turn.options | {"language": language})

    async def _take(self, name: str, held: Held, caller: Caller, turn: _TurnWork, claim: Claim | None) -> Run:
        if turn.command is not None and isinstance(held.handle, AsyncSession):
            raise errors.InvalidRequest("command: a session takes code", fix='open one with kind="sandbox"')
        if turn.options.get("args") and isinstance(held.handle, AsyncSession):
            raise errors.InvalidRequest("args: a session's turns have none", fix="put them into a variable")
        if isinstance(held.handle, AsyncSession):
            turn = turn._replace(options=turn.options | {"language": held.handle.language})
        if held.busy >= _TURNS:  # they have no place of their own to wait for, so nothing else would bound them
            raise errors.Busy("as many turns of this session wait as may", retry_after=5)
        record = RunRecord(
            id=name, caller=caller.name, instance=self._service.instance.name, created=now(),
            session=held.record.id, language=turn.language, backend=held.record.backend, sha256=turn.sha256,
        )  # fmt: skip

        async def work(listener: Listener, control: Control) -> Result:
            cancel = Cancel()
            control.on_stop(lambda _: cancel.cancel())
            async with held.used():
                held.touch(turns=1)
                return await turn.carry_out(held.handle, on_event=listener, cancel=cancel, id=name)

        async with held.used():
            demand = Demand()  # its box has its place already
            run = await self._service.lifecycle.start(record, caller, work, demand, claim)
        self._tasks.start_soon(held.wait_for, run)
        return run

    async def checkpoint(self, id: str, caller: Caller) -> tuple[str, int]:
        held = self.get(id, caller)
        async with held.used(), held.copying:  # one after the other: they are counted
            kept = sum(copy.bytes for copy in held.checkpoints.values())
            if len(held.checkpoints) >= _CHECKPOINTS or kept >= _CHECKPOINT_BYTES:
                raise errors.Busy("this session holds all the checkpoints that it may", retry_after=60)
            copy = await _session(held).checkpoint()
            if held.closed.is_set():
                raise errors.NotFound(f"the session {id[:80]!r} was closed meanwhile")
            held.checkpoints[name := new_id("cp")] = copy
        return name, copy.bytes

    async def fork(self, id: str, caller: Caller, checkpoint: str | None) -> SessionRecord:
        held = self.get(id, caller)
        copy = self._checkpoint(held, checkpoint) if checkpoint else None
        async with held.used():
            session = _session(held)
            copy = copy or await session.checkpoint()
            record = _record(caller, "session", held.lifetime)
            return await self.hold(
                caller, Held(session.fork(copy, id=record.id), record, held.idle, held.grant, held.memory)
            )

    async def rollback(self, id: str, caller: Caller, checkpoint: str) -> None:
        held = self.get(id, caller)
        async with held.used():
            await _session(held).rollback(self._checkpoint(held, checkpoint))

    def _checkpoint(self, held: Held, name: str) -> Checkpoint:
        if name not in held.checkpoints:
            raise errors.NotFound(f"there is no checkpoint {name[:80]!r} of this session")
        return held.checkpoints[name]

    # --- files ---

    async def write(self, id: str, caller: Caller, path: str, content: bytes) -> None:
        held = self.get(id, caller)
        async with held.used():
            with file_errors.refused(path):
                await held.handle.write(path, content)

    @asynccontextmanager
    async def reading(self, id: str, caller: Caller, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """A file's content piece by piece; it is opened before the first one is asked for."""
        held = self.get(id, caller)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(held.used())
            with file_errors.refused(path):
                pieces = await stack.enter_async_context(held.handle.reading(path))
            yield pieces

    async def files(self, id: str, caller: Caller) -> tuple[Entry, ...]:
        held = self.get(id, caller)
        async with held.used():
            return await held.handle.list()


class _TurnWork(NamedTuple):
    code: str | None
    command: list[str] | None
    path: str | None
    options: dict[str, Any]

    @property
    def language(self) -> str:
        return str(self.options.get("language", "python")) if self.code is not None else ""

    @property
    def sha256(self) -> str:
        text = self.code if self.code is not None else "\0".join(self.command or ())
        return hashlib.sha256(text.encode()).hexdigest()

    def fingerprint(self, session: str) -> str:
        asked = repr((session, self.code, self.command, self.path, sorted(self.options.items())))
        return hashlib.sha256(asked.encode()).hexdigest()

    async def carry_out(self, handle: AsyncSession | AsyncSandbox, **rest: Any) -> Result:
        if self.code is None:
            assert isinstance(handle, AsyncSandbox)
            return await handle.exec(self.command or (), **self.options, **rest)
        options = {**self.options}
        if isinstance(handle, AsyncSession):
            options.pop("language", None)
        return await handle.run(self.code, **options, **rest)


def _record(caller: Caller, kind: Kind, lifetime: float) -> SessionRecord:
    began = now()
    return SessionRecord(
        id=new_id("bs"), kind=kind, caller=caller.name, backend="", created=began, expires=began + lifetime
    )


def _session(held: Held) -> AsyncSession:
    if not isinstance(held.handle, AsyncSession):
        raise errors.InvalidRequest("a sandbox has no memory to copy", fix='open one with kind="session"')
    return held.handle


def _alone(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
