"""Stopping a guest in a container: SIGTERM for all that it started, a grace, then SIGKILL."""

from __future__ import annotations

from typing import Any

import pytest

import belljar
from belljar.engine.engine import Engine
from engines import FLAVOURS, engines, nothing_left

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
_SAVES = """
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
"""
_IGNORES = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.write(1, b'working\\n')\ntime.sleep(120)"


@pytest.fixture(params=list(FLAVOURS))
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


async def stopped_at_work(code: str, engine: Engine, **options: Any) -> belljar.Result:
    """Runs it, and stops it when it has said that it works."""
    cancel = belljar.Cancel()

    def hear(text: str) -> None:
        if "working" in text:
            cancel.cancel()

    where = {"backend": engine.settings.backend, "engine": engine, "cancel": cancel, "on_stdout": hear}
    return await belljar.arun(code, timeout=60, **where, **options)


async def test_a_guest_may_save_its_work_when_it_is_stopped(engine: Engine) -> None:
    result = await stopped_at_work(_SAVES, engine, grace=10)
    assert (result.status, result.exit_code) == ("aborted", None)
    assert result.stdout == "working\nchild saved\nsaved\n"
    assert await nothing_left(engine)


async def test_a_guest_that_ignores_the_signal_is_killed_when_its_grace_is_over(engine: Engine) -> None:
    result = await stopped_at_work(_IGNORES, engine, grace=0.5)
    assert (result.status, result.stdout) == ("aborted", "working\n")
    assert 500 <= result.duration_ms < 60_000


async def test_without_grace_a_guest_is_killed_at_once(engine: Engine) -> None:
    result = await stopped_at_work(_SAVES, engine, grace=0)
    assert (result.status, result.stdout) == ("aborted", "working\n")


async def test_a_guest_over_its_time_may_save_its_work_and_is_a_timeout() -> None:
    code = "trap 'echo saved; exit 7' TERM\necho working\nwhile :; do sleep 0.1; done"
    engine = engines().engine("docker")
    result = await belljar.arun(code, language="bash", backend="docker", engine=engine, timeout=5, grace=10)
    assert (result.status, result.exit_code) == ("timeout", 124)
    assert result.stdout == "working\nsaved\n"
