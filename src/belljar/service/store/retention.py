"""What is old goes: in small transactions, so that no run waits for it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, or_, select

from belljar.core import errors
from belljar.protocol.records import FINAL
from belljar.service.store import tables
from belljar.service.telemetry.server_log import facts

if TYPE_CHECKING:
    from belljar.service.store.store import Store

_CHUNK = 100
_log = logging.getLogger("belljar")


async def prune(store: Store, cutoff: float, keep: int) -> dict[str, int]:
    gone: Counter[str] = Counter(dict.fromkeys(("runs", "logs", "samples", "alerts", "claims", "outbox"), 0))
    too_old = _too_old(cutoff, await _kept_from(store, keep), pending=store.outbox)
    while ids := await store.read(lambda db: db.scalars(select(tables.runs.c.id).where(*too_old).limit(_CHUNK)).all()):
        gone.update(await store.write(partial(_remove, ids=ids)))
    for table, column in ((tables.logs, tables.logs.c.timestamp), (tables.samples, tables.samples.c.at)):
        while ids := await store.read(partial(_strays, table=table, at=column, cutoff=cutoff)):
            gone[table.name] += await store.write(partial(_of, table=table, ids=ids))
    gone.update(await store.write(lambda db: _sweep(db, cutoff)))
    if store.database.name == "sqlite":
        while await store.write(_shrink):
            pass
    return dict(gone)


async def prune_regularly(store: Store, every: float, keep: float) -> None:
    """Prunes at once and then again and again, for as long as it is left to. A failure is logged, and tried again.

    Args:
        store: What is pruned.
        every: Seconds from one pruning to the next.
        keep: Seconds that a run is kept after its end.
    """
    while True:
        try:
            gone = await store.prune(keep)
            if any(gone.values()):
                _log.info("old records were removed", extra=facts(**gone))
        except errors.BelljarError as error:
            _log.warning("old records could not be removed: %s", error.message)
        await anyio.sleep(every)


async def _kept_from(store: Store, keep: int) -> tuple[float, str] | None:
    """The oldest of the newest so many."""
    runs = tables.runs.c
    newest = select(runs.created, runs.id).order_by(runs.created.desc(), runs.id.desc()).offset(keep - 1).limit(1)
    if keep <= 0:
        return None
    row = await store.read(lambda db: db.execute(newest).first())
    return (row.created, row.id) if row else (float("-inf"), "")  # there are fewer


def _too_old(cutoff: float, kept_from: tuple[float, str] | None, *, pending: bool) -> list[ColumnElement[bool]]:
    runs = tables.runs.c
    rules = [runs.state.in_(sorted(FINAL)), func.coalesce(runs.ended, runs.created) < cutoff]
    if kept_from is not None:
        created, id = kept_from
        rules.append(or_(runs.created < created, and_(runs.created == created, runs.id < id)))
    if pending:
        rules.append(~exists().where(tables.outbox.c.id == runs.id))
    return rules


def _remove(db: Connection, ids: Sequence[str]) -> dict[str, int]:
    """Runs with all that belongs to them. One that is open again in the meantime is none of them."""
    runs = tables.runs.c
    still = list(db.scalars(select(runs.id).where(runs.id.in_(ids), runs.state.in_(sorted(FINAL)))))
    gone = {table.name: _of(db, table, still) for table in (tables.logs, tables.samples, tables.alerts)}
    _of(db, tables.result_parts, still)
    gone["claims"] = db.execute(delete(tables.claims).where(tables.claims.c.id.in_(still))).rowcount
    gone["outbox"] = db.execute(delete(tables.outbox).where(tables.outbox.c.id.in_(still))).rowcount
    gone["runs"] = db.execute(delete(tables.runs).where(runs.id.in_(still))).rowcount
    return gone


def _of(db: Connection, table: Table, ids: Sequence[str]) -> int:
    return db.execute(delete(table).where(table.c.container_id.in_(ids))).rowcount


def _strays(db: Connection, table: Table, at: ColumnElement[float], cutoff: float) -> Sequence[str]:
    """What belongs to no run, as the lines of a session do, and has been silent since."""
    known = exists().where(tables.runs.c.id == table.c.container_id)
    waiting = exists().where(tables.outbox.c.id == table.c.container_id)
    silent = select(table.c.container_id).where(~known, ~waiting).group_by(table.c.container_id)
    return db.scalars(silent.having(func.max(at) < cutoff).limit(_CHUNK)).all()


def _sweep(db: Connection, cutoff: float) -> dict[str, int]:
    alerts, claims = tables.alerts, tables.claims
    known = exists().where(tables.runs.c.id == alerts.c.container_id)
    gone = {"alerts": db.execute(delete(alerts).where(alerts.c.at < cutoff, ~known)).rowcount}
    is_open = exists().where(tables.runs.c.id == claims.c.id, tables.runs.c.state.not_in(sorted(FINAL)))
    gone["claims"] = db.execute(delete(claims).where(claims.c.created < cutoff, ~is_open)).rowcount
    return gone


def _shrink(db: Connection) -> bool:
    """Gives some free pages back to the disk; true if there are more. A file made by others may keep them all."""
    driver: Any = db.connection.driver_connection
    before = driver.execute("PRAGMA freelist_count").fetchone()[0]
    driver.execute("PRAGMA incremental_vacuum(2000)").fetchall()  # a page for each step, so all steps
    return bool(0 < driver.execute("PRAGMA freelist_count").fetchone()[0] < before)
