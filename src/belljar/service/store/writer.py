"""One writer for all: whatever waits goes into one transaction, so that a hundred callers pay for one commit.

A `Write` is waited for and told whether it was committed. What `add` takes is not waited for: it lies in a bounded
`Buffer` until the writer has time, or until the run it belongs to ends, whose last change takes it along.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import anyio
from anyio.abc import TaskStatus
from sqlalchemy import Connection

from belljar.core import errors
from belljar.core.values import KIB, MIB
from belljar.protocol.records import FINAL, Alert, LogLine
from belljar.service.store import statements as changes
from belljar.service.store.database import Database, Trouble
from belljar.service.store.statements import Item

PATIENCE = 5.0  # seconds that a caller waits for a database that is not there
_TICK = 0.05  # lines are gathered for so long
_STALE = 0.25  # and wait for no longer, however many writes come between
_RETRY = 1.0
_GROUP = 500  # writes of one transaction
_BATCH = 1000  # items of one transaction
_TURN = 100  # of them of one run
_SMALL = 64 * KIB  # a change that is made at once: everybody waits for it
_CHECKPOINT = 200  # one change of so many is not
EVERYTHING = "*"  # no run has that id
_OBJECT = 600  # bytes that an item takes besides its text


class Write:
    """Something to be written by somebody who waits for it. `work` may be run more than once, if a commit fails."""

    __slots__ = ("again", "deadline", "done", "error", "gone", "owed", "row", "run", "size", "unsure", "value", "work")

    def __init__(self, work: Callable[[Connection], Any] | None = None, *, row: dict[str, Any] | None = None) -> None:
        self.work, self.row = work, row  # a row: a run that begins; many are one statement. Neither: a mark
        self.run = ""  # whose items go along: the run that ends with this
        self.size = 0  # of a change, which is due even when its caller was told no; others are not
        self.owed = False  # nobody waits any more, but it has to be done
        self.gone = False  # nobody waits any more
        self.again = False  # it was tried before
        self.unsure = False  # and perhaps committed, though we were not told
        self.done = anyio.Event()
        self.value: Any = None
        self.error: errors.BelljarError | None = None
        self.deadline = time.monotonic() + PATIENCE

    def finish(self, value: Any = None, error: errors.BelljarError | None = None) -> None:
        self.value, self.error = value, error
        self.done.set()


class Buffer:
    """Items by run, bounded by count and bytes. What comes when it is full is not taken: numbers show the gap."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.dropped = 0, 0, 0
        self.since = 0.0
        self._most, self._room = count, size
        self._by_run: dict[str, deque[Item]] = {}

    def put(self, item: Item) -> bool:
        size = _weigh(item)
        if self.count >= self._most or self.size + size > self._room:
            self.dropped += 1
            return False
        if not self.count:
            self.since = time.monotonic()
        self._by_run.setdefault(item.container_id, deque()).append(item)
        self.count, self.size = self.count + 1, self.size + size
        return True

    def take(self, most: int) -> list[Item]:
        """The next ones: some of each run in turn, so that one that floods does not keep the others back."""
        taken: list[Item] = []
        size = 0
        while self._by_run and len(taken) < most and size < MIB:
            id = next(iter(self._by_run))
            waiting = self._by_run.pop(id)
            some = [waiting.popleft() for _ in range(min(len(waiting), _TURN, most - len(taken)))]
            taken += some
            size += sum(map(_weigh, some))
            if waiting:
                self._by_run[id] = waiting
        self._forget(taken)
        self.since = time.monotonic()
        return taken

    def take_run(self, id: str) -> list[Item]:
        """All that there is of one run; with `EVERYTHING`, of all."""
        names = list(self._by_run) if id == EVERYTHING else [id]
        taken = [item for name in names for item in self._by_run.pop(name, ())]
        self._forget(taken)
        return taken

    def give_back(self, items: list[Item]) -> None:
        """They could not be written; they were within the bounds before."""
        for item in reversed(items):
            self._by_run.setdefault(item.container_id, deque()).appendleft(item)
        self.count, self.size = self.count + len(items), self.size + sum(map(_weigh, items))

    def _forget(self, items: list[Item]) -> None:
        self.count, self.size = self.count - len(items), self.size - sum(map(_weigh, items))


