"""The statements that the store writes with.

Each function puts something into the transaction of a connection, with the rows of the outbox that belong to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Insert,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from belljar.protocol.records import Alert, LogLine, Sample
from belljar.service.store import tables

Item = LogLine | Sample | Alert
_TABLE_OF: dict[type, Table] = {LogLine: tables.logs, Sample: tables.samples, Alert: tables.alerts}
_OUTBOX_LOCK = 0x626F78
_BEGIN = insert(tables.runs)
_CHANGE = update(tables.runs).where(tables.runs.c.id == bindparam("changed_id"))
_BLOCKS = (50, 10, 1)  # rows of one statement: between two, a thread waits for its turn in the interpreter
_STALE_SECONDS = 60.0  # after which a claim without a run is nobody's
_OF_CALLER = (tables.claims.c.caller == bindparam("claim_caller"), tables.claims.c.key == bindparam("claim_key"))
_FIND_CLAIM = select(tables.claims.c.id, tables.claims.c.fingerprint).where(
    *_OF_CALLER, exists().where(tables.runs.c.id == tables.claims.c.id)
)


class Claim(NamedTuple):
    """An idempotency key that a request came with. `fingerprint` tells requests apart."""

    caller: str
    key: str
    fingerprint: str


class KeyOwner(NamedTuple):
    """Whose an idempotency key is: the id of a run, and the fingerprint of its request."""

    id: str
    fingerprint: str


def write_rows(connection: Connection, statement: Insert | Update, *rows: Mapping[str, Any]) -> int:
    """Executes a statement that is kept, for each row, and returns how many rows it changed.

    SQLite's driver gets it as text that was compiled once: SQLAlchemy's own execution takes five times as long. Each
    step of a statement gives the interpreter to other threads, and waits until it gets it back: many rows are one step.
    """
    if connection.dialect.name != "sqlite":
        return connection.execute(statement, rows).rowcount
    driver: Any = connection.connection.driver_connection
    columns, changed = tuple(rows[0]), 0
    for first, count in _blocks(len(rows)) if isinstance(statement, Insert) else _singles(len(rows)):
        text, order = _text(statement, columns, count)
        values = [row[name] for row in rows[first : first + count] for name in order]
        changed += driver.execute(text, values).rowcount
    return changed


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Cuts so many rows into as few blocks as there are prepared statements for; yields each one's start and size."""
    start = 0
    for size in _BLOCKS:
        while count - start >= size:
            yield start, size
            start += size


def _singles(count: int) -> Iterator[tuple[int, int]]:
    return ((number, 1) for number in range(count))


@cache
def _text(statement: Insert | Update, columns: tuple[str, ...], rows: int) -> tuple[str, Sequence[str]]:
    """As SQLite takes it for so many rows, and the names of one row's parameters in their order."""
    compiled = statement.compile(dialect=sqlite.dialect(paramstyle="qmark"), column_keys=columns)
    text, order = str(compiled), tuple(compiled.positiontup or ())
    if rows > 1:
        values = f"({', '.join('?' * len(order))})"
        assert f"VALUES {values}" in text, text
        text = text.replace(f"VALUES {values}", f"VALUES {', '.join([values] * rows)}")
    return text, order


@cache
def _query(statement: Select[Any]) -> str:
    """The same for a query."""
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="named")))


def insert_or_leave(connection: Connection, table: Table) -> Insert:
    """Returns an insert that leaves a row alone that is there already."""
    return _insert_or_leave(connection.dialect.name, table)


@cache
def _insert_or_leave(dialect: str, table: Table) -> Insert:
    if dialect == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def insert_or_replace(connection: Connection, table: Table) -> Insert:
    """Returns an insert that takes the place of the row with its key."""
    return _insert_or_replace(connection.dialect.name, table)


@cache
def _insert_or_replace(dialect: str, table: Table) -> Insert:
    maker: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = maker(table)
    others = {column.name: statement.excluded[column.name] for column in table.columns if not column.primary_key}
    replaced: Insert = statement.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=others)
    return replaced


def write_note(connection: Connection, name: str, value: str) -> None:
    connection.execute(insert_or_replace(connection, tables.notes), [{"name": name, "value": value}])


def read_note(connection: Connection, name: str) -> str | None:
    found: str | None = connection.execute(select(tables.notes.c.value).where(tables.notes.c.name == name)).scalar()
    return found


