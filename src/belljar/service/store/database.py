"""The seam between the store and its databases: what SQLite (`sqlite`) and PostgreSQL (`postgres`) both can do.

`write` and `read` take a function of a SQLAlchemy connection and run it in a transaction of its own. The functions are
the same for both databases.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, exc

from belljar.core import errors

T = TypeVar("T")
Work = Callable[[Connection], T]
READERS = 4  # connections for reading, besides the one for writing


class Trouble(Enum):
    """What an error of a database means for the write that met it."""

    FULL = "full"  # no room: trying again at once does not help
    DOWN = "down"  # not there: it may be back in a moment
    WRONG = "wrong"  # this write, not the database


class Committed(NamedTuple, Generic[T]):
    """The value of a transaction that was committed. (The value itself may be None.)"""

    value: T


class Database(Protocol):
    """One database. `where` names it for people, without a password."""

    name: str
    where: str

    async def prepare(self, work: Work[None]) -> None:
        """Makes the place where the records go, and runs `work` in it, which brings its tables up to date.

        Processes that meet at an empty store do so one after the other.
        """
        ...

    def check(self) -> None:
        """Raises NotAvailable if the place where the records go is not the one that was opened."""
        ...

    async def write(self, work: Work[T]) -> T:
        """Runs `work` in a transaction, commits it, and returns its value."""
        ...

    def write_inline(self, work: Work[T]) -> Committed[T] | None:
        """Does the same in this thread, if nobody has to wait for that. None: it could not, and nothing was done."""
        ...

    def read_inline(self, work: Work[T]) -> Committed[T] | None:
        """Runs `work`, which changes nothing, in this thread, if nobody has to wait for that. None: it could not."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Runs `work` in a transaction that changes nothing, and returns its value."""
        ...

    async def close(self) -> None: ...

    def judge(self, error: Exception) -> Trouble:
        """Says what an error that `write` or `read` raised means."""
        ...

    def explain(self, error: Exception) -> errors.BelljarError:
        """Returns the error to raise instead of one that `write` or `read` raised."""
        ...


def reason(error: Exception) -> str:
    """Returns the first line of what the driver said."""
    cause = getattr(error, "orig", None) or error
    message = str(cause).strip() or type(cause).__name__
    return message.splitlines()[0].rpartition(">: ")[2][:200]


def refusal(error: Exception) -> errors.BelljarError:
    """Returns the error to raise where the write was wrong, and not the database."""
    if isinstance(error, errors.BelljarError):
        return error
    if isinstance(error, exc.IntegrityError | sqlite3.IntegrityError):  # SQLite's driver is also called directly
        return errors.InvalidRequest("there is such a record already", fix="take another id")
    if isinstance(error, exc.DBAPIError | sqlite3.Error | UnicodeError | OverflowError):
        return errors.InvalidRequest(f"that cannot be recorded: {reason(error)}")
    return errors.ExecutionFailed(f"the store failed: {type(error).__name__}: {reason(error)}")
