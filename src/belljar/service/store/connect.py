"""Which database a URL means."""

from __future__ import annotations

from sqlalchemy import exc, make_url

from belljar.core import errors
from belljar.service.store.database import Database
from belljar.service.store.postgres import Postgres
from belljar.service.store.sqlite import Sqlite


def connect(url: str) -> Database:
    """Returns the database of a URL. Nothing is opened yet.

    Raises:
        InvalidRequest: the URL is not one of a store.
        NotAvailable: a package that this kind of database needs is not installed.
    """
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
