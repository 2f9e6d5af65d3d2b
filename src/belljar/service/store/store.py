"""The store: runs, what they printed and measured, claims, keys, images. SQLite by default, PostgreSQL by URL.

`begin` and `change` return when it is committed. `add` never waits. What cannot be written is said by `status`.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from anyio import to_thread
from sqlalchemy import Connection, Row, Select, and_, delete, or_, select, update

from belljar.core import errors
from belljar.core.result import Status
from belljar.core.settings import Settings
from belljar.core.values import MIB
from belljar.host.loops import lone_errors
from belljar.protocol.records import Alert, Key, LogLine, RunRecord, Sample
from belljar.service.store import retention, statements, tables, writer
from belljar.service.store.buffer import EVERYTHING, Buffer
from belljar.service.store.connect import connect
from belljar.service.store.database import Database, Trouble
from belljar.service.store.migrate import migrate
from belljar.service.store.result_text import LargeText, ResultText, result_text
from belljar.service.store.statements import Claim, KeyOwner

T = TypeVar("T")
_OPEN = ("queued", "running")
_PAGE = 200
_AGAIN = 0.1
_FLUSH_SECONDS = 5.0
_LONG = 60.0  # for what nobody waits for on the way to a run


def store_url(settings: Settings) -> str:
    """Where records are kept."""
    return settings.service.store or f"sqlite:///{settings.data_dir}/records.db"


class Store:
    def __init__(
        self, url: str, *, outbox: bool = False, buffer_items: int = 50_000, buffer_bytes: int = 32 * MIB
    ) -> None:
        self.database: Database = connect(url)
        self.outbox = outbox
        self.origin: str = ""
        buffer = Buffer(buffer_items, buffer_bytes)
        self._writer = writer.Writer(self.database, outbox=outbox, buffer=buffer)
        self._stack = AsyncExitStack()

    @property
    def status(self) -> str:
        """Empty when all is well."""
        return self._writer.status

    @property
    def dropped(self) -> int:
        """What `add` could not take, and what could not be written."""
        return self._writer.buffer.dropped

    @property
    def buffered(self) -> int:
        return self._writer.buffer.count

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.database.close)
            await self._open()
            stack.enter_context(lone_errors())  # what goes wrong within is nobody's group
            group = await stack.enter_async_context(anyio.create_task_group())
            await group.start(self._writer.run)
            stack.push_async_callback(self._finish)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _open(self) -> None:
        deadline = time.monotonic() + writer.PATIENCE
        while True:
            try:
                await self.database.prepare(migrate)
                self.origin = await self.database.write(_origin)
                return
            except Exception as error:
                waits = self.database.judge(error) is Trouble.DOWN and time.monotonic() < deadline
                if not waits or isinstance(error, errors.BelljarError):
                    raise self.database.explain(error) from error
            await anyio.sleep(_AGAIN)

    async def _finish(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self.flush()
            except errors.BelljarError:
                self._writer.buffer.dropped += self.buffered
            finally:
                self._writer.stop()

    # --- runs

    async def begin(self, record: RunRecord, claim: Claim | None = None) -> KeyOwner:
        """Records a run that begins, and the idempotency key that it came with, both or neither.

        Returns:
            Whose the key is: another run's, and then this one was not recorded; otherwise this run's.
        """
        return await self._writer.begin(tables.run_row(record), claim)

    async def owner(self, caller: str, key: str) -> KeyOwner | None:
        """Returns the recorded run that an idempotency key belongs to, if there is one."""
        work = partial(statements.find_owner, caller=caller, key=key)
        found = self.database.read_inline(work)
        return found.value if found is not None else await self.read(work)

    async def change(
        self, id: str, *, text: ResultText | None = None, patience: float = writer.PATIENCE, **fields: Any
    ) -> None:
        """Changes fields of a run. If the store cannot be reached, this raises, and the change is made once it can be.

        Args:
            id: Of the run.
            text: The result as JSON, where somebody has serialised it already. A large one is written before the rest.
            patience: Seconds to wait for the database; infinite: this returns when it is written, however late.
            fields: Fields of `RunRecord`.
        """
        if (result := fields.get("result")) is not None:
            text = text or await result_text(result)
            fields["result"] = text.brief
        values = tables.run_values(fields, text.json if text else "")
        if text and text.is_large:
            values["result_parts"] = await self._put_parts(id, text, patience)
        if values and not await self._writer.change(id, values, patience):
            raise errors.NotFound(f"there is no run {id[:80]}", fix="belljar records list")

    async def _put_parts(self, id: str, text: ResultText, patience: float) -> int:
        """Writes a large result in transactions of its own, between which others have their turn."""
        number = 0
        async for part in text.parts():
            number += 1
            put = partial(statements.put_part, id=id, number=number, part=part, outbox=self.outbox)
            await self._writer.ask(writer.Write(put, heavy=True), patience)
        return number

    async def run(self, id: str) -> RunRecord | None:
        """Returns a run with its whole result."""
        found = await self._find(id)
        if found is None:
            return None
        parts = [part async for part in self.result_parts(id, found.result_parts)]
        return await to_thread.run_sync(tables.as_run, found, parts) if parts else tables.as_run(found)

    async def brief_run(self, id: str) -> tuple[RunRecord | None, LargeText | None]:
        """Returns a run, and its result as JSON if that is large: the run has only the head of it then."""
        found = await self._find(id)
        if found is None:
            return None, None
        return tables.as_run(found), _StoredText(self, id, found.result_parts) if found.result_parts else None

    async def _find(self, id: str) -> Row[Any] | None:
        statement = select(*tables.FULL).where(tables.runs.c.id == id)
        return await self.read(lambda db: db.execute(statement).first())

    async def result_parts(self, id: str, count: int) -> AsyncIterator[bytes]:
        """Yields the JSON of a large result, one part at a time.

        Raises:
            NotAvailable: one of its parts is gone: some of a result must not pass for all of it.
        """
        parts = tables.result_parts.c
        for number in range(1, count + 1):
            statement = select(parts.part).where(parts.container_id == id, parts.number == number)
            part = await self.read(partial(_scalar, statement))
            if part is None:
                raise errors.NotAvailable(f"the result of {id} is not whole", fix="its time to be kept may be over")
            yield bytes(part)

    async def runs(
        self, *, caller: str | None = None, state: str | None = None, language: str | None = None,
        before: float | None = None, limit: int = 50,
    ) -> list[RunRecord]:  # fmt: skip
        """The newest first, without their results."""
        runs = tables.runs.c
        wanted = {runs.caller: caller, runs.state: state, runs.language: language}
        statement = select(*tables.BRIEF).where(*[column == value for column, value in wanted.items() if value])
        if before is not None:
            statement = statement.where(runs.created < before)
        statement = statement.order_by(runs.created.desc(), runs.id.desc()).limit(limit)
        return [tables.as_run(row) for row in await self.read(lambda db: db.execute(statement).all())]

    async def history(self) -> AsyncIterator[RunRecord]:
        """All runs with their results, the oldest first."""
        runs = tables.runs.c
        last: tuple[float, str] | None = None
        while True:
            statement = select(runs.created, runs.id).order_by(runs.created, runs.id).limit(_PAGE)
            if last is not None:
                later = and_(runs.created == last[0], runs.id > last[1])
                statement = statement.where(or_(runs.created > last[0], later))
            page = await self.read(partial(_all, statement))
            if not page:
                return
            for row in page:
                if record := await self.run(row.id):  # one at a time: a result can be large
                    yield record
            last = (page[-1].created, page[-1].id)

    async def same(self, fingerprint: str, caller: str) -> RunRecord | None:
        """Returns the newest run of this caller with this fingerprint that succeeded, unless its result is large."""
        runs = tables.runs.c
        if not fingerprint:
            return None
        mine = (
            runs.fingerprint == fingerprint,
            runs.caller == caller,
            runs.state == "finished",
            runs.result_parts == 0,
        )
        statement = select(*tables.FULL).where(*mine, runs.status == str(Status.SUCCESS))
        statement = statement.order_by(runs.ended.desc()).limit(1)
        rows = await self.read(lambda db: db.execute(statement).all())
        return tables.as_run(rows[0]) if rows else None

    async def lose(self, is_dead: Callable[[str], bool]) -> list[str]:
        """What a process that is gone left open: nobody will ever say how it ended."""
        runs = tables.runs.c
        is_open = (runs.state.in_(_OPEN), runs.origin == "")
        owners = await self.read(lambda db: db.scalars(select(runs.instance).where(*is_open).distinct()).all())
        dead = [instance for instance in owners if is_dead(instance)]
        now = time.time()
        problem = errors.ExecutionFailed(
            "the service died while it was under way", fix="send it again, if it does no harm twice: under a new key"
        )

        def work(db: Connection) -> list[str]:
            ids = list(db.scalars(select(runs.id).where(*is_open, runs.instance.in_(dead)).limit(_PAGE)))
            for id in ids:
                values = {"state": "lost", "ended": now, "position": None, "problem": json.dumps(problem.as_dict())}
                statements.change_run(db, id, values, outbox=self.outbox)
            return ids

        lost: list[str] = []
        while dead and (more := await self.write(work)):
            lost += more
        return lost

    # --- what runs say

    def add(self, *items: LogLine | Sample | Alert) -> None:
        """From the event loop's thread. What does not fit is counted in `dropped`."""
        self._writer.add(items)

    async def flush(self, id: str = EVERYTHING) -> None:
        """All that was added until now is committed; of one run, if it is named, which costs others less."""
        await self._writer.flush(id, _FLUSH_SECONDS)

    async def lines(self, id: str, after: int = 0, limit: int = 1000, *, room: float = math.inf) -> list[LogLine]:
        """In order; no more than come to `room` characters, and one more."""
        logs = tables.logs.c
        statement = select(tables.logs).where(logs.container_id == id, logs.number > after)
        statement = statement.order_by(logs.number).limit(limit)

        def work(db: Connection) -> list[LogLine]:
            found, left = list[LogLine](), room
            for row in db.execute(statement):
                found.append(tables.as_line(row))
                left -= len(found[-1].message)
                if left <= 0:
                    break
            return found

        return await self.read(work)

    async def samples(self, id: str, after: float = 0, limit: int = 3600) -> list[Sample]:
        samples = tables.samples.c
        statement = select(tables.samples).where(samples.container_id == id, samples.at > after)
        statement = statement.order_by(samples.at).limit(limit)
        return [tables.as_sample(row) for row in await self.read(lambda db: db.execute(statement).all())]

    async def alerts(self, id: str | None = None, limit: int = 100) -> list[Alert]:
        """The newest first."""
        statement = select(tables.alerts).order_by(tables.alerts.c.at.desc(), tables.alerts.c.over.desc()).limit(limit)
        if id is not None:
            statement = statement.where(tables.alerts.c.container_id == id)
        return [tables.as_alert(row) for row in await self.read(lambda db: db.execute(statement).all())]

    # --- claims, keys, images

    async def release(self, caller: str, key: str, id: str) -> None:
        """Gives up the claim of a run that could not be recorded: the key is good for another try."""
        claims = tables.claims.c
        mine = (claims.caller == caller, claims.key == key, claims.id == id)
        statement = delete(tables.claims).where(*mine)
        await self.write(lambda db: db.execute(statement) and None, writer.PATIENCE, quick=True)

    async def keys(self) -> list[Key]:
        statement = select(tables.keys).order_by(tables.keys.c.created, tables.keys.c.id)
        return [tables.as_key(row) for row in await self.read(lambda db: db.execute(statement).all())]

    async def add_key(self, key: Key) -> None:
        await self.write(lambda db: db.execute(tables.keys.insert(), [tables.key_row(key)]) and None)

    async def revoke_key(self, id: str) -> bool:
        """False: there is no such key, or it is revoked already."""
        keys = tables.keys.c
        statement = update(tables.keys).where(keys.id == id, keys.revoked.is_(None)).values(revoked=time.time())
        return await self.write(lambda db: db.execute(statement).rowcount > 0)

    async def add_image(self, engine: str, reference: str, digest: str, facts: dict[str, Any]) -> None:
        row = {"engine": engine, "reference": reference, "digest": digest, "at": time.time()}
        row |= {"facts": json.dumps(facts, default=str)}
        await self.write(lambda db: db.execute(statements.insert_or_replace(db, tables.images), [row]) and None)

    async def images(self) -> list[dict[str, Any]]:
        """The last seen first."""
        rows = await self.read(lambda db: db.execute(select(tables.images).order_by(tables.images.c.at.desc())).all())
        return [dict(row._mapping) | {"facts": json.loads(row.facts)} for row in rows]

    # --- health and age

    async def check(self, patience: float) -> None:
        """Writes something and reads it back, or raises why that cannot be done.

        Args:
            patience: Seconds to wait for the database.

        Raises:
            NotAvailable: It is down, full, cannot be written to, or its file is another one than was opened.
        """
        self.database.check()
        now = f"{time.time():.3f}"
        await self.write(partial(statements.write_note, name="checked", value=now), patience)
        if await self.read(partial(statements.read_note, name="checked")) is None:
            raise errors.NotAvailable("what is written to the records is not there afterwards", fix="look at the store")

    async def prune(self, older_than: float, *, keep: int = 0) -> dict[str, int]:
        """Removes what ended more than so many seconds ago, except the newest `keep` runs and what is still under way.

        With an outbox, what was not pushed yet stays."""
        return await retention.prune(self, time.time() - older_than, keep)

    # --- one transaction of one's own

    async def read(self, work: Callable[[Connection], T]) -> T:
        try:
            return await self.database.read(work)
        except Exception as error:
            raise self.database.explain(error) from error

    async def write(self, work: Callable[[Connection], T], patience: float = _LONG, *, quick: bool = False) -> T:
        """Runs `work` in a transaction that it may share with others, and returns its value when that is committed.

        Args:
            work: Is run again after a commit that failed.
            patience: Seconds to wait for the database.
            quick: `work` takes well below a millisecond, so that it may be done in the event loop's thread.
        """
        value: T = await self._writer.ask(writer.Write(work, quick=quick), patience)
        return value


class _StoredText:
    """A large result that lies in the store. Implements `LargeText`."""

    def __init__(self, store: Store, id: str, count: int) -> None:
        self._store = store
        self._id = id
        self._count = count

    def parts(self) -> AsyncIterator[bytes]:
        return self._store.result_parts(self._id, self._count)


def _all(statement: Select[Any], db: Connection) -> Sequence[Row[Any]]:
    return db.execute(statement).all()


def _scalar(statement: Select[Any], db: Connection) -> Any:
    return db.scalar(statement)


def _origin(db: Connection) -> str:
    """Who this store is to a shared one: an id by chance, made once."""
    db.execute(statements.insert_or_leave(db, tables.notes), [{"name": "origin", "value": uuid.uuid4().hex}])
    return statements.read_note(db, "origin") or ""
