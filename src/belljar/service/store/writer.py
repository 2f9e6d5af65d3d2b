"""One writer for all: whatever waits goes into one transaction, so that a hundred callers pay for one commit.

A `Write` is waited for, and its caller learns whether it was committed. Where nothing else waits, it is committed
inline, if the database can do that; otherwise the writer's task takes it with all others that wait. What `add` takes is
not waited for: it lies in a bounded `Buffer` until the writer has time, or until the run it belongs to ends, whose last
change takes it along.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus
from sqlalchemy import Connection

from belljar.core import errors
from belljar.core.values import KIB, MIB
from belljar.protocol.records import FINAL
from belljar.service.store import statements
from belljar.service.store.buffer import EVERYTHING, OBJECT_BYTES, SHARE, Buffer
from belljar.service.store.database import Committed, Database, Trouble
from belljar.service.store.statements import Claim, Item, KeyOwner

PATIENCE = 5.0  # seconds that a caller waits for a database that is not there
_GATHER_SECONDS = 0.05  # that lines are gathered for one transaction
_STALE_SECONDS = 0.25  # that they wait at most, however many writes come between
_RETRY_SECONDS = 1.0
_MAX_WRITES = 500  # of one transaction
_MAX_ITEMS = 250  # of one transaction: ten milliseconds
_INLINE_BYTES = 64 * KIB  # of a change that is written inline, where everybody else waits for it


@dataclass(frozen=True, slots=True)
class Write:
    """Something to be written. `work` may be run more than once, if a commit fails.

    Attributes:
        work: Puts it into the transaction of a connection, and returns what the caller gets.
        row: Of a run that begins; many are one statement.
        claim: The idempotency key that it came with: if that is another run's, the row is not written.
        run: The run that ends with this write, whose buffered items go along.
        bytes: Of a change, which stays due even when its caller was told no. Others have none.
        quick: It takes so little time that everybody can wait for it.
        heavy: It takes so much time that it gets a transaction of its own, and those that do not go first.
    """

    work: Callable[[Connection], Any] | None = None
    row: dict[str, Any] | None = None
    claim: Claim | None = None
    run: str = ""
    bytes: int = 0
    quick: bool = False
    heavy: bool = False

    @property
    def is_mark(self) -> bool:
        """It writes nothing itself: its caller waits for what was handed over before."""
        return self.work is None and self.row is None


class _Wait(Enum):
    """Who waits for a pending write."""

    CALLER = "its caller"
    NOBODY = "its caller has left"
    OWED = "its caller was told no, and it has to be done even so"


class _Tried(Enum):
    """What came of earlier attempts at a pending write."""

    NEVER = "there was none"
    FAILED = "it was not committed"
    UNSURE = "it may have been committed, although we were not told"


class _Pending:
    """A write in the queue, and how it goes with it."""

    def __init__(self, write: Write, patience: float = PATIENCE, wait: _Wait = _Wait.CALLER) -> None:
        self.write = write
        self.wait = wait
        self.tried = _Tried.NEVER
        self.deadline = time.monotonic() + patience
        self.is_done = False
        self._done: anyio.Event | None = None  # somebody waits for it
        self.value: Any = None
        self.error: errors.BelljarError | None = None

    @property
    def is_patient(self) -> bool:
        """Whether its caller waits for as long as it takes."""
        return self.wait is _Wait.CALLER and self.deadline == math.inf

    def finish(self, value: Any = None, error: errors.BelljarError | None = None) -> None:
        self.value, self.error, self.is_done = value, error, True
        if self._done is not None:
            self._done.set()

    async def finished(self) -> None:
        """Waits until it is committed or refused."""
        if not self.is_done:
            self._done = anyio.Event()
            await self._done.wait()


class Writer:
    """Commits what `ask` and `add` take while `run` runs: short writes first, and each kind in the order it came."""

    def __init__(self, database: Database, *, outbox: bool, buffer: Buffer, owed_bytes: int = 64 * MIB) -> None:
        self.buffer = buffer
        self._problem: errors.BelljarError | None = None
        self._database, self._outbox = database, outbox
        self._waiting: deque[_Pending] = deque()
        self._news = anyio.Event()
        self._looks_at = math.inf  # when its task looks again by itself
        self._busy = False
        self._short_turn = False  # the last transaction was one of short writes
        self._owed_room = owed_bytes
        self._pause = 0.0  # seconds before the next try, while the database is not there
        self._scope: anyio.CancelScope | None = None

    @property
    def status(self) -> str:
        """What is wrong with the database; empty when all is well."""
        return self._problem.message if self._problem else ""

    # --- the side of the callers

    async def begin(self, row: dict[str, Any], claim: Claim | None = None) -> KeyOwner:
        """Records a run that begins, unless its key is another run's; returns when that is committed."""
        owner: KeyOwner = await self.ask(Write(row=row, claim=claim, quick=True))
        return owner

    async def change(self, id: str, values: dict[str, Any], patience: float = PATIENCE) -> bool:
        """Changes a run; False if there is none. The last change of a run takes its lines along."""
        return bool(await self.ask(self._change(id, values), patience))

    def _change(self, id: str, values: dict[str, Any]) -> Write:
        size = OBJECT_BYTES + len(values.get("result") or "") + len(values.get("problem") or "")
        work = partial(statements.change_run, id=id, values=values, outbox=self._outbox)
        run = id if values.get("state") in FINAL else ""
        return Write(work, run=run, bytes=size, quick=size <= _INLINE_BYTES)

    async def ask(self, write: Write, patience: float = PATIENCE) -> Any:
        """Returns the write's value when it is committed, or raises what was in the way.

        With infinite patience nothing is in the way but the write itself: it is tried until it is committed.
        """
        if write.quick and (committed := self._write_inline(write)) is not None:
            return committed.value
        pending = _Pending(write, patience)
        self._enqueue(pending)
        try:
            with anyio.move_on_after(patience):
                await pending.finished()
        except BaseException:  # cancelled: what it began must not stay open in the records for ever
            self._abandon(pending)
            raise
        if not pending.is_done:
            pending.error = self._late(pending, patience)
        if pending.error is not None:
            raise pending.error
        return pending.value

    def _write_inline(self, write: Write) -> Committed[Any] | None:
        """Only where nothing waits, which this might overtake, and nothing is known to be wrong."""
        if self._busy or self._waiting or self._problem:
            return None
        items = self.buffer.take_run(write.run) if write.run else []
        committed = None
        if len(items) <= SHARE:
            work = partial(_apply, writes=[_Pending(write)], items=items, outbox=self._outbox)
            committed = self._database.write_inline(work)
        if committed is None:
            self.buffer.give_back(items)
            return None
        return Committed(committed.value[0])

    def _enqueue(self, pending: _Pending) -> None:
        self._waiting.append(pending)
        self._news.set()

    def _late(self, pending: _Pending, patience: float) -> errors.BelljarError:
        late = errors.NotAvailable(
            f"records cannot be written: no answer within {patience:g} s", fix=f"see what keeps {self._database.where}"
        )
        problem = self._problem or late
        pending.wait = _Wait.NOBODY
        if pending in self._waiting:
            self._refuse(pending, problem)
        return problem  # else it is under way, and `_commit` sees that nobody waits

    def _abandon(self, pending: _Pending) -> None:
        pending.wait = _Wait.NOBODY
        row = pending.write.row
        if row is None:  # a change or a claim is good without its caller
            return
        if pending in self._waiting and pending.tried is not _Tried.UNSURE:
            self._waiting.remove(pending)
        elif pending.is_done and pending.error is None:
            self._disown(row)

    def add(self, items: Iterable[Item]) -> None:
        """Takes items that nobody waits for."""
        for item in items:
            self.buffer.put(item)
        if self._looks_at > self.buffer.since + _GATHER_SECONDS or self.buffer.count >= _MAX_ITEMS:
            self._news.set()

    async def flush(self, id: str, seconds: float) -> None:
        """Returns when all that was handed over until now, of a run or of all, is committed, or raises."""
        if self._busy or self._waiting or self.buffer.count:
            await self.ask(Write(run=id), seconds)

    def stop(self) -> None:
        """Ends `run`."""
        if self._scope is not None:
            self._scope.cancel()

    # --- the writer's own task

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Commits what waits, until `stop` is called."""
        with anyio.CancelScope(shield=True) as self._scope:  # what was handed over is written, whoever is cancelled
            task_status.started()
            while True:
                await self._await_work()
                writes, items = self._take()
                if self.status and not writes and not items:
                    writes = [_Pending(Write(_touch))]
                if items or any(not pending.write.is_mark for pending in writes):
                    self._busy = True
                    await self._commit(writes, items)
                    self._busy = False
                else:
                    for mark in writes:  # of what was committed before
                        mark.finish()

    async def _await_work(self) -> None:
        """Until somebody waits, there is a batch of lines, or those that there are have waited long enough."""
        if self._pause:
            await anyio.sleep(self._pause)
        begun = time.monotonic()
        while not self._urgent():
            gathered = self.buffer.since + _GATHER_SECONDS if self.buffer.count else math.inf
            until = begun + _RETRY_SECONDS if self.status else gathered
            if (left := until - time.monotonic()) <= 0:
                return
            self._news, self._looks_at = anyio.Event(), until
            with anyio.move_on_after(left):
                await self._news.wait()

    def _urgent(self) -> bool:
        if any(pending.wait is not _Wait.OWED for pending in self._waiting) or (self._waiting and not self.status):
            return True
        return not self.status and self.buffer.count >= _MAX_ITEMS

    def _take(self) -> tuple[list[_Pending], list[Item]]:
        """Takes what goes into the next transaction: short writes together, or one that is long, in turns.

        So a run that begins waits for one part of a large result, or for some lines of a flood, and for no more.
        """
        is_stale = self.buffer.count > 0 and time.monotonic() - self.buffer.since > _STALE_SECONDS
        short = [pending for pending in self._waiting if not self._is_long(pending.write)]
        others_wait = is_stale or len(short) < len(self._waiting)
        self._short_turn = bool(short) and not (self._short_turn and others_wait)
        return self._take_short(short[:_MAX_WRITES]) if self._short_turn else self._take_long(is_stale)

    def _is_long(self, write: Write) -> bool:
        return write.heavy or write.run == EVERYTHING or self.buffer.count_of(write.run) > SHARE

    def _take_short(self, writes: list[_Pending]) -> tuple[list[_Pending], list[Item]]:
        taken = set(writes)
        self._waiting = deque(pending for pending in self._waiting if pending not in taken)
        return writes, [item for pending in writes for item in self.buffer.take_run(pending.write.run)]

    def _take_long(self, is_stale: bool) -> tuple[list[_Pending], list[Item]]:
        """Takes the first long one, or of the lines that go before it as many as one transaction may have."""
        first = next((pending for pending in self._waiting if self._is_long(pending.write)), None)
        writes, items = list[_Pending](), list[Item]()
        if first:
            run = first.write.run
            items = self.buffer.take_run(run) if run == EVERYTHING else self.buffer.take_first(run, _MAX_ITEMS)
            if not self.buffer.count_of(run):
                self._waiting.remove(first)
                writes = [first]
        if not first or is_stale:
            items += self.buffer.take(_MAX_ITEMS)
        return writes, items

    async def _commit(self, writes: list[_Pending], items: list[Item]) -> None:
        applied = False

        def apply(connection: Connection) -> list[Any]:
            nonlocal applied
            values = _apply(connection, writes, items, self._outbox)
            applied = True
            return values

        try:
            values = await self._database.write(apply)
        except Exception as error:
            await self._recover(error, writes, items, applied)
            return
        self._problem, self._pause = None, 0.0
        for pending, value in zip(writes, values, strict=True):
            if pending.wait is _Wait.NOBODY and pending.write.row is not None:
                self._disown(pending.write.row)
            self._settle(pending, value)

    async def _recover(self, error: Exception, writes: list[_Pending], items: list[Item], applied: bool) -> None:
        trouble, problem = self._database.judge(error), self._database.explain(error)
        if trouble is Trouble.WRONG:
            await self._commit_apart(problem, writes, items)
            return
        self._problem = problem
        self.buffer.give_back(items)
        self._waiting.extendleft(reversed(writes))
        for pending in writes:
            if applied and trouble is Trouble.DOWN:
                pending.tried = _Tried.UNSURE
            elif pending.tried is _Tried.NEVER:
                pending.tried = _Tried.FAILED
        now = time.monotonic()
        for pending in list(self._waiting):
            gone = pending.wait is _Wait.NOBODY or now >= pending.deadline
            if pending.wait is not _Wait.OWED and not pending.is_patient and (trouble is Trouble.FULL or gone):
                self._refuse(pending, problem)
        waits = trouble is Trouble.DOWN or any(pending.is_patient for pending in self._waiting)
        self._pause = min(_RETRY_SECONDS, self._pause * 2 or 0.05) if waits else 0.0

    def _refuse(self, pending: _Pending, problem: errors.BelljarError) -> None:
        """Its caller is told no. A change stays due even so: the run would never end in the records."""
        size = pending.write.bytes
        if size and size <= self._owed_room:
            self._owed_room -= size
            pending.wait = _Wait.OWED
            pending.finish(error=problem)
            return
        self._waiting.remove(pending)
        self.buffer.dropped += 1 if size else 0
        self._settle(pending, error=problem)
        if pending.write.row is not None and pending.tried is _Tried.UNSURE:
            self._disown(pending.write.row)

    def _settle(self, pending: _Pending, value: Any = None, error: errors.BelljarError | None = None) -> None:
        if pending.wait is _Wait.OWED:
            self._owed_room += pending.write.bytes
        pending.finish(value, error)

    async def _commit_apart(self, problem: errors.BelljarError, writes: list[_Pending], items: list[Item]) -> None:
        """One of them is to blame. Commits each write alone, and items in halves, until it is found."""
        if len(writes) + len(items) == 1:
            for pending in writes:
                self._settle(pending, error=problem)
            self.buffer.dropped += len(items)
            return
        half = (len(items) + 1) // 2
        for part in (items[:half], items[half:]):
            if part:
                await self._commit([], part)
        for place, pending in enumerate(writes):  # the end of a run after its lines
            await self._commit([pending], [])
            if self._waiting and self._waiting[0] is pending:  # the database went away: the later ones stay behind it
                self._waiting.popleft()
                self._waiting.extendleft(reversed(writes[place:]))
                return

    def _disown(self, row: dict[str, Any]) -> None:
        """Ends a run that was recorded after all, or may have been, when its caller was told that it was not."""
        values = {"state": "failed", "ended": time.time(), "problem": '{"kind": "not_available"}'}
        write = self._change(row["id"], values)
        if write.bytes <= self._owed_room:
            self._owed_room -= write.bytes
            self._enqueue(_Pending(write, wait=_Wait.OWED))


def _touch(connection: Connection) -> None:
    """Writes the least that shows whether there is room again."""
    statements.write_note(connection, "touched", str(time.time()))


def _apply(connection: Connection, writes: list[_Pending], items: list[Item], outbox: bool) -> list[Any]:
    owners = {pending: _owner(connection, pending.write) for pending in writes if pending.write.row is not None}
    for again in (False, True):
        begun = [pending for pending in owners if (pending.tried is not _Tried.NEVER) is again]
        rows = [row for each in begun if (row := each.write.row) is not None and row["id"] == owners[each].id]
        if rows:
            statements.begin_runs(connection, rows, again=again, outbox=outbox)
    if items:
        statements.add_items(connection, items, outbox=outbox)
    return [_value(connection, pending.write, owners.get(pending)) for pending in writes]


def _owner(connection: Connection, write: Write) -> KeyOwner:
    """Whose the idempotency key of a run that begins is."""
    assert write.row is not None
    id: str = write.row["id"]
    return statements.claim_key(connection, write.claim, id) if write.claim else KeyOwner(id, "")


def _value(connection: Connection, write: Write, owner: KeyOwner | None) -> Any:
    return write.work(connection) if write.work is not None else owner
