"""Pushes local records to a shared store, in order and exactly once, however long it was away.

Every change lies in the outbox of the local store, numbered, from the same transaction that made it. The shared store
keeps for each origin the number it has, and moves it in the transaction that takes the rows: whoever dies in between,
what was taken is not taken again, and nothing is passed over.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
from sqlalchemy import Connection, delete, func, select, update

from belljar import errors
from belljar.service import changes, database, tables
from belljar.service.store import Store
from belljar.values import MIB

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
        self.status = ""
        self.behind = 0  # rows that wait, when last looked at
        self.pushed = 0
        self._store = store
        self._shared = database.connect(shared_url)
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
                await self._deliver(parcels)
                await self._acknowledge(parcels[-1].number)
                pushed += len(parcels)
                self.pushed += len(parcels)
                self.behind = max(0, self.behind - len(parcels))
            self.behind = 0
        except errors.BelljarError as error:
            self.status = error.message
            with suppress(errors.BelljarError):  # it may be the local one that fails
                self.behind = await self._store.read(_count)
            raise
        self.status = ""
        return pushed

    async def _deliver(self, parcels: list[Parcel]) -> None:
        try:
            with anyio.fail_after(_PUSH_SECONDS):
                await self._open()
                last = await self._shared.write(lambda db: _take_in(db, self._store.origin, parcels))
                if last > parcels[-1].number and last > await self._store.read(_newest):
                    # It has more of us than we ever sent: this store was put back to an earlier day, and its numbers
                    # are used a second time. Under another name none of them is taken for one of the first.
                    self._store.origin = await self._store.write(_rename)
                    await self._shared.write(lambda db: _take_in(db, self._store.origin, parcels))
        except Exception as error:
            raise self._shared.explain(error) from error

    async def _open(self) -> None:
        if not self._ready:
            if isinstance(self._shared, database.Sqlite):
                self._shared.create()
            await self._shared.write(database.migrate)
            self._ready = True

    async def _acknowledge(self, number: int) -> None:
        def work(db: Connection) -> None:
            db.execute(delete(tables.outbox).where(tables.outbox.c.number <= number))
            changes.write_note(db, "acknowledged", str(number))

        await self._store.write(work)


# --- the local side ----------------------------------------------------------------------------


def _count(db: Connection) -> int:
    return db.scalar(select(func.count()).select_from(tables.outbox)) or 0


def _newest(db: Connection) -> int:
    """The last number that was ever given."""
    waiting = db.scalar(select(func.max(tables.outbox.c.number))) or 0
    return max(waiting, int(changes.read_note(db, "acknowledged") or 0))


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
    if kind == "change" and body.pop("+result", False):
        body["result"] = db.scalar(select(tables.runs.c.result).where(tables.runs.c.id == id))
        return body, len(body["result"] or "")
    return body, 0


def _rename(db: Connection) -> str:
    origin = uuid.uuid4().hex
    changes.write_note(db, "origin", origin)
    return origin


# --- the shared side ---------------------------------------------------------------------------


def _take_in(db: Connection, origin: str, parcels: list[Parcel]) -> int:
    """What is new of it. Returns the number that it had before."""
    arrivals = tables.arrivals
    db.execute(changes.insert_or_leave(db, arrivals), [{"origin": origin, "number": 0}])
    # The row's lock holds off another syncer of the same store until we are through.
    last = db.scalar(select(arrivals.c.number).where(arrivals.c.origin == origin).with_for_update()) or 0
    fresh = [parcel for parcel in parcels if parcel.number > last]
    for parcel in fresh:
        _take(db, origin, parcel)
    if fresh:
        db.execute(update(arrivals).where(arrivals.c.origin == origin).values(number=fresh[-1].number))
    return last


def _take(db: Connection, origin: str, parcel: Parcel) -> None:
    match parcel.kind:
        case "begin":
            db.execute(changes.insert_or_leave(db, tables.runs), [parcel.body | {"origin": origin}])
        case "change" if parcel.body:
            pushed = (tables.runs.c.id == parcel.id, tables.runs.c.origin != "")  # never the shared store's own
            db.execute(update(tables.runs).where(*pushed).values(**parcel.body))
        case "lines" if parcel.body:
            db.execute(changes.insert_or_leave(db, tables.logs), parcel.body)
        case "alert":
            db.execute(changes.insert_or_leave(db, tables.alerts), [parcel.body])
