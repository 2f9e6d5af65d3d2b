"""PostgreSQL, over asyncpg."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TypeVar

import anyio
from sqlalchemy import URL, exc

from belljar.core import errors
from belljar.service.store.database import READERS, Committed, Trouble, Work, reason, refusal

T = TypeVar("T")
_CONNECT_SECONDS = 3
_COMMAND_SECONDS = 30
_READ_SECONDS = 20


class Postgres:
    """A database of a server. Implements `Database`."""

    name = "postgresql"

    def __init__(self, url: URL) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        if find_spec("asyncpg") is None:
            raise errors.NotAvailable("PostgreSQL needs asyncpg", fix="pip install 'belljar-sandbox[postgres]'")
        self.where: str = url.set(drivername="postgresql").render_as_string(hide_password=True)
        query = dict(url.query)
        if mode := query.pop("sslmode", None):
            query["ssl"] = mode  # libpq's name of it, and asyncpg's
        self._engine = create_async_engine(
            url.set(drivername="postgresql+asyncpg", query=query), pool_size=1 + READERS, max_overflow=0,
            pool_timeout=_CONNECT_SECONDS, hide_parameters=True,
            connect_args={
                "timeout": _CONNECT_SECONDS, "command_timeout": _COMMAND_SECONDS,
                "server_settings": {"application_name": "belljar"},
            },
        )  # fmt: skip

    async def prepare(self, work: Work[None]) -> None:
        """Runs `work`, which takes a lock of its own. Who runs the server has made the database."""
        await self.write(work)

    def check(self) -> None:
        """A server's address is always the one that was opened; whether it answers is seen by asking."""

    async def write(self, work: Work[T]) -> T:
        """Runs `work` in a transaction."""
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    def write_inline(self, work: Work[T]) -> Committed[T] | None:
        """Never does: the database is on the other side of a socket."""
        return None

    def read_inline(self, work: Work[T]) -> Committed[T] | None:
        """Never does, either."""
        return None

    async def read(self, work: Work[T]) -> T:
        """Runs `work` in a transaction, and once more where the connection was found to be broken."""
        with anyio.fail_after(_READ_SECONDS):
            try:
                return await self.write(work)
            except Exception as error:
                if self.judge(error) is not Trouble.DOWN:
                    raise
            return await self.write(work)  # connections that died while nobody used them are gone now

    async def close(self) -> None:
        """Closes all connections, and does not wait long for a server that does not answer."""
        with anyio.move_on_after(_CONNECT_SECONDS, shield=True):
            await self._engine.dispose()

    def judge(self, error: Exception) -> Trouble:
        """Goes by the SQLSTATE, and by the kind of exception where there is none."""
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
        """Says what keeps the database from being written or read, and where it is."""
        match self.judge(error):
            case Trouble.FULL:
                return errors.NotAvailable(
                    "records cannot be written: the database has no room", fix=f"make room on the disk of {self.where}"
                )
            case Trouble.DOWN:
                return errors.NotAvailable(
                    f"records cannot be reached: {reason(error)}", fix=f"see whether PostgreSQL runs at {self.where}"
                )
        if str(_sqlstate(error) or "")[:2] in ("28", "3D", "42"):
            fix = f"check user, password, database and rights at {self.where}"
            return errors.NotAvailable(f"records cannot be kept: {reason(error)}", fix=fix)
        return refusal(error)


def _sqlstate(error: BaseException | None) -> str | None:
    """Finds asyncpg's own error, which lies some wrappings deep, and not always at the same depth."""
    for _ in range(6):
        if error is None or isinstance(code := getattr(error, "sqlstate", None), str):
            return code if error is not None else None
        error = getattr(error, "orig", None) or error.__cause__
    return None
