from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from belljar.engine.engine import Engine
from belljar.testing import escape


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def bait() -> Iterator[escape.Bait]:
    with escape.lay() as laid:
        yield laid


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def attack_of() -> Callable[[str], escape.Attack]:
    return lambda payload: escape.Attack(name="made up", category="files", tries="-", payload=payload, held="-")