def begin_runs(connection: Connection, rows: Sequence[dict[str, Any]], *, again: bool, outbox: bool) -> None:
    """Records runs that begin. `again`: it was tried before, and may have been committed although we were not told."""
    statement = insert_or_leave(connection, tables.runs) if again else _BEGIN
    write_rows(connection, statement, *rows)
    if outbox:
        _post(connection, [{"kind": "begin", "id": row["id"], "body": json.dumps(row)} for row in rows])


def change_run(connection: Connection, id: str, values: Mapping[str, Any], *, outbox: bool) -> bool:
    """Changes a run; False if there is none."""
    changed = write_rows(connection, _CHANGE, {"changed_id": id, **values}) > 0
    if outbox and changed:
        # A result can be large and is set once: the outbox names it, the syncer looks it up.
        body = {name: value for name, value in values.items() if name != "result"} | {"+result": "result" in values}
        _post(connection, [{"kind": "change", "id": id, "body": json.dumps(body)}])
    return changed


def put_part(connection: Connection, id: str, number: int, part: bytes, *, outbox: bool) -> None:
    """Writes one part of a large result, in place of one that was tried before."""
    row = {"container_id": id, "number": number, "part": part}
    write_rows(connection, insert_or_replace(connection, tables.result_parts), row)
    if outbox:
        _post(connection, [{"kind": "part", "id": id, "body": json.dumps(number)}])


def find_owner(connection: Connection, caller: str, key: str) -> KeyOwner | None:
    """Returns the recorded run that an idempotency key belongs to, or None."""
    wanted = {"claim_caller": caller, "claim_key": key}
    if connection.dialect.name != "sqlite":
        found: Any = connection.execute(_FIND_CLAIM, wanted).first()
    else:
        driver: Any = connection.connection.driver_connection
        found = driver.execute(_query(_FIND_CLAIM), wanted).fetchone()
    return KeyOwner(*found) if found else None


def claim_key(connection: Connection, claim: Claim, id: str) -> KeyOwner:
    """Claims an idempotency key for a run, unless it belongs to another one; returns whose it is then."""
    now = time.time()
    row = {**claim._asdict(), "id": id, "created": now}
    statement = insert_or_leave(connection, tables.claims)
    if write_rows(connection, statement, row) > 0:
        return KeyOwner(id, claim.fingerprint)
    claims, recorded = tables.claims.c, exists().where(tables.runs.c.id == tables.claims.c.id)
    same = (claims.caller == claim.caller, claims.key == claim.key)
    connection.execute(delete(tables.claims).where(*same, claims.created < now - _STALE_SECONDS, ~recorded))
    write_rows(connection, statement, row)
    return KeyOwner(*connection.execute(select(claims.id, claims.fingerprint).where(*same)).one())


def add_items(connection: Connection, items: Iterable[Item], *, outbox: bool) -> None:
    sorted_out = _sorted_out(items)
    for kind, some in sorted_out.items():
        table = _TABLE_OF[kind]
        write_rows(connection, insert_or_leave(connection, table), *(tables.item_row(item) for item in some))
    if outbox:
        posts = _line_posts(sorted_out.get(LogLine, [])) + _alert_posts(sorted_out.get(Alert, []))
        if posts:
            _post(connection, posts)


def _sorted_out(items: Iterable[Item]) -> dict[type, list[Item]]:
    found: dict[type, list[Item]] = {}
    for item in items:
        found.setdefault(type(item), []).append(item)
    return found


def _line_posts(lines: Iterable[Any]) -> list[dict[str, Any]]:
    """Lines never change, so the outbox names them by their numbers, from the first to the last."""
    spans: dict[str, list[int]] = {}
    for line in lines:
        span = spans.setdefault(line.container_id, [line.number, line.number])
        span[:] = min(span[0], line.number), max(span[1], line.number)
    return [{"kind": "lines", "id": id, "body": json.dumps(span)} for id, span in spans.items()]


def _alert_posts(alerts: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"kind": "alert", "id": alert.container_id, "body": json.dumps(tables.item_row(alert))} for alert in alerts]


def _post(connection: Connection, rows: list[dict[str, Any]]) -> None:
    if connection.dialect.name == "postgresql":
        # A number that is handed out first may be committed last, and the syncer would have passed it by.
        connection.execute(select(func.pg_advisory_xact_lock(_OUTBOX_LOCK)))
    connection.execute(insert(tables.outbox), rows)
