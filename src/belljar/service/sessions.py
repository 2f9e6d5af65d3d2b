"""Sessions and sandboxes that callers hold open over several requests. Each lives in a task of its own, to its end."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup, TaskStatus

from belljar import audit, errors
from belljar.backends.base import Control
from belljar.engine import Listener
from belljar.models import Entry, Result
from belljar.sandbox import Cancel, Sandbox
from belljar.service.core import Service, sees
from belljar.service.records import Caller, RunRecord, SessionRecord, new_id
from belljar.service.run import Run
from belljar.session import Checkpoint, Session
from belljar.values import MIB

_CHECKPOINTS = 16  # that one session may hold
_CHECKPOINT_BYTES = 1024 * MIB  # of all of them: it is memory of ours
_TURNS = 32  # of one session that may wait
Kind = Literal["session", "sandbox"]


class Held:
    """One that is open."""

    def __init__(self, handle: Session | Sandbox, record: SessionRecord, idle: float) -> None:
        self.handle = handle
        self.record = record
        self.checkpoints: dict[str, Checkpoint] = {}
        self.over = anyio.Event()  # somebody wants it closed
        self.closed = anyio.Event()
        self.copying = anyio.Lock()
        self.grant: tuple[str | None, bool] = (None, False)  # a folder of the host, and whether it may be changed
        self._idle = idle
        self._end = record.expires
        self._busy = 0
        self.touch()

    def touch(self, turns: int = 0) -> None:
        expires = min(self._end, time.time() + self._idle)
        self.record = self.record.model_copy(update={"expires": expires, "turns": self.record.turns + turns})

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Nobody's session ends in the middle of what they do with it."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self.touch()

    async def wait_for(self, run: Run) -> None:
        """One that waits for its turn uses the session too."""
        async with self.used():
            await run.done.wait()

    async def wait_for_end(self) -> None:
        while not self.over.is_set():
            left = self._end - time.time() if self._busy else self.record.expires - time.time()
            if left <= 0:
                return
            with anyio.move_on_after(min(left, 60)):
                await self.over.wait()


class Sessions:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._held: dict[str, Held] = {}
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
            held.over.set()
        with anyio.move_on_after(0 if kind else 10, shield=True):  # who is in a hurry waits for nobody's opening
            for held in [*self._held.values()]:
                await held.closed.wait()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    # --- opening and closing ---

    async def open(self, caller: Caller, kind: Kind, *, idle: float, lifetime: float, **options: Any) -> SessionRecord:
        engine = self._service.engine
        if kind == "session":
            # Idle is judged by `Held`, to which a file that is read and a turn that waits count as use.
            handle: Session | Sandbox = Session(engine=engine, idle=lifetime, lifetime=lifetime, **options)
        else:
            handle = Sandbox(engine=engine, **options)
        grant = (options.get("workspace"), bool(options.get("write")))
        return await self._open(caller, kind, handle, idle=idle, lifetime=lifetime, grant=grant)

    async def _open(
        self, caller: Caller, kind: Kind, handle: Session | Sandbox, *, idle: float, lifetime: float,
        grant: tuple[str | None, bool],
    ) -> SessionRecord:  # fmt: skip
        if self._service.draining.is_set():
            raise errors.Busy("the service is going away", retry_after=5, status=503)
        await self._service.admission.count(caller)
        mine = sum(held.record.caller == caller.name for held in self._held.values())
        most = caller.concurrency or self._service.settings.service.concurrency
        if 0 < most <= mine or (caller.key and mine >= max(1, self._most - 1)):  # the last one is for somebody else
            raise errors.Busy(f"{mine} sessions of yours are open", retry_after=60, fix="close one")
        if len(self._held) >= self._most:
            soonest = min(held.record.expires for held in self._held.values()) - time.time()
            raise errors.Busy(
                f"there are {self._most} sessions open, which is all there may be", retry_after=max(1, soonest),
                status=503, fix="close one, or have the administrator raise service.sessions",
            )  # fmt: skip
        now = time.time()
        record = SessionRecord(
            id=new_id("bs"), kind=kind, caller=caller.name, backend="", created=now, expires=now + lifetime
        )
        held = Held(handle, record, idle)
        held.grant = grant
        self._held[record.id] = held
        self._service.admission.held = len(self._held)
        try:
            await self._tasks.start(self._live, held)
        except BaseExceptionGroup as group:
            raise _alone(group) from None
        return held.record

    async def _live(self, held: Held, *, task_status: TaskStatus[None]) -> None:
        audit.caller.set(held.record.caller)
        started = False
        try:
            with self._service.grants.given(held.grant):
                async with held.handle:
                    sandbox = held.handle._sandbox if isinstance(held.handle, Session) else held.handle
                    held.record = held.record.model_copy(update={"backend": sandbox.lease.offer.backend})
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
            held.closed.set()

    async def close(self, id: str, caller: Caller) -> None:
        held = self.get(id, caller)
        held.over.set()
        with anyio.move_on_after(10):
            await held.closed.wait()

    # --- what there is ---

    def get(self, id: str, caller: Caller) -> Held:
        held = self._held.get(id)
        if held is None or not sees(caller, held.record.caller):
            raise errors.NotFound(f"there is no open session {id[:80]!r}", fix="GET /api/sandbox/sessions lists yours")
        return held

    def of(self, caller: Caller) -> list[SessionRecord]:
        return [held.record for held in self._held.values() if sees(caller, held.record.caller)]

    # --- using one ---

    async def run(self, id: str, caller: Caller, *, code: str | None, command: list[str] | None, **options: Any) -> Run:
        """One turn, with a record and lines of its own."""
        held = self.get(id, caller)
        if (code is None) == (command is None):
            raise errors.InvalidRequest("code: give `code` or `command`, one of them")
        if command is not None and isinstance(held.handle, Session):
            raise errors.InvalidRequest("command: a session takes code", fix='open one with kind="sandbox"')
        if held._busy >= _TURNS:  # they have no place of their own to wait for, so nothing else would bound them
            raise errors.Busy("as many turns of this session wait as may", retry_after=5)
        language = str(options.get("language") or "python") if code is not None else ""
        text = code if code is not None else "\0".join(command or ())
        record = RunRecord(
            id=new_id(), caller=caller.name, instance=self._service.instance.name, created=time.time(), session=id,
            language=language, backend=held.record.backend, sha256=hashlib.sha256(text.encode()).hexdigest(),
        )  # fmt: skip
        turn = self._turn(held, code, command, {name: value for name, value in options.items() if value is not None})
        async with held.used():
            run = await self._service.take(record, caller, turn, cpus=0.0, memory=0)  # its box has its place already
        self._tasks.start_soon(held.wait_for, run)
        return run

    def _turn(
        self, held: Held, code: str | None, command: list[str] | None, options: dict[str, Any]
    ) -> Callable[[Listener, Control], Awaitable[Result]]:
        async def work(listener: Listener, control: Control) -> Result:
            cancel = Cancel()
            control.tell(lambda _: cancel.cancel())
            async with held.used():
                held.touch(turns=1)
                if isinstance(held.handle, Session):
                    options.pop("language", None)
                    return await held.handle.run(code or "", on_event=listener, cancel=cancel, **options)
                if code is not None:
                    return await held.handle.run(code, on_event=listener, cancel=cancel, **options)
                return await held.handle.exec(command or (), on_event=listener, cancel=cancel, **options)

        return work

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
            return await self._open(
                caller,
                "session",
                session.fork(copy),
                idle=held._idle,
                lifetime=held._end - held.record.created,
                grant=held.grant,
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
            await held.handle.write(path, content)

    async def read(self, id: str, caller: Caller, path: str) -> bytes:
        held = self.get(id, caller)
        async with held.used():
            try:
                return await held.handle.read(path)
            except FileNotFoundError as error:
                raise errors.NotFound(str(error), fix="list the files first") from None

    async def files(self, id: str, caller: Caller) -> tuple[Entry, ...]:
        held = self.get(id, caller)
        async with held.used():
            return await held.handle.list()


def _session(held: Held) -> Session:
    if not isinstance(held.handle, Session):
        raise errors.InvalidRequest("a sandbox has no memory to copy", fix='open one with kind="session"')
    return held.handle


def _alone(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
