"""What a run says of its own times, from which the order of the groups is kept true."""

from __future__ import annotations

import time

import pytest

import timing


def a_report(nodeid: str, seconds: float, lane: str, ends: float) -> pytest.TestReport:
    report = pytest.TestReport(
        nodeid, (nodeid, 0, nodeid), {}, "passed", None, "call", duration=seconds, start=ends - seconds, stop=ends
    )
    report.worker_id = lane  # type: ignore[attr-defined]
    return report


def test_each_lane_and_the_longest_groups_are_told_and_where_the_table_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "SECONDS", {"unit/test_slow.py": 40.0})
    heard, now = timing.Timing(), time.time()
    for name, seconds, lane in (("slow", 50.0, "gw0"), ("slow", 10.0, "gw0"), ("slower", 90.0, "gw1")):
        heard.pytest_runtest_logreport(a_report(f"tests/unit/test_{name}.py::test_x", seconds, lane, now + seconds))
    said = heard.lines()
    assert said[0].endswith("% of the time")
    assert said[1:3] == [
        "gw0: 60 s of tests, the last ended after 10 s", "gw1: 90 s of tests, the last ended after 90 s",
    ]  # fmt: skip
    assert [line.split() for line in said[4:]] == [
        ["90", "s", "unit/test_slower.py", "(SECONDS", "says", "0)"], ["60", "s", "unit/test_slow.py"],
    ]  # fmt: skip


def test_a_run_of_a_few_tests_says_nothing() -> None:
    heard = timing.Timing()
    assert heard.lines() == []
    heard.pytest_runtest_logreport(a_report("tests/unit/test_quick.py::test_x", 0.1, "gw0", time.time()))
    assert heard.lines() == []


def test_how_busy_the_machine_was_counts_waiting_for_a_disk_as_idle() -> None:
    assert timing._busy([0] * 8, [60, 0, 20, 15, 5, 0, 0, 0]) == pytest.approx(0.8)
