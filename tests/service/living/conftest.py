"""A server, and living sandboxes of it that are closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from boxes import SANDBOXES, OpenBox
from serving import Server, served

_CONFIG = '[service]\nrate = "100000/minute"\nbody_patience = 60\n'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(MAX_CONTAINERS="16", SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS="60", config=_CONFIG) as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    """Whatever a test leaves open is closed after it."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client
        for record in client.get(SANDBOXES).json():
            client.delete(f"{SANDBOXES}/{record['id']}")


@pytest.fixture
def box(http: httpx2.Client, server: Server) -> OpenBox:
    return OpenBox.opened(http, server.url)
