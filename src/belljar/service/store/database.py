"""Two databases behind one seam: `write` and `read` take a function of a connection and run it in a transaction.

The functions are the same for both, plain SQLAlchemy Core. SQLite runs them in a thread: its asyncio driver takes ten
times as long for a commit. PostgreSQL runs them over asyncpg.

What every run needs, its first row and its last change, SQLite writes at once and by itself (`at_once`): a commit
without a checkpoint is a write to the page cache, and takes less than the way to a thread and back, or through
SQLAlchemy. The journal grows meanwhile: somebody has to `write` now and then.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
from anyio import to_thread
from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, func, inspect, make_url, select, text

from belljar.core import errors
from belljar.service.store import tables

T = TypeVar("T")
Work = Callable[[Connection], T]
Statement = tuple[str, Sequence[Mapping[str, Any]]]  # SQL, and its parameters by name for each time
BUSY_SECONDS = 3  # for the lock of another process
_CONNECT_SECONDS = 3
_COMMAND_SECONDS = 30
_READ_SECONDS = 20
_MIGRATION_LOCK = 0x62656C6C  # any number, the same in all of ours
_READERS = 4
_SQLITE_DOWN = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL,
)  # fmt: skip


class Trouble(Enum):
    FULL = "full"  # no room: trying again at once does not help
    DOWN = "down"  # not there: it may be back in a moment
    WRONG = "wrong"  # this write, not the database


class Database(Protocol):
    name: str
    where: str  # for people: no password in it

    async def write(self, work: Work[T]) -> T: ...
    async def read(self, work: Work[T]) -> T: ...
    def at_once(self, *statements: Statement) -> int | None:
        """All of them in one transaction, if that can be: it is committed, or nothing was done (None). Tells how many
        rows the first one changed."""
        ...

    async def close(self) -> None: ...
    def judge(self, error: Exception) -> Trouble: ...
    def explain(self, error: Exception) -> errors.BelljarError: ...


def connect(url: str) -> Database:
    """The database of a URL. Nothing is opened yet."""
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise _no_url() from None
    kind = parsed.drivername.partition("+")[0]
    if kind == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return Sqlite(str(parsed.database))
    if kind in ("postgresql", "postgres"):
        return Postgres(parsed)
    raise _no_url()


def _no_url() -> errors.InvalidRequest:
    return errors.InvalidRequest(
        "that is no address of a store", fix="write sqlite:///PATH or postgresql://USER@HOST/DB"
    )


# --- SQLite ------------------------------------------------------------------------------------


class Sqlite:
    name = "sqlite"

    def __init__(self, path: str) -> None:
        self.where = path
        self._writing, self._reading = anyio.CapacityLimiter(1), anyio.CapacityLimiter(_READERS)
        self._writer = self._engine("BEGIN IMMEDIATE", 1)  # a lock that is upgraded later can fail at once
        self._reader = self._engine("BEGIN", _READERS)
        self._quick: sqlite3.Connection | None = None

    def _engine(self, opening: str, size: int) -> Engine:
        engine = create_engine(
            URL.create("sqlite", database=self.where), pool_size=size, max_overflow=0, pool_timeout=BUSY_SECONDS,
            connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS},
        )  # fmt: skip
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", partial(_open_transaction, opening))
        return engine

    async def write(self, work: Work[T]) -> T:
        return await to_thread.run_sync(_transact, self._writer, work, limiter=self._writing)

    def at_once(self, *statements: Statement) -> int | None:
        try:
            if self._quick is None:
                self._quick = sqlite3.connect(self.where, timeout=0, isolation_level=None)
                _prepare(self._quick, None)
                self._quick.execute("PRAGMA wal_autocheckpoint = 0")
            return _run_all(self._quick, statements)
        except sqlite3.Error:  # somebody else writes, or there is trouble, which `write` will meet and judge
            return None

    async def read(self, work: Work[T]) -> T:
        return await to_thread.run_sync(_transact, self._reader, work, limiter=self._reading)

    async def close(self) -> None:
        if self._quick is not None:
            self._quick.close()
        for engine in (self._reader, self._writer):
            await to_thread.run_sync(engine.dispose)

    def create(self) -> None:
        """The file is ours alone before there is anything in it; its journals are made with the same mode."""
        path = Path(self.where)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o600)

    def judge(self, error: Exception) -> Trouble:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return Trouble.FULL
        return Trouble.DOWN if code in _SQLITE_DOWN or isinstance(error, OSError | exc.TimeoutError) else Trouble.WRONG

    def explain(self, error: Exception) -> errors.BelljarError:
        match self.judge(error):
            case Trouble.FULL:
                return errors.NotAvailable(
                    f"records cannot be written: {_reason(error)}", fix=f"make room on the disk of {self.where}"
                )
            case Trouble.DOWN:
                return errors.NotAvailable(
                    f"records cannot be reached: {_reason(error)}",
                    fix=f"look at {self.where}: its owner, its rights, who holds it",
                )
        return _refusal(error)


def _transact(engine: Engine, work: Work[T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _run_all(connection: sqlite3.Connection, statements: Sequence[Statement]) -> int:
    if [len(rows) for _, rows in statements] == [1]:  # which is a transaction by itself
        return connection.execute(statements[0][0], statements[0][1][0]).rowcount
    connection.execute("BEGIN IMMEDIATE")
    try:
        changed = [connection.executemany(sql, rows).rowcount for sql, rows in statements]
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return changed[0]


def _prepare(connection: Any, record: object) -> None:
    connection.isolation_level = None  # the driver's own idea of transactions begins them too late
    for pragma in (
        "PRAGMA auto_vacuum = INCREMENTAL",  # counts only before the first table
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = NORMAL",
        "PRAGMA journal_size_limit = 67108864",
    ):
        connection.execute(pragma)


def _open_transaction(opening: str, connection: Connection) -> None:
    connection.exec_driver_sql(opening)


# --- PostgreSQL --------------------------------------------------------------------------------


class Postgres:
    name = "postgresql"

    def __init__(self, url: URL) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        if find_spec("asyncpg") is None:
            raise errors.NotAvailable("PostgreSQL needs asyncpg", fix="pip install 'belljar[postgres]'")
        self.where = url.set(drivername="postgresql").render_as_string(hide_password=True)
        query = dict(url.query)
        if mode := query.pop("sslmode", None):
            query["ssl"] = mode  # libpq's word for it, and asyncpg's
        self._engine = create_async_engine(
            url.set(drivername="postgresql+asyncpg", query=query), pool_size=1 + _READERS, max_overflow=0,
            pool_timeout=_CONNECT_SECONDS, hide_parameters=True,
            connect_args={
                "timeout": _CONNECT_SECONDS, "command_timeout": _COMMAND_SECONDS,
                "server_settings": {"application_name": "belljar"},
            },
        )  # fmt: skip

    async def write(self, work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    def at_once(self, *statements: Statement) -> int | None:
        return None  # it is on the other side of a socket

    async def read(self, work: Work[T]) -> T:
        with anyio.fail_after(_READ_SECONDS):
            try:
                return await self.write(work)
            except Exception as error:
                if self.judge(error) is not Trouble.DOWN:
                    raise
            return await self.write(work)  # connections that died while nobody used them are gone now

    async def close(self) -> None:
        with anyio.move_on_after(_CONNECT_SECONDS, shield=True):
            await self._engine.dispose()

    def judge(self, error: Exception) -> Trouble:
        code = str(_sqlstate(error) or "")
        if code.startswith("53"):
            return Trouble.FULL if code == "53100" else Trouble.DOWN
        # Gone, shutting down, starting up; a deadlock or a lock held too long; a standby that takes no writes.
        if code.startswith(("08", "57P", "40", "55P03", "25006")):
            return Trouble.DOWN
        lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
        gone = isinstance(error, OSError | TimeoutError | exc.TimeoutError | exc.InterfaceError | exc.OperationalError)
        return Trouble.DOWN if lost or (gone and not code) else Trouble.WRONG

    def explain(self, error: Exception) -> errors.BelljarError:
        match self.judge(error):
            case Trouble.FULL:
                return errors.NotAvailable(
                    "records cannot be written: the database has no room", fix=f"make room on the disk of {self.where}"
                )
            case Trouble.DOWN:
                return errors.NotAvailable(
                    f"records cannot be reached: {_reason(error)}", fix=f"see whether PostgreSQL runs at {self.where}"
                )
        if str(_sqlstate(error) or "")[:2] in ("28", "3D", "42"):
            fix = f"check user, password, database and rights at {self.where}"
            return errors.NotAvailable(f"records cannot be kept: {_reason(error)}", fix=fix)
        return _refusal(error)


def _sqlstate(error: BaseException | None) -> str | None:
    """asyncpg's own error lies some wrappings deep, and not always at the same depth."""
    for _ in range(6):
        if error is None or isinstance(code := getattr(error, "sqlstate", None), str):
            return code if error is not None else None
        error = getattr(error, "orig", None) or error.__cause__
    return None


