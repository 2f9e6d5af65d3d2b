"""Places for MCP servers of the tests, and one that listens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcp_clients import http_server
from serving import Server, served
from witness import Traces


@pytest.fixture
def place() -> Iterator[Server]:
    """Folders and an environment for servers that tests start by themselves."""
    with served(start=False) as server:
        yield server


@pytest.fixture
def traces(place: Server, counting: None) -> Traces:
    return Traces(place.state_dir)


@pytest.fixture(scope="module")
def listening() -> Iterator[str]:
    """One server over HTTP for the tests that leave nothing in it."""
    with served(start=False) as place, http_server(place) as url:
        yield url
