"""What the store writes: each function puts something into the transaction of a connection, with its outbox rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Insert, Table, bindparam, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from belljar.protocol.records import Alert, LogLine, Sample
from belljar.service.store import tables

Item = LogLine | Sample | Alert
_TABLE_OF: dict[type, Table] = {LogLine: tables.logs, Sample: tables.samples, Alert: tables.alerts}
_OUTBOX_LOCK = 0x626F78


def insert_or_leave(connection: Connection, table: Table) -> Insert:
    """An insert that leaves a row alone that is there already."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def _text(statement: Any) -> str:
    """As SQLite takes it, with parameters by name."""
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="named")))


BEGIN = _text(insert(tables.runs))


@lru_cache
def update_text(*columns: str) -> str:
    """Of a run, whose id is the parameter `of`."""
    values: dict[str, Any] = {name: bindparam(name) for name in columns}
    return _text(update(tables.runs).where(tables.runs.c.id == bindparam("of")).values(values))


@lru_cache
def _item_text(table: Table) -> str:
    return _text(sqlite.insert(table).on_conflict_do_nothing())


def item_texts(items: Iterable[Item]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [
        (_item_text(_TABLE_OF[kind]), [tables.item_row(item) for item in some])
        for kind, some in _sorted_out(items).items()
    ]


def insert_or_replace(connection: Connection, table: Table) -> Insert:
    """An insert that takes the place of the row with its key."""
    maker: Any = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
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
    """`again`: it was tried before, and may have been committed although we were not told."""
    statement = insert_or_leave(connection, tables.runs) if again else insert(tables.runs)
    connection.execute(statement, list(rows))
    if outbox:
        _post(connection, [{"kind": "begin", "id": row["id"], "body": json.dumps(row)} for row in rows])


def change_run(connection: Connection, id: str, values: Mapping[str, Any], *, outbox: bool) -> bool:
    """False: there is no such run."""
    changed = connection.execute(update(tables.runs).where(tables.runs.c.id == id).values(**values)).rowcount > 0
    if outbox and changed:
        # A result can be large and is set once: the outbox names it, the syncer looks it up.
        body = {name: value for name, value in values.items() if name != "result"} | {"+result": "result" in values}
        _post(connection, [{"kind": "change", "id": id, "body": json.dumps(body)}])
    return changed


def add_items(connection: Connection, items: Iterable[Item], *, outbox: bool) -> None:
    sorted_out = _sorted_out(items)
    for kind, some in sorted_out.items():
        table = _TABLE_OF[kind]
        connection.execute(insert_or_leave(connection, table), [tables.item_row(item) for item in some])
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
