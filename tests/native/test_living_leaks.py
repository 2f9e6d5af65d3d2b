"""Nothing is left of living sandboxes: closed, cancelled, paused, ended from outside, and with Belljar killed by -9."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.host import ownership
from witness import Traces, descendants, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

SEED = random.Random().randrange(2**32)
AT_ONCE = 6
# A child in a session of its own, one that is nobody's, and one that holds the command's streams; all carry the word.
DAEMONS = """
import os, sys, time
for kind in range(3):
    if os.fork() == 0:
        if kind:
            os.setsid()
        if kind == 2 and os.fork():
            os._exit(0)
        time.sleep(120)
        os._exit(0)
print("left", flush=True)
"""
ENDS = ("close", "close", "scope", "start", "paused", "first", "guests", "expiry")


async def _lived(box: belljar.AsyncSandbox, word: str, dice: random.Random) -> None:
    """Has a sandbox do a bit of everything that it would have to clean up."""
    assert (await box.exec(["python3", "-c", DAEMONS, word])).stdout == "left\n"
    await box.start(
        ["python3", "-c", "import time; time.sleep(120)", word], pty=(80, 24) if dice.random() < 0.5 else None
    )
    server = "import socket, time; s = socket.create_server(('127.0.0.1', 8000)); time.sleep(120)"
    await box.start(["python3", "-c", server, word])
    await box.wait_for_port(8000)
    await (await box.dial(8000)).aclose()
    async with box.files.watch(".", recursive=True):
        await box.files.write("a/b", "text")


async def _one(engine: Engine, word: str, end: str, delay: float, firsts: list[tuple[int, str]]) -> None:
    dice = random.Random(f"{word}{delay}")
    box = belljar.AsyncSandbox(backend="native", engine=engine, expires=3600)
    if end == "start":  # given up while it is opened, or soon after
        with anyio.move_on_after(delay / 4):
            async with box:
                await _lived(box, word, dice)
        return
    with suppress(errors.BelljarError, OSError), anyio.CancelScope() as scope:
        async with box:
            first = box.lease.box._first  # type: ignore[attr-defined]
            firsts += map(_named, (first.pid, first.bubblewrap.pid))
            await _lived(box, word, dice)
            if end == "scope":
                scope.cancel()
            elif end == "paused":
                await box.pause()
            elif end == "first":
                os.kill(first.pid, signal.SIGKILL)
                await box.exec(["true"])
            elif end == "guests":
                await box.exec(["python3", "-c", "import os; os.kill(-1, 9)", word])
            elif end == "expiry":
                box.extend(0.01 + delay)
                await anyio.sleep(2 * delay)


async def _many(engine: Engine, traces: Traces, count: int) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    firsts: list[tuple[int, str]] = []
    async with belljar.AsyncSandbox(backend="native", engine=engine, living=True) as warm:
        await warm.exec(["true"])
    before = len(os.listdir("/proc/self/fd"))
    ours = descendants(os.getpid())
    slots = anyio.CapacityLimiter(AT_ONCE)

    async def one(number: int) -> None:
        async with slots:
            await _one(engine, f"{traces.word}-{number}", ENDS[number % len(ENDS)], dice.random() * 0.3, firsts)

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, number)
    assert len(firsts) >= count
    assert eventually(lambda: not traces.all()), traces.all()
    assert eventually(lambda: not _living(firsts)), "a machine is left"
    assert eventually(lambda: descendants(os.getpid()) <= ours), "processes of ours are left"
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before), _open_files()


def _named(pid: int) -> tuple[int, str]:
    """A process by its number and its start: on a busy machine the number alone may soon be another's."""
    return pid, str(ownership._started(pid))


def _living(processes: list[tuple[int, str]]) -> list[int]:
    found = []
    for pid, started in processes:
        with suppress(OSError, IndexError):
            if started and str(ownership._started(pid)) == started:
                found.append(pid)
    return found


def _carrying(words: list[str]) -> list[int]:
    """The processes that have one of the words as an argument."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if set(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")) & set(words):
                found.append(int(pid))
    return found


def _open_files() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit())


async def test_24_living_boxes_that_end_in_every_way_leave_nothing(engine: Engine, traces: Traces) -> None:
    await _many(engine, traces, 24)


@pytest.mark.exhaustive("200 living boxes, each with a bit of everything")
async def test_200_living_boxes_that_end_in_every_way_leave_nothing(engine: Engine, traces: Traces) -> None:
    await _many(engine, traces, 200)


_BELLJAR = """
import sys, anyio, belljar
from belljar.host import ownership

DAEMONS, word = sys.argv[1:]

async def one(number):
    async with belljar.AsyncSandbox(backend="native", living=True) as box:
        first = box.lease.box._first.pid
        print(first, ownership._started(first), flush=True)
        await box.exec(["python3", "-c", DAEMONS, f"{word}-{number}"])
        await box.start(["python3", "-c", "import time; time.sleep(120)", f"{word}-{number}"], pty=(80, 24))
        async with box.files.watch("."):
            if number % 2:
                await box.pause()
            await anyio.sleep(120)

async def main():
    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(one, number)

anyio.run(main)
"""


async def _murdered(traces: Traces, rounds: int) -> None:
    """Kills Belljar at random moments, before its sandboxes are open to long after; the next start finds all of it."""
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    env = {**os.environ, "BELLJAR_STATE_DIR": str(traces.state_dir)}
    firsts: list[tuple[int, str]] = []
    for number in range(rounds):
        command = [sys.executable, "-c", _BELLJAR, DAEMONS, f"{traces.word}-{number}"]
        victim = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert victim.stdout
        said = victim.stdout.readline()
        await anyio.sleep(dice.random() * 0.6)
        victim.kill()
        said += victim.communicate(timeout=20)[0]
        firsts += [(int(pid), started) for pid, started in re.findall(r"^(\d+) (\d+)$", said, re.MULTILINE)]
        running = [f"{traces.word}-{number}-{box}" for box in (0, 2)]
        assert eventually(lambda: not _carrying(running)), "guests of sandboxes that were not paused outlived Belljar"  # noqa: B023
    subprocess.run([sys.executable, "-m", "belljar", "run", "-c", "1"], env=env, check=True, timeout=60)
    assert eventually(lambda: not traces.all(), 20), traces.all()
    assert eventually(lambda: not _living(firsts)), "a machine outlived Belljar"


async def test_after_kill_9_of_belljar_the_next_start_finds_all_of_its_living_boxes(traces: Traces) -> None:
    await _murdered(traces, 2)


@pytest.mark.exhaustive("kills Belljar 25 times, each with four living boxes")
async def test_after_25_times_kill_9_the_next_start_finds_all_of_the_living_boxes(traces: Traces) -> None:
    await _murdered(traces, 25)


async def test_commands_that_leave_something_running_hold_a_bounded_number_of_our_descriptors(engine: Engine) -> None:
    async with belljar.AsyncSandbox(backend="native", engine=engine, living=True) as box:
        await box.exec(["true"])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(45):
            await box.exec(["sh", "-c", "sleep 100 & exit 0"])
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 64), _open_files()
        assert (await box.exec(["echo", "on"])).stdout == "on\n"
