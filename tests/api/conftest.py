"""What several of these tests need: a PostgreSQL, a store on either database, a server and its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.client.client import Client
from postgres_server import PostgresServer, postgres_server
from serving import Server, served


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Each test has a database of its own there; one that kills it starts it again."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/data/records.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_url()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as one:
        yield one
