"""SQLite: one writer, some readers, each transaction in a thread, or at once in the event loop's own.

SQLAlchemy's asyncio driver for SQLite takes ten times as long for a commit as a thread does. A small write takes even
less time inline: a commit without a checkpoint is a write to the page cache, and is over before a thread would have
woken up. Checkpoints wait for the disk, so another thread does them, beside the writers. While something is always
written it may never get to the journal's end, where it could begin anew: it tries again and again while the journal is
long, and only where that is of no avail a commit does the rest, in the thread that writes.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
from anyio import to_thread
from sqlalchemy import URL, Connection, Engine, create_engine, event, exc

from belljar.core import errors
from belljar.service.store.database import READERS, Committed, Trouble, Work, reason, refusal

T = TypeVar("T")
BUSY_SECONDS = 3  # that a write waits for the lock of another process
_PREPARE_SECONDS = 30  # that one process waits until others have made the tables
_PAUSE_SECONDS = 0.02
_CHECKPOINT_SECONDS = 0.5  # between two checkpoints, at least
_SHORT_JOURNAL_PAGES = 1024  # 4 MiB: the next commits may make it that long before it is cut again
_TRIES = 10  # of one checkpoint to reach the end of a longer one
_LONGEST_JOURNAL_PAGES = 8192  # 32 MiB: a commit that makes it longer waits for the disk itself
_INLINE_RUN = 200  # inline writes between two in the thread, which may do that
_DOWN = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL,
)  # fmt: skip


class Sqlite:
    """A file of ours. Implements `Database`."""

    name = "sqlite"

    def __init__(self, path: str) -> None:
        self.where = path
        self._writing, self._reading = anyio.CapacityLimiter(1), anyio.CapacityLimiter(READERS)
        # A lock that is upgraded later can fail at once, so writers take it with their first statement.
        self._writer = self._engine("BEGIN IMMEDIATE", 1, BUSY_SECONDS)
        self._reader = self._engine("BEGIN", READERS, BUSY_SECONDS)
        self._inline_writer = self._engine("", 1, 0)
        event.listen(self._inline_writer, "connect", _never_checkpoint)
        self._inline: Connection | None = None  # kept open: to take one from the pool doubles the time
        self._inline_writes = 0
        self._file: os.stat_result | None = None  # the one that was opened
        self._checkpoints = _Checkpoints(path)

    def _engine(self, opening: str, size: int, busy_seconds: float) -> Engine:
        engine = create_engine(
            URL.create("sqlite", database=self.where), pool_size=size, max_overflow=0, pool_timeout=BUSY_SECONDS,
            connect_args={"check_same_thread": False, "timeout": busy_seconds},
        )  # fmt: skip
        event.listen(engine, "connect", _prepare)
        if opening:
            event.listen(engine, "begin", partial(_open_transaction, opening))
        return engine

    async def write(self, work: Work[T]) -> T:
        """Runs `work` in a transaction, in the one thread that writes."""
        value = await to_thread.run_sync(_transact, self._writer, work, limiter=self._writing)
        self._checkpoints.due()
        return value

    def write_inline(self, work: Work[T]) -> Committed[T] | None:
        """Runs `work` in a transaction here and now, unless somebody else writes or it is time for a checkpoint.

        Whatever goes wrong is left to `write`, which will meet the same trouble, and whose caller judges it.
        """
        self._inline_writes += 1
        if self._inline_writes % _INLINE_RUN == 0:
            return None
        try:
            committed = Committed(_transact_directly(self._inline_connection(), work))
        except Exception:
            return None
        self._checkpoints.due()
        return committed

    def read_inline(self, work: Work[T]) -> Committed[T] | None:
        """Runs a `work` of one statement here and now: who reads waits for no writer."""
        connection = self._inline_connection()
        try:
            return Committed(work(connection))
        except Exception:
            return None
        finally:
            connection.rollback()

    def _inline_connection(self) -> Connection:
        if self._inline is None:
            self._inline = self._inline_writer.connect()
        return self._inline

    def _close_inline(self) -> None:
        if self._inline is not None:
            self._inline.invalidate()
            self._inline.close()
            self._inline = None

    async def read(self, work: Work[T]) -> T:
        """Runs `work` in a thread of its own, beside the writer."""
        return await to_thread.run_sync(_transact, self._reader, work, limiter=self._reading)

    async def close(self) -> None:
        """Closes all connections."""
        self._close_inline()
        await to_thread.run_sync(self._checkpoints.stop)
        for engine in (self._reader, self._writer, self._inline_writer):
            await to_thread.run_sync(engine.dispose)

    async def prepare(self, work: Work[None]) -> None:
        """Makes the file and runs `work` in it, one process after the other.

        The change to a journal that is written ahead (`_prepare`) waits for nobody: two that meet at an empty file
        would both begin it, and one of them be told that the database is locked.
        """
        await to_thread.run_sync(self._prepare_alone, work, limiter=self._writing)

    def _prepare_alone(self, work: Work[None]) -> None:
        self._create()
        with _alone(f"{self.where}.lock"):
            _transact(self._writer, work)

    def _create(self) -> None:
        """Makes the file ours alone before there is anything in it; its journals get the same mode."""
        path = Path(self.where)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o600)
        self._file = path.stat()

    def check(self) -> None:
        """SQLite goes on with a file that was removed, and everything that it writes there is lost at its end."""
        try:
            same = self._file is None or os.path.samestat(os.stat(self.where), self._file)
        except OSError:
            same = False
        if not same:
            raise errors.NotAvailable(
                f"the file of the records was removed or replaced: {self.where}", fix="put it back, and start again"
            )

    def judge(self, error: Exception) -> Trouble:
        """Goes by SQLite's own error codes."""
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return Trouble.FULL
        return Trouble.DOWN if code in _DOWN or isinstance(error, OSError | exc.TimeoutError) else Trouble.WRONG

    def explain(self, error: Exception) -> errors.BelljarError:
        """Says what keeps the file from being written or read, and where it is."""
        match self.judge(error):
            case Trouble.FULL:
                return errors.NotAvailable(
                    f"records cannot be written: {reason(error)}", fix=f"make room on the disk of {self.where}"
                )
            case Trouble.DOWN:
                return errors.NotAvailable(
                    f"records cannot be reached: {reason(error)}",
                    fix=f"look at {self.where}: its owner, its rights, who holds it",
                )
        return refusal(error)


