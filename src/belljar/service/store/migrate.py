"""Brings the tables of a store to their newest state."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, func, inspect, select, text

from belljar.core import errors
from belljar.service.store import tables

_MIGRATION_LOCK = 0x62656C6C  # any number, the same in all of ours


def migrate(connection: Connection) -> None:
    """Runs the migrations that are missing, within the transaction of `connection`.

    It is all of them or none, by one process at a time.

    Raises:
        NotAvailable: the tables are newer than this Belljar knows.
    """
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
    """Returns the migration that a store is at; None if it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found
