"""The tables, the same in SQLite and PostgreSQL, and how records become rows and rows records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Row,
    Table,
    Text,
)

from belljar.core import errors
from belljar.core.model import Model
from belljar.core.result import Result
from belljar.host.capture import scrub
from belljar.protocol.records import Alert, Key, LogLine, RunRecord, Sample, State

HEAD = "0003"  # the newest migration; a test holds it against the folder
metadata: MetaData = MetaData()

runs: Table = Table(
    "runs", metadata,
    Column("id", Text, primary_key=True),
    Column("origin", Text, nullable=False),  # "": our own; else the store it was pushed from
    Column("caller", Text, nullable=False),
    Column("instance", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("language", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("position", Integer),
    Column("status", Text),  # the result's, to be found by
    Column("result", Text),  # JSON as text: jsonb refuses a NUL, and guests print them
    Column("result_parts", Integer, nullable=False, server_default="0"),  # of a large one; `result` has its head then
    Column("problem", Text),
    Index("runs_by_age", "created", "id"),
    Index("runs_by_caller", "caller", "created"),
    Index("runs_by_state", "state", "created"),
    Index("runs_by_fingerprint", "fingerprint", "ended"),
)  # fmt: skip
result_parts: Table = Table(  # the JSON of large results
    "result_parts", metadata,
    Column("container_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("part", LargeBinary, nullable=False),
)  # fmt: skip
logs: Table = Table(
    "logs", metadata,
    Column("container_id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("timestamp", Double, nullable=False),
    Column("stream", Text, nullable=False),
    Column("message", LargeBinary, nullable=False),  # UTF-8; PostgreSQL's text refuses a NUL
    Column("partial", Boolean, nullable=False),
)  # fmt: skip
samples: Table = Table(
    "samples", metadata,
    Column("container_id", Text, primary_key=True),
    Column("at", Double, primary_key=True),
    Column("cpu_percent", Double, nullable=False),
    Column("memory_mb", Double, nullable=False),
    Column("network_rx_bytes", BigInteger),
    Column("network_tx_bytes", BigInteger),
    Column("disk_read_bytes", BigInteger),
    Column("disk_write_bytes", BigInteger),
    Column("uptime_seconds", Double, nullable=False),
)  # fmt: skip
alerts: Table = Table(
    "alerts", metadata,
    Column("container_id", Text, primary_key=True),
    Column("at", Double, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("over", Boolean, primary_key=True),
    Column("message", Text, nullable=False),
    Index("alerts_by_age", "at"),
)  # fmt: skip
claims: Table = Table(
    "claims", metadata,
    Column("caller", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("created", Double, nullable=False),
)  # fmt: skip
keys: Table = Table(
    "keys", metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),
    Column("revoked", Double),
    Column("rate", Text, nullable=False),
    Column("concurrency", Integer, nullable=False),
    Column("net", Text),  # JSON: a list; NULL: as the settings say
)  # fmt: skip
images: Table = Table(
    "images", metadata,
    Column("engine", Text, primary_key=True),
    Column("reference", Text, primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("facts", Text, nullable=False),
    Column("at", Double, nullable=False),
)  # fmt: skip
notes: Table = Table(  # the store's own: its origin, and how far it was pushed
    "notes", metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)  # fmt: skip
outbox: Table = Table(
    "outbox", metadata,
    # Numbers are never used again, not even when all rows are gone: the other side goes by them.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("body", Text, nullable=False),
    Index("outbox_by_run", "id"),
    sqlite_autoincrement=True,
)  # fmt: skip
arrivals: Table = Table(  # in a shared store: the last number that came from each origin
    "arrivals", metadata,
    Column("origin", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
)  # fmt: skip

_RUN_FIELDS = tuple(RunRecord.model_fields)
_STATES = get_args(State)
BRIEF = [column for column in runs.columns if column.name not in ("origin", "status", "result", "result_parts")]
FULL = [*BRIEF, runs.c.result, runs.c.result_parts]


def as_json(value: Model | Mapping[str, Any], exclude: frozenset[str] = frozenset()) -> str:
    """Serialises data that a guest may have had a hand in: what JSON cannot hold is replaced."""
    if not isinstance(value, Model):
        return json.dumps(scrub(value), default=str)
    try:
        return value.model_dump_json(exclude=set(exclude) or None)
    except (PydanticSerializationError, UnicodeError):
        texts = scrub(value.model_dump(mode="json", exclude={"results", *exclude}))
        displayed = {} if "results" in exclude else {"results": scrub(getattr(value, "results", ()))}
        return json.dumps(texts | displayed)


def run_row(record: RunRecord) -> dict[str, Any]:
    return {"origin": "", "status": None, "result_parts": 0} | run_values(
        {name: getattr(record, name) for name in _RUN_FIELDS}
    )


def run_values(fields: Mapping[str, Any], result_json: str = "") -> dict[str, Any]:
    """Returns fields of a run as columns, or raises InvalidRequest for one there is not."""
    values = dict(fields)
    if unknown := values.keys() - set(_RUN_FIELDS):
        raise errors.InvalidRequest(f"a run has no {', '.join(sorted(unknown))}")
    if "state" in values and values["state"] not in _STATES:
        raise errors.InvalidRequest(f"state: {values['state']!r} is none of {', '.join(_STATES)}")
    if (result := values.get("result")) is not None:
        values |= {"result": result_json or as_json(result), "status": str(result.status)}
    if (problem := values.get("problem")) is not None:
        values["problem"] = as_json(problem)
    return values


def as_run(row: Row[Any], parts: Sequence[bytes] = ()) -> RunRecord:
    """Returns the record of a row. `parts`: of a large result, all of them; without them it has its head only."""
    values = dict(row._mapping)
    values.pop("result_parts", None)
    values["problem"] = json.loads(values["problem"]) if values["problem"] else None
    if text := b"".join(parts) or values.get("result"):
        try:
            values["result"] = Result.model_validate_json(text)
        except ValidationError as error:
            raise errors.ExecutionFailed(
                f"the record {values['id']} holds a result that cannot be read: {error.error_count()} fields",
                fix="it was written by another version of Belljar, or changed: look at it in the database",
            ) from None
    return RunRecord.model_construct(**values)  # what we wrote was valid


def item_row(item: LogLine | Sample | Alert) -> dict[str, Any]:
    values = dict(item.__dict__)
    if isinstance(item, LogLine):
        values["message"] = item.message.encode("utf-8", "surrogatepass")
    else:
        values["at"] = values.pop("timestamp")
    return values


def as_line(row: Row[Any]) -> LogLine:
    values = dict(row._mapping)
    values["message"] = bytes(values["message"]).decode("utf-8", "replace")
    return LogLine.model_construct(**values)


def as_sample(row: Row[Any]) -> Sample:
    return Sample.model_construct(**_with_timestamp(row))


def as_alert(row: Row[Any]) -> Alert:
    return Alert.model_construct(**_with_timestamp(row))


def _with_timestamp(row: Row[Any]) -> dict[str, Any]:
    values = dict(row._mapping)
    values["timestamp"] = values.pop("at")
    return values


def key_row(key: Key) -> dict[str, Any]:
    net = None if key.net is None else json.dumps(key.net)
    return dict(key.__dict__) | {"scopes": " ".join(sorted(key.scopes)), "net": net}


def as_key(row: Row[Any]) -> Key:
    net = None if row.net is None else json.loads(row.net)
    return Key.model_validate(dict(row._mapping) | {"scopes": frozenset(row.scopes.split()), "net": net})