def _weigh(item: Item) -> int:
    return _OBJECT + (len(item.message) if isinstance(item, LogLine | Alert) else 0)


class Writer:
    def __init__(self, database: Database, *, outbox: bool, buffer: Buffer, owed_bytes: int = 64 * MIB) -> None:
        self.buffer = buffer
        self._problem: errors.BelljarError | None = None
        self._database, self._outbox = database, outbox
        self._waiting: deque[Write] = deque()
        self._bell = anyio.Event()
        self._busy = False
        self._owed_room = owed_bytes
        self._changes = 0  # since the last that went through `_commit`, whose connection checkpoints
        self._pause = 0.0  # before the next try, while the database is not there
        self._scope: anyio.CancelScope | None = None

    @property
    def status(self) -> str:
        return self._problem.message if self._problem else ""

    # --- the side of the callers

    async def begin(self, row: dict[str, Any]) -> None:
        """A run that begins, in the records when this returns: at once, where nobody holds the lock."""
        if self._outbox or self._problem or self._database.at_once((changes.BEGIN, [row])) is None:
            await self.ask(Write(row=row))

    async def change(self, id: str, values: dict[str, Any]) -> bool:
        """False: there is no such run. The last change of a run takes its lines along."""
        write = change(id, values, self._outbox)
        idle = not (self._outbox or self._problem or self._busy or self._waiting)  # else it might overtake another
        self._changes = (self._changes + 1) % _CHECKPOINT
        if idle and write.size <= _SMALL and self._changes:
            items = self.buffer.take_run(write.run) if write.run else []
            statements = [(changes.update_text(*values), [values | {"of": id}]), *changes.item_texts(items)]
            if len(items) <= _TURN and (changed := self._database.at_once(*statements)) is not None:
                return changed > 0
            self.buffer.give_back(items)
        return bool(await self.ask(write))

    async def ask(self, write: Write, patience: float = PATIENCE) -> Any:
        """Returns when it is committed, or raises what was in the way."""
        write.deadline = time.monotonic() + patience
        self._waiting.append(write)
        self._bell.set()
        try:
            with anyio.move_on_after(patience):
                await write.done.wait()
        except BaseException:  # cancelled: what it began must not stay open in the records for ever
            self._abandon(write)
            raise
        if not write.done.is_set():
            write.error = self._late(write, patience)
        if write.error is not None:
            raise write.error
        return write.value

    def _late(self, write: Write, patience: float) -> errors.BelljarError:
        late = errors.NotAvailable(
            f"records cannot be written: no answer within {patience:g} s", fix=f"see what keeps {self._database.where}"
        )
        problem = self._problem or late
        write.gone = True
        if write in self._waiting:
            self._refuse(write, problem)
        return problem  # else it is under way, and `_commit` sees that nobody waits

    def _abandon(self, write: Write) -> None:
        write.gone = True
        if write.row is None:  # a change or a claim is good without its caller
            return
        if write in self._waiting and not write.unsure:
            self._waiting.remove(write)
        elif write.done.is_set() and write.error is None:
            self._disown(write.row)

    def add(self, items: Iterable[Item]) -> None:
        was_empty = not self.buffer.count
        for item in items:
            self.buffer.put(item)
        if was_empty or self.buffer.count >= _BATCH:
            self._bell.set()

    async def flush(self, id: str, seconds: float) -> None:
        """Returns when all that was handed over until now, of a run or of all, is committed, or raises."""
        if self._busy or self._waiting or self.buffer.count:
            mark = Write()
            mark.run = id
            await self.ask(mark, seconds)

    def stop(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    # --- the writer's own

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.CancelScope(shield=True) as self._scope:  # what was handed over is written, whoever is cancelled
            task_status.started()
            while True:
                await self._await_work()
                writes, items = self._take()
                if self.status and not writes and not items:
                    writes = [Write(_touch)]
                if items or any(write.work or write.row for write in writes):
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
            until = begun + _RETRY if self.status else self.buffer.since + _TICK if self.buffer.count else math.inf
            if (left := until - time.monotonic()) <= 0:
                return
            self._bell = anyio.Event()
            with anyio.move_on_after(left):
                await self._bell.wait()

    def _urgent(self) -> bool:
        if any(not write.owed for write in self._waiting) or (self._waiting and not self.status):
            return True
        return not self.status and self.buffer.count >= _BATCH

    def _take(self) -> tuple[list[Write], list[Item]]:
        writes = [self._waiting.popleft() for _ in range(min(len(self._waiting), _GROUP))]
        items = [item for write in writes if write.run for item in self.buffer.take_run(write.run)]
        if self.buffer.count and (not writes or time.monotonic() - self.buffer.since > _STALE):
            items += self.buffer.take(_BATCH)
        return writes, items

    async def _commit(self, writes: list[Write], items: list[Item]) -> None:
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
        for write, value in zip(writes, values, strict=True):
            if write.gone and write.row is not None:
                self._disown(write.row)
            self._settle(write, value)

    async def _recover(self, error: Exception, writes: list[Write], items: list[Item], applied: bool) -> None:
        trouble, problem = self._database.judge(error), self._database.explain(error)
        if trouble is Trouble.WRONG:
            await self._commit_apart(problem, writes, items)
            return
        self._problem = problem
        self._pause = min(_RETRY, self._pause * 2 or 0.05) if trouble is Trouble.DOWN else 0.0
        self.buffer.give_back(items)
        self._waiting.extendleft(reversed(writes))
        for write in writes:
            write.again = True
            write.unsure |= applied and trouble is Trouble.DOWN
        now = time.monotonic()
        for write in list(self._waiting):
            if not write.owed and (trouble is Trouble.FULL or write.gone or now >= write.deadline):
                self._refuse(write, problem)

    def _refuse(self, write: Write, problem: errors.BelljarError) -> None:
        """Its caller is told no. A change stays due even so: the run would never end in the records."""
        if write.size and write.size <= self._owed_room:
            self._owed_room -= write.size
            write.owed = True
            write.finish(error=problem)
            return
        self._waiting.remove(write)
        self.buffer.dropped += 1 if write.size else 0
        self._settle(write, error=problem)
        if write.row is not None and write.unsure:
            self._disown(write.row)

    def _settle(self, write: Write, value: Any = None, error: errors.BelljarError | None = None) -> None:
        if write.owed:
            self._owed_room += write.size
        write.finish(value, error)

    async def _commit_apart(self, problem: errors.BelljarError, writes: list[Write], items: list[Item]) -> None:
        """One of them is to blame. Each write alone, items in halves, until it is found."""
        if len(writes) + len(items) == 1:
            for write in writes:
                self._settle(write, error=problem)
            self.buffer.dropped += len(items)
            return
        half = (len(items) + 1) // 2
        for part in (items[:half], items[half:]):
            if part:
                await self._commit([], part)
        for place, write in enumerate(writes):  # the end of a run after its lines
            await self._commit([write], [])
            if self._waiting and self._waiting[0] is write:  # the database went away: the later ones stay behind it
                self._waiting.popleft()
                self._waiting.extendleft(reversed(writes[place:]))
                return

    def _disown(self, row: dict[str, Any]) -> None:
        """A run that was recorded after all, or may have been, when its caller was told that it was not."""
        values = {"state": "failed", "ended": time.time(), "problem": '{"kind": "not_available"}'}
        write = change(row["id"], values, self._outbox)
        if write.size <= self._owed_room:
            self._owed_room -= write.size
            write.owed = True
            self._waiting.append(write)
            self._bell.set()


def change(id: str, values: dict[str, Any], outbox: bool) -> Write:
    def work(connection: Connection) -> bool:
        return changes.change_run(connection, id, values, outbox=outbox)

    write = Write(work)
    write.run = id if values.get("state") in FINAL else ""
    write.size = _OBJECT + len(values.get("result") or "") + len(values.get("problem") or "")
    return write


def _touch(connection: Connection) -> None:
    """The least that shows whether there is room again."""
    changes.write_note(connection, "touched", str(time.time()))


def _apply(connection: Connection, writes: list[Write], items: list[Item], outbox: bool) -> list[Any]:
    for again in (False, True):
        if rows := [write.row for write in writes if write.row is not None and write.again is again]:
            changes.begin_runs(connection, rows, again=again, outbox=outbox)
    if items:
        changes.add_items(connection, items, outbox=outbox)
    return [write.work(connection) if write.work is not None else None for write in writes]
