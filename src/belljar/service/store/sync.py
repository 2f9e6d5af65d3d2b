"""Pushes local records to a shared store, in order and exactly once, however long it was away.

Every change lies in the outbox of the local store, numbered, from the same transaction that made it. The shared store
keeps for each origin the number it has, and moves it in the transaction that takes the rows: whoever dies in between,
what was taken is not taken again, and nothing is passed over.

A local store that is put back to an earlier day uses numbers a second time. What it was about to push, it noted before:
a shared store that has more of it knows its other life, and from then on it pushes under another name.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import anyio
from sqlalchemy import Connection, delete, func, select, update

from belljar.core import errors
from belljar.core.values import MIB
from belljar.service.store import statements, tables
from belljar.service.store.connect import connect
from belljar.service.store.migrate import migrate
from belljar.service.store.store import Store

_log = logging.getLogger("belljar")
_PARCELS = 500
_PARCEL_BYTES = 4 * MIB  # of one push, about
_POLL = 1.0
_LONGEST_PAUSE = 30.0
_PUSH_SECONDS = 120.0


class Parcel(NamedTuple):
    number: int
    kind: str
    id: str
    body: Any


class Syncer:
    def __init__(self, store: Store, shared_url: str, *, poll: float = _POLL) -> None:
        self.status: str = ""
        self.behind: int = 0  # rows that wait, when last looked at
        self._store = store
        self._shared = connect(shared_url)
        self._ready = False
        self._poll = poll

    async def run(self) -> None:
        """Until it is cancelled. A shared store that is down is said by `status` and asked again, ever more rarely."""
        pause = self._poll
        try:
            while True:
                try:
                    await self.push()
                    pause = self._poll
                except errors.BelljarError:  # `status` says it
                    pause = min(_LONGEST_PAUSE, pause * 2)
                await anyio.sleep(pause)
        finally:
            await self.close()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._shared.close()

    async def push(self) -> int:
        """All that waits; how many rows it was. Raises what is in the way."""
        pushed = 0
        try:
            self.behind = await self._store.read(_count)
            while parcels := await self._store.read(_pack):
                await self._open()
                await self._store.write(partial(_offer, number=parcels[-1].number))
                await self._deliver(parcels)
                await self._acknowledge(parcels[-1].number)
                pushed += len(parcels)
                self.behind = max(0, self.behind - len(parcels))
            self.behind = 0
        except errors.BelljarError as error:
            self.status = error.message
            with suppress(errors.BelljarError):  # it may be the local one that fails
                self.behind = await self._store.read(_count)
            raise
        self.status = ""
        return pushed

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """What goes wrong in the shared store."""
        try:
            with anyio.fail_after(_PUSH_SECONDS):
                yield
        except Exception as error:
            raise self._shared.explain(error) from error

    async def _open(self) -> None:
        if self._ready:
            return
        origin = self._store.origin
        with self._explaining():
            await self._shared.prepare(migrate)
            arrived = await self._shared.read(partial(_arrived, origin=origin))
        # Ours is read after theirs: another syncer of this store may push meanwhile, and notes it before.
        self._store.origin = await self._store.write(partial(_settle, origin=origin, arrived=arrived))
        if self._store.origin != origin:
            _log.warning("the records were put back to an earlier day: they are pushed under another name from now on")
        self._ready = True

    async def _deliver(self, parcels: list[Parcel]) -> None:
        with self._explaining():
            await self._shared.write(partial(_take_in, origin=self._store.origin, parcels=parcels))

    async def _acknowledge(self, number: int) -> None:
        await self._store.write(lambda db: db.execute(delete(tables.outbox).where(tables.outbox.c.number <= number)))


# --- the local side ----------------------------------------------------------------------------


def _count(db: Connection) -> int:
    return db.scalar(select(func.count()).select_from(tables.outbox)) or 0


def _pack(db: Connection) -> list[Parcel]:
    """The next rows, with what they only name."""
    parcels: list[Parcel] = []
    size = 0
    for row in db.execute(select(tables.outbox).order_by(tables.outbox.c.number).limit(_PARCELS)):
        body, weight = _unfold(db, row.kind, row.id, json.loads(row.body))
        parcels.append(Parcel(row.number, row.kind, row.id, body))
        size += weight + len(row.body)
        if size > _PARCEL_BYTES:
            break
    return parcels


def _unfold(db: Connection, kind: str, id: str, body: Any) -> tuple[Any, int]:
    if kind == "lines":
        logs = tables.logs.c
        span = logs.number.between(body[0], body[1])
        lines = db.execute(select(tables.logs).where(logs.container_id == id, span).order_by(logs.number)).all()
        return [dict(line._mapping) for line in lines], sum(100 + len(line.message) for line in lines)
    if kind == "part":
        parts = tables.result_parts.c
        part = db.scalar(select(parts.part).where(parts.container_id == id, parts.number == body)) or b""
        return {"container_id": id, "number": body, "part": bytes(part)}, len(part)
    if kind == "change" and body.pop("+result", False):
        body["result"] = db.scalar(select(tables.runs.c.result).where(tables.runs.c.id == id))
        return body, len(body["result"] or "")
    return body, 0


def _offered(db: Connection) -> int:
    """The last number that the shared store may have of us."""
    return int(statements.read_note(db, "offered") or 0)


def _offer(db: Connection, number: int) -> None:
    statements.write_note(db, "offered", str(max(number, _offered(db))))


def _settle(db: Connection, origin: str, arrived: int) -> str:
    """Our name from now on: another one, if more of us has arrived than we know to have offered."""
    if statements.read_note(db, "origin") == origin and arrived > _offered(db):
        statements.write_note(db, "origin", uuid.uuid4().hex)
    return statements.read_note(db, "origin") or ""


# --- the shared side ---------------------------------------------------------------------------


def _arrived(db: Connection, origin: str) -> int:
    return db.scalar(select(tables.arrivals.c.number).where(tables.arrivals.c.origin == origin)) or 0


def _take_in(db: Connection, origin: str, parcels: list[Parcel]) -> None:
    """What is new of it."""
    arrivals = tables.arrivals
    db.execute(statements.insert_or_leave(db, arrivals), [{"origin": origin, "number": 0}])
    # The row's lock holds off another syncer of the same store until we are through.
    last = db.scalar(select(arrivals.c.number).where(arrivals.c.origin == origin).with_for_update()) or 0
    fresh = [parcel for parcel in parcels if parcel.number > last]
    for parcel in fresh:
        _take(db, origin, parcel)
    if fresh:
        db.execute(update(arrivals).where(arrivals.c.origin == origin).values(number=fresh[-1].number))


def _take(db: Connection, origin: str, parcel: Parcel) -> None:
    match parcel.kind:
        case "begin":
            db.execute(statements.insert_or_leave(db, tables.runs), [parcel.body | {"origin": origin}])
        case "change" if parcel.body:
            pushed = (tables.runs.c.id == parcel.id, tables.runs.c.origin != "")  # never the shared store's own
            db.execute(update(tables.runs).where(*pushed).values(**parcel.body))
        case "part":
            db.execute(statements.insert_or_replace(db, tables.result_parts), [parcel.body])
        case "lines" if parcel.body:
            db.execute(statements.insert_or_leave(db, tables.logs), parcel.body)
        case "alert":
            db.execute(statements.insert_or_leave(db, tables.alerts), [parcel.body])
