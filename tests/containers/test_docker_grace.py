"""Stopping a guest in a container: SIGTERM for all that it started, a grace, then SIGKILL."""

from __future__ import annotations

import pytest

import belljar
from belljar.engine.engine import Engine
from engines import FLAVOURS, engines, nothing_left
from stopping import IGNORES, SAVES, stopped_at_work

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]


@pytest.fixture(params=list(FLAVOURS))
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


async def test_a_guest_may_save_its_work_when_it_is_stopped(engine: Engine) -> None:
    result = await stopped_at_work(SAVES, engine, engine.settings.backend, grace=10)
    assert (result.status, result.exit_code) == ("aborted", None)
    assert result.stdout == "working\nchild saved\nsaved\n"
    assert await nothing_left(engine)


async def test_a_guest_that_ignores_the_signal_is_killed_when_its_grace_is_over(engine: Engine) -> None:
    result = await stopped_at_work(IGNORES, engine, engine.settings.backend, grace=0.5)
    assert (result.status, result.stdout) == ("aborted", "working\n")
    assert 500 <= result.duration_ms < 60_000


async def test_without_grace_a_guest_is_killed_at_once(engine: Engine) -> None:
    result = await stopped_at_work(SAVES, engine, engine.settings.backend, grace=0)
    assert (result.status, result.stdout) == ("aborted", "working\n")


async def test_a_guest_over_its_time_may_save_its_work_and_is_a_timeout() -> None:
    code = "trap 'echo saved; exit 7' TERM\necho working\nwhile :; do sleep 0.1; done"
    engine = engines().engine("docker")
    result = await belljar.arun(code, language="bash", backend="docker", engine=engine, timeout=5, grace=10)
    assert (result.status, result.exit_code) == ("timeout", 124)
    assert result.stdout == "working\nsaved\n"
