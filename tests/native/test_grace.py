"""Stopping a guest: SIGTERM for all that it started, a grace, then SIGKILL."""

from __future__ import annotations

import logging
import textwrap
import threading
from typing import Any

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine

_SAVES = textwrap.dedent("""
    import os, signal, subprocess, sys, time
    child = "import signal, time; signal.signal(15, lambda *_: (print('child saved', flush=True), exit())); "
    child += "print('ready', flush=True); time.sleep(120)"
    kid = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    assert kid.stdout.readline() == "ready\\n"
    def save(*_):
        print(kid.stdout.read(), end="")
        print("saved", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, save)
    os.write(1, b"working\\n")  # at once: a signal must not come between two writes
    time.sleep(120)
""")
_IGNORES = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.write(1, b'working\\n')\ntime.sleep(120)"


def stopped_at_work(code: str, engine: Engine, **options: Any) -> belljar.Result:
    """Runs it, and stops it when it has said that it works."""
    cancel = belljar.Cancel()

    def hear(text: str) -> None:
        if "working" in text:
            threading.Thread(target=cancel.cancel).start()

    return belljar.run(code, backend="native", engine=engine, timeout=60, cancel=cancel, on_stdout=hear, **options)


def test_a_run_over_its_time_may_save_its_work_and_is_still_a_timeout(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "belljar.runs"):
        result = belljar.run(_SAVES, backend="native", engine=engine, timeout=6, grace=10)
    assert (result.status, result.exit_code) == ("timeout", 124)
    assert result.stdout == "working\nchild saved\nsaved\n"
    assert result.duration_ms < 16_000, "who ends in time is not waited for"
    assert [record.levelname for record in caplog.records if result.container_id in record.message] == ["WARNING"]


def test_a_run_that_is_cancelled_may_save_its_work_and_is_still_aborted(engine: Engine) -> None:
    result = stopped_at_work(_SAVES, engine, grace=10)
    assert (result.status, result.exit_code) == ("aborted", None)
    assert result.stdout == "working\nchild saved\nsaved\n"


def test_a_run_that_ignores_the_signal_is_killed_when_its_grace_is_over(engine: Engine) -> None:
    result = stopped_at_work(_IGNORES, engine, grace=0.5)
    assert (result.status, result.exit_code, result.stdout) == ("aborted", None, "working\n")
    assert 500 <= result.duration_ms < 60_000


def test_without_grace_it_is_killed_at_once(engine: Engine) -> None:
    assert stopped_at_work(_SAVES, engine, grace=0).stdout == "working\n"


def test_the_grace_has_a_cap(engine: Engine) -> None:
    with pytest.raises(errors.PolicyDenied, match=r"grace: 11 s is over the cap of 10 s"):
        belljar.run("1", engine=engine, grace=11)


def test_without_control_groups_the_whole_tree_gets_the_signal_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.host.cgroups.detect", lambda: "none, for this test")
    result = stopped_at_work(_SAVES, engine, grace=10)
    assert result.guarantees is not None and "cgroup" not in result.guarantees.limits["memory"]
    assert (result.status, result.stdout) == ("aborted", "working\nchild saved\nsaved\n")
