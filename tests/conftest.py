"""What the tests share: an engine with a state directory of its own, and a count of what sandboxes leave behind."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import failures
import lanes
import timing
from belljar.client.client import Client
from belljar.engine.engine import Engine
from belljar.settings import load
from postgres_server import PostgresServer, postgres_server
from serving import Server, served
from witness import Traces, counting

# Hypothesis tries a few examples in each `make test`, and many in `make test-all`.
hypothesis.settings.register_profile("small", max_examples=20, deadline=None)
hypothesis.settings.register_profile("full", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run also what is marked exhaustive: make test-all")
    failures.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.getoption("--exhaustive") else "small")
    failures.write_down(config)
    timing.tell(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lanes.leave_out_exhaustive(config, items)
    lanes.allow_second_tries(items)
    lanes.arrange(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Takes six thousand tests out of the collector's sight: it needed 0.4 s to look at them, after each file."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.Lanes:
    return lanes.Lanes(config, log)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Collects what a file of tests left open: in the middle of making a syntax tree, CPython 3.11 cannot take it."""
    yield
    gc.collect()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Readable on the way by any uid, unlike pytest's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="belljar-test-"))
    folder.chmod(0o711)
    yield folder / "state"
    shutil.rmtree(folder)


@pytest.fixture
def engine(state_dir: Path) -> Engine:
    return Engine(load(state_dir=str(state_dir)))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an unprivileged uid can reach."""
    folder = Path(tempfile.mkdtemp(prefix="belljar-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(name="counting")
def _counting() -> Iterator[None]:
    """For tests that count leftovers, or kill a Belljar, whose leftovers another test would count."""
    with counting():
        yield


@pytest.fixture
def traces(state_dir: Path, counting: None) -> Traces:
    """Counts what sandboxes leave on the machine."""
    return Traces(state_dir)


@pytest.fixture(scope="session")
def python() -> str:
    return sys.executable


# --- databases and servers ---


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