class _Checkpoints:
    """Moves what was committed from the journal into the database, in a thread that ends when nothing was written."""

    def __init__(self, path: str) -> None:
        self._uri = f"file:{quote(path)}?mode=rw"  # it makes no file where there is none
        self._lock = threading.Lock()
        self._is_due = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def due(self) -> None:
        """Something was committed."""
        with self._lock:
            self._is_due = True
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="belljar-checkpoints", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Returns when no checkpoint is under way, and lets no other begin."""
        self._stopping.set()
        if thread := self._thread:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_CHECKPOINT_SECONDS):
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            with suppress(sqlite3.Error), closing(sqlite3.connect(self._uri, uri=True)) as connection:
                self._checkpoint(connection)

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Moves what there is. What comes meanwhile is less each time, until a commit finds nothing left, and begins
        the journal anew."""
        before = 0
        for _ in range(_TRIES):
            _, length, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if length in (before, -1) or length < _SHORT_JOURNAL_PAGES or self._stopping.is_set():
                return
            before = length


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Holds a lock that processes take one after the other, by a file that stays: who removed it would free others."""
    import fcntl  # not on Windows, where this module need only be importable

    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _PREPARE_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {_PREPARE_SECONDS} s") from None
                time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(lock)


def _transact(engine: Engine, work: Work[T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _transact_directly(connection: Connection, work: Work[T]) -> T:
    """Does the same with the driver's own transaction: SQLAlchemy's takes longer than what is done in it."""
    driver: Any = connection.connection.driver_connection
    driver.execute("BEGIN IMMEDIATE")
    try:
        value = work(connection)
        driver.execute("COMMIT")
    finally:
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        connection.rollback()  # of what SQLAlchemy takes to be its transaction, which is over
    return value


def _prepare(connection: Any, record: object) -> None:
    connection.isolation_level = None  # the driver's own idea of transactions begins them too late
    for pragma in (
        "PRAGMA auto_vacuum = INCREMENTAL",  # counts only before the first table
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = NORMAL",
        "PRAGMA journal_size_limit = 67108864",
        f"PRAGMA wal_autocheckpoint = {_LONGEST_JOURNAL_PAGES}",
    ):
        connection.execute(pragma)


def _never_checkpoint(connection: Any, record: object) -> None:
    connection.execute("PRAGMA wal_autocheckpoint = 0")


def _open_transaction(opening: str, connection: Connection) -> None:
    connection.exec_driver_sql(opening)
