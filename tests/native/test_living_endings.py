"""How things end in living sandboxes of the native backend: a machine that is full, and all that ran in it."""

from __future__ import annotations

import anyio
import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from witness import Traces, eventually

pytestmark = pytest.mark.anyio
_WAIT_SECONDS = 30


async def test_a_machine_full_of_processes_says_so_and_can_be_cleared(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True, pids=12) as box:
        crowd = await box.start(["python3", "-c", _CROWD])
        with anyio.fail_after(_WAIT_SECONDS):
            await anext(crowd.output())
        for attempt in (box.start(["true"]), box.exec(["true"]), box.interpreter()):
            with pytest.raises(errors.Busy, match="as many processes as it may have: 12"):
                await attempt
        await box.files.write("kept", "files are no processes")
        assert len(await box.processes()) <= 12
        await crowd.kill()
        assert (await box.exec(["cat", "kept"])).stdout == "files are no processes"
        assert await box.processes() == ()


_CROWD = """
import os, signal
try:
    while True:
        if os.fork() == 0:
            signal.pause()
except BlockingIOError:
    print("full", flush=True)
signal.pause()
"""


async def test_nothing_is_left_on_the_host_of_what_ran_in_a_living_sandbox(engine: Engine, traces: Traces) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True) as box:
        await box.exec(["sh", "-c", f"trap '' TERM; setsid sh -c 'sleep 3600; : {traces.word}' & sleep 3600 & true"])
        await box.start(["sh", "-c", f"trap '' TERM HUP; sleep 3600; : {traces.word}"], pty=(80, 24))
        await box.start(["python3", "-m", "http.server", "8000"])
        await box.wait_for_port(8000)
        async with box.interpreter() as python, await box.dial(8000):
            await python.run("import subprocess; subprocess.Popen(['sleep', '3600'])")
            assert len(await box.processes()) >= 5
    assert eventually(lambda: not traces.all()), traces.all()
