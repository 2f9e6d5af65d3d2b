"""Nothing is left behind: 200 runs, half of them killed at random moments, and Belljar itself killed with -9."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.control.control import Control
from belljar.core.options import request
from belljar.engine.engine import Engine
from init_takeover import GUEST, KILLER
from witness import Traces, eventually

pytestmark = pytest.mark.anyio
RUNS = 200
SEED = random.Random().randrange(2**32)


def _job(word: str, **options: object) -> object:
    code = "import time, subprocess; subprocess.Popen(['sleep', '60']); time.sleep(0.05)"
    return request(command=["python3", "-c", code, word], timeout=20, **options)


async def _victim(engine: Engine, word: str, kind: str, delay: float) -> None:
    control = Control()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def strike() -> None:
                await anyio.sleep(delay)
                if kind == "cancel":
                    control.stop()
                elif kind == "scope":
                    scope.cancel()
                else:
                    _kill_one(word, "bwrap" if kind == "monitor" else "python3")

            tasks.start_soon(strike)
            keep = {"collect": ("*",)} if delay > 0.05 else {}
            try:
                await engine.run(_job(word, **keep), control=control)  # type: ignore[arg-type]
            except belljar.BackendError:
                assert kind in ("monitor", "guest"), "only a murdered engine may end in an exception of ours"
            tasks.cancel_scope.cancel()


def _kill_one(word: str, name: str) -> None:
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and word in (entry / "cmdline").read_text()
            if ours and (entry / "comm").read_text().startswith(name):
                os.kill(int(entry.name), signal.SIGKILL)
                return
        except (OSError, UnicodeDecodeError):
            continue


async def test_200_runs_half_of_them_killed_at_random_moments_leave_nothing(engine: Engine, traces: Traces) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    slots = anyio.CapacityLimiter(8)
    finished = []

    async def one(number: int) -> None:
        async with slots:
            if number % 2:
                word = f"{traces.word}-{number}"
                await _victim(engine, word, dice.choice(["cancel", "scope", "monitor", "guest"]), dice.random() * 0.12)
            else:
                result = await engine.run(_job(traces.word))  # type: ignore[arg-type]
                finished.append(result.status)

    async with anyio.create_task_group() as tasks:
        for number in range(RUNS):
            tasks.start_soon(one, number)
    assert finished == ["success"] * (RUNS // 2)
    assert eventually(lambda: not traces.all()), traces.all()


def _command(word: str, *extra: str) -> list[str]:
    return [sys.executable, "-m", "belljar", "exec", *extra, "--", "python3", "-c", "import time; time.sleep(60)", word]


def _environment(traces: Traces) -> dict[str, str]:
    return {**os.environ, "BELLJAR_STATE_DIR": str(traces.state_dir)}


def _comm(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


async def test_after_kill_9_of_belljar_its_guests_are_gone(traces: Traces) -> None:
    for round_ in range(4):
        belljar_process = subprocess.Popen(_command(f"{traces.word}-{round_}", "--json"), env=_environment(traces))
        assert eventually(lambda: _guest_started(traces))
        belljar_process.kill()
        belljar_process.wait()
        assert eventually(lambda: not traces.processes()), "a guest outlived Belljar"


async def test_a_guest_that_goes_for_process_1_does_not_outlive_a_killed_belljar(traces: Traces) -> None:
    killer = [sys.executable, "-c", KILLER, GUEST, traces.word]
    done = subprocess.run(killer, env=_environment(traces), stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["process 1 is as before", "0 left"]


async def test_whatever_kill_9_left_at_any_moment_of_the_start_the_next_start_cleans_up(traces: Traces) -> None:
    dice = random.Random(SEED)
    for round_ in range(12):
        command = _command(f"{traces.word}-{round_}", "--collect", "*", "--json")
        belljar_process = subprocess.Popen(command, env=_environment(traces))
        assert eventually(lambda: any(_comm(pid) in ("sh", "setpriv", "bwrap") for pid in traces.processes()))
        await anyio.sleep(dice.random() * 0.03)
        belljar_process.kill()
        belljar_process.wait()
    subprocess.run(
        [sys.executable, "-m", "belljar", "run", "-c", "print(1)"], env=_environment(traces), check=True, timeout=60
    )
    assert eventually(lambda: not traces.all()), traces.all()


def _guest_started(traces: Traces) -> bool:
    """The guest's own process, inside its own pid namespace."""
    ours = os.readlink("/proc/self/ns/pid")
    for pid in traces.processes():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") != ours:
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
async def test_ctrl_c_and_sigterm_kill_the_guest_and_leave_nothing(
    traces: Traces, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(_command(traces.word), env=_environment(traces), stderr=subprocess.PIPE)
    assert eventually(lambda: _guest_started(traces))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"Traceback" not in stderr
    assert eventually(lambda: not traces.all()), traces.all()


async def test_a_session_and_a_sandbox_that_are_closed_leave_nothing(engine: Engine, traces: Traces) -> None:
    async with belljar.AsyncSession(backend="native", engine=engine) as session:
        await session.run(f"import subprocess; subprocess.Popen(['sleep', '60', '{traces.word}'])")
    async with belljar.AsyncSandbox(backend="native", engine=engine) as box:
        await box.write("a.txt", b"hi")
        await box.exec(["sh", "-c", f"(setsid sleep 60 {traces.word} &) ; echo {traces.word}"])
    assert eventually(lambda: not traces.all()), traces.all()


async def test_no_descriptor_and_no_thread_is_leaked_by_a_hundred_runs(engine: Engine) -> None:
    async def hundred() -> None:
        for _ in range(100):
            assert (await engine.run(request(command=["true"]))).ok

    await engine.run(request(command=["true"]))
    before = len(os.listdir("/proc/self/fd"))
    await hundred()
    assert len(os.listdir("/proc/self/fd")) <= before
