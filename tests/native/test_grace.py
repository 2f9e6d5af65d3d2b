"""Stopping a guest: SIGTERM for all that it started, a grace, then SIGKILL."""

from __future__ import annotations

import logging

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from stopping import IGNORES, SAVES, stopped_at_work


def test_a_run_over_its_time_may_save_its_work_and_is_still_a_timeout(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "belljar.runs"):
        result = belljar.run(SAVES, backend="native", engine=engine, timeout=6, grace=10)
    assert (result.status, result.exit_code) == ("timeout", 124)
    assert result.stdout == "working\nchild saved\nsaved\n"
    assert result.duration_ms < 16_000, "who ends in time is not waited for"
    assert [record.levelname for record in caplog.records if result.container_id in record.message] == ["WARNING"]


async def test_a_run_that_is_cancelled_may_save_its_work_and_is_still_aborted(engine: Engine) -> None:
    result = await stopped_at_work(SAVES, engine, "native", grace=10)
    assert (result.status, result.exit_code) == ("aborted", None)
    assert result.stdout == "working\nchild saved\nsaved\n"


async def test_a_run_that_ignores_the_signal_is_killed_when_its_grace_is_over(engine: Engine) -> None:
    result = await stopped_at_work(IGNORES, engine, "native", grace=0.5)
    assert (result.status, result.exit_code, result.stdout) == ("aborted", None, "working\n")
    assert 500 <= result.duration_ms < 60_000


async def test_without_grace_it_is_killed_at_once(engine: Engine) -> None:
    result = await stopped_at_work(SAVES, engine, "native", grace=0)
    assert result.stdout == "working\n"


def test_the_grace_has_a_cap(engine: Engine) -> None:
    with pytest.raises(errors.PolicyDenied, match=r"grace: 11 s is over the cap of 10 s"):
        belljar.run("1", engine=engine, grace=11)


async def test_without_control_groups_the_whole_tree_gets_the_signal_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.host.cgroups.detect", lambda: "none, for this test")
    result = await stopped_at_work(SAVES, engine, "native", grace=10)
    assert result.guarantees is not None and "cgroup" not in result.guarantees.limits["memory"]
    assert (result.status, result.stdout) == ("aborted", "working\nchild saved\nsaved\n")
