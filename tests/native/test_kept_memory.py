"""A box that is kept holds no more memory than it was given, however many commands it takes to fill it."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.backends.native.backend import Native
from belljar.core.values import MIB
from belljar.engine.engine import Engine
from belljar.host import cgroups
from belljar.settings import load
from witness import Traces

pytestmark = pytest.mark.anyio
FILL = "open('/{folder}/{name}', 'wb').write(bytes({size} * 2**20))"
LOOK = """
import os
folders = [os.statvfs(folder) for folder in ("/workspace", "/tmp")]
print(sum((facts.f_blocks - facts.f_bfree) * facts.f_frsize for facts in folders))
"""
FLOOD = """
import os, time
for n in range({number}):
    os.close(os.open(f"{{time.time_ns()}}-{{n}}", os.O_CREAT | os.O_WRONLY))
"""


def grouped() -> bool:
    return isinstance(cgroups.detect(), cgroups.Cgroups)


async def held(sandbox: belljar.AsyncSandbox) -> int:
    return int((await sandbox.run(LOOK)).stdout)


@pytest.mark.skipif(not grouped(), reason="NOT SHOWN: no control groups here")
async def test_files_of_many_commands_stay_within_the_memory_of_the_box(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend="native", memory="64M", disk="1G") as sandbox:
        for number in range(4):
            for folder in ("workspace", "tmp"):
                await sandbox.run(FILL.format(folder=folder, name=number, size=40))
        looked = await sandbox.run("import shutil\nprint('still here')")
        if looked.ok:  # else it is full to the brim
            assert await held(sandbox) <= 100 * MIB
        assert looked.status in ("success", "oom_killed")


@pytest.mark.skipif(not grouped(), reason="NOT SHOWN: no control groups here")
async def test_a_box_whose_workspace_is_full_can_still_be_cleared(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend="native", memory="64M", disk="1G") as sandbox:
        for number in range(4):
            last = await sandbox.run(FILL.format(folder="workspace", name=number, size=20))
        assert last.status == "disk_limit"
        assert 56 * MIB <= await held(sandbox) <= 66 * MIB
        assert (await sandbox.run("import os\nfor n in '0123': os.remove(n)")).ok
        assert (await sandbox.run(FILL.format(folder="workspace", name="x", size=30))).ok


@pytest.mark.skipif(not grouped(), reason="NOT SHOWN: no control groups here")
async def test_the_figure_of_a_kept_box_has_the_files_of_earlier_commands_in_it(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend="native", memory="256M") as sandbox:
        for number in range(3):
            assert (await sandbox.run(FILL.format(folder="tmp", name=number, size=30))).ok
        up, cancel, seen = anyio.Event(), belljar.Cancel(), []
        async with anyio.create_task_group() as tasks:
            code = "import time\nprint('up', flush=True)\ntime.sleep(60)"
            tasks.start_soon(lambda: sandbox.run(code, on_stdout=lambda _: up.set(), cancel=cancel))
            await up.wait()
            seen.append(await sandbox.lease.box.measure())  # type: ignore[attr-defined]
            cancel.cancel()
        assert seen[0]
        assert seen[0].memory >= 90 * MIB


@pytest.mark.parametrize("use_cgroups", [True, False])
async def test_empty_files_of_many_commands_are_limited_in_number(state_dir: Path, use_cgroups: bool) -> None:
    settings = load(state_dir=str(state_dir), backend="native")
    native = Native(state_dir, first_uid=settings.user_uid, path=settings.path, use_cgroups=use_cgroups)
    engine = Engine(settings, extra=[native])
    async with belljar.AsyncSandbox(engine=engine, backend="native", memory="64M", disk="16M") as sandbox:
        ends = [(await sandbox.run(FLOOD.format(number=6000))).status for _ in range(3)]
        counted = await sandbox.run("import os\nprint(len(os.listdir('.')))")
    assert ends[0] == "success"
    assert ends[-1] == "disk_limit"
    assert int(counted.stdout) <= 8192


@pytest.mark.skipif(not grouped() or os.geteuid() != 0, reason="NOT SHOWN: no control groups here")
async def test_the_group_of_a_kept_box_lives_as_long_as_the_box_and_leaves_nothing(
    engine: Engine, traces: Traces
) -> None:
    found = cgroups.detect()
    assert isinstance(found, cgroups.Cgroups)
    async with belljar.AsyncSandbox(engine=engine, backend="native", memory="64M") as sandbox:
        await sandbox.run("1")
        groups = set(traces.groups())
        assert groups
        [name] = groups
        assert any(path.read_text() for path in found.bases["memory"].glob(f"{name}/*/cgroup.procs")), "no holder in it"
        await sandbox.run("1")
        assert set(traces.groups()) == groups
    assert not traces.groups()
