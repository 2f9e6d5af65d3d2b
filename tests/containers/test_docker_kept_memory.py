"""A box of containers holds no more memory than it was given, however many containers it takes to fill it."""

from __future__ import annotations

import anyio
import pytest

import belljar
from belljar.core.result import Usage
from belljar.core.values import MIB
from belljar.engine.engine import Engine
from engines import FLAVOURS, engines

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
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


@pytest.fixture(
    params=[pytest.param(name, marks=() if name == "docker" else pytest.mark.exhaustive) for name in FLAVOURS]
)
def containers(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


def sandbox(engine: Engine, **options: str) -> belljar.AsyncSandbox:
    return belljar.AsyncSandbox(engine=engine, backend=engine.settings.backend, timeout=60, **options)


async def test_files_of_many_commands_stay_within_the_memory_of_the_box(containers: Engine) -> None:
    async with sandbox(containers, memory="128M", disk="1G") as box:
        for number in range(3):
            for folder in ("workspace", "tmp"):
                last = await box.run(FILL.format(folder=folder, name=number, size=40))
        looked = await box.run(LOOK)
        if looked.ok:
            assert int(looked.stdout) <= (128 + 64) * MIB
        assert "oom_killed" in (last.status, looked.status)


async def test_the_figure_of_a_kept_box_has_the_files_of_earlier_commands_in_it(containers: Engine) -> None:
    async with sandbox(containers, memory="512M") as box:
        for number in range(3):
            assert (await box.run(FILL.format(folder="tmp", name=number, size=30))).ok
        up, cancel, seen = anyio.Event(), belljar.Cancel(), list[Usage]()
        async with anyio.create_task_group() as tasks:
            code = "import time\nprint('up', flush=True)\ntime.sleep(60)"
            tasks.start_soon(lambda: box.run(code, on_stdout=lambda _: up.set(), cancel=cancel))
            await up.wait()
            seen.append(await box.lease.box.measure())  # type: ignore[attr-defined]
            cancel.cancel()
        assert (seen[0].memory or 0) >= 90 * MIB


async def test_empty_files_of_many_commands_are_limited_in_number(containers: Engine) -> None:
    async with sandbox(containers, memory="256M", disk="4M") as box:
        ends = [(await box.run(FLOOD.format(number=1500))).status for _ in range(2)]
        alone = await belljar.arun(
            FLOOD.format(number=3000), engine=containers, backend=containers.settings.backend, disk="4M", timeout=60
        )
    assert ends == ["success", "disk_limit"]
    if containers.settings.backend == "docker" and not containers.settings.container.runtime:
        assert alone.status == "disk_limit"