def _reason(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    words = str(cause).strip() or type(cause).__name__
    return words.splitlines()[0].rpartition(">: ")[2][:200]


def _refusal(error: Exception) -> errors.BelljarError:
    if isinstance(error, errors.BelljarError):
        return error
    if isinstance(error, exc.IntegrityError):
        return errors.InvalidRequest("there is such a record already", fix="take another id")
    if isinstance(error, exc.DBAPIError | UnicodeError | OverflowError):
        return errors.InvalidRequest(f"that cannot be recorded: {_reason(error)}")
    return errors.ExecutionFailed(f"the store failed: {type(error).__name__}: {_reason(error)}")


# --- migrations --------------------------------------------------------------------------------


def migrate(connection: Connection) -> None:
    """To the newest tables, within the transaction of `connection`: all of it or nothing, by one process at a time."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    current = version(connection)
    if current == tables.HEAD:
        return
    if current is not None and current > tables.HEAD:
        raise errors.NotAvailable(
            f"the store was written by a newer Belljar (its tables are at {current}, ours at {tables.HEAD})",
            fix="upgrade this Belljar, or give it a store of its own",
        )
    from alembic import command  # a third of a second, so only when there is something to do
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def version(connection: Connection) -> str | None:
    """The migration a store is at; None: it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found
