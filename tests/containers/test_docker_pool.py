"""Containers that wait for their word: faster, each for one run, bounded, and gone with whoever made them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

import belljar
from belljar.backends.containers.backend import Containers
from belljar.core.labels import LABEL, OWNER_LABEL
from belljar.engine.engine import Engine
from belljar.host.docker_api import connected, list_containers
from engines import FLAVOURS, IMAGE, PODMAN_AGAIN, engines

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.second_try("an engine that is killed, flooded or counted may miss a deadline on a busy machine"),
]
LOOK = "import os; print(os.getuid(), os.path.exists('/tmp/mine'), os.listdir('/workspace')); open('/tmp/mine', 'w')"


@pytest.fixture(autouse=True)
async def alone() -> AsyncIterator[None]:
    """No test finds another's pool: all may share one event loop."""
    yield
    for engine in MADE:
        if pool := backend_of(engine).pool:
            pool.close()
        assert await none_left(engine)
    MADE.clear()


MADE: list[Engine] = []


def pooled(flavour: str, **options: Any) -> Engine:
    runtime = FLAVOURS[flavour][1]
    MADE.append(made(flavour, {"runtime": runtime, "images": {"execution": IMAGE}, "pool": 2} | options))
    return MADE[-1]


def made(flavour: str, container: dict[str, Any]) -> Engine:
    return engines().engine(flavour, container=container)


@pytest.fixture(params=["docker", "gvisor", PODMAN_AGAIN])
def engine(request: pytest.FixtureRequest) -> Engine:
    return pooled(request.param)


def backend_of(engine: Engine) -> Containers:
    backend = engine.backend(engine.settings.backend)
    assert isinstance(backend, Containers)
    return backend


async def containers(engine: Engine, pid: int = 0) -> list[dict[str, Any]]:
    """Those of one process: by default of this one."""
    async with connected(backend_of(engine).known_address) as client:
        found = await list_containers(client, label=f"{LABEL}=1")
    return [each for each in found if each["Labels"][OWNER_LABEL].split(".")[1] == str(pid or os.getpid())]


async def waiting(engine: Engine) -> set[str]:
    """The names of those that are up and wait, once there are as many as there should be, or time is up."""
    with anyio.move_on_after(60):
        while True:
            found = await containers(engine)
            names = {str(each["Names"][0]).lstrip("/") for each in found if each["State"] == "running"}
            if len(found) == len(names) == 2 and names == backend_of(engine).pool.names:  # type: ignore[union-attr]
                return names
            await anyio.sleep(0.05)
    raise AssertionError(f"not two that wait, and nothing else: {[(each['Names'], each['State']) for each in found]}")


async def none_left(engine: Engine, pid: int = 0) -> bool:
    with anyio.move_on_after(30):
        while left := await containers(engine, pid):
            await anyio.sleep(0.05)
        return True
    raise AssertionError(f"left behind: {left}")


async def run(engine: Engine, code: str, **options: Any) -> belljar.Result:
    return await belljar.arun(code, engine=engine, backend=engine.settings.backend, **options)


async def test_each_run_has_a_container_that_nobody_had_before_and_the_pool_is_filled_again(engine: Engine) -> None:
    await run(engine, "print('first')")
    seen: set[str] = set()
    uids: list[str] = []
    for _ in range(3):
        before = await waiting(engine)
        assert not before & seen
        result = await run(engine, LOOK)
        uid, *state = result.stdout.split(maxsplit=1)
        assert (result.status, state) == ("success", ["False ['main.py']\n"])
        uids.append(uid)
        taken = before - await waiting(engine)
        assert len(taken) == 1, "it came from those that waited"
        seen |= taken
    assert len(set(uids)) == 3


async def test_a_run_from_the_pool_has_its_own_words_input_exit_code_and_figures(engine: Engine) -> None:
    await run(engine, "print('first')")
    await waiting(engine)
    code = "import os, sys; print(os.environ['WHO'], sys.stdin.read(), open('data.txt').read()); sys.exit(4)"
    result = await run(engine, code, env={"WHO": "it's\nme"}, stdin="in", files={"data.txt": b"file"})
    assert (result.exit_code, result.stdout, result.stderr) == (4, "it's\nme in file\n", "")
    assert result.memory_used_mb
    assert result.cpu_ms


async def test_a_run_from_the_pool_is_stopped_by_its_own_clock_and_leaves_nothing_but_the_pool(engine: Engine) -> None:
    await run(engine, "print('first')")
    before = await waiting(engine)
    result = await run(engine, "import time\nprint('up', flush=True)\ntime.sleep(60)", timeout=1)
    assert (result.status, result.stdout) == ("timeout", "up\n")
    assert len(before & await waiting(engine)) == 1


async def test_other_limits_are_another_kind_and_never_served_by_a_container_that_has_less() -> None:
    engine = pooled("docker")
    await run(engine, "print('first')")
    before = await waiting(engine)
    assert (await run(engine, "x = b'x' * 2**27", memory="77M")).status == "oom_killed"
    assert before <= {str(each["Names"][0]).lstrip("/") for each in await containers(engine)}
    shapes = {template.body["HostConfig"]["Memory"] for loop_pool in backend_of(engine).pool._loop_pools.values()  # type: ignore[union-attr]
              for template in loop_pool.templates.values()}  # fmt: skip
    assert shapes == {77 * 2**20, 512 * 2**20}


async def test_one_that_died_while_it_waited_is_not_the_callers_trouble(engine: Engine) -> None:
    await run(engine, "print('first')")
    names = await waiting(engine)
    async with connected(backend_of(engine).known_address) as client:
        for name in names:
            await (await client.containers.get(name)).kill(signal="KILL")
    assert (await run(engine, "print('second')")).stdout == "second\n"
    command = await belljar.arun(command=["echo", "third"], engine=engine, backend=engine.settings.backend)
    assert command.stdout == "third\n"
    assert not names & await waiting(engine)


async def test_what_nobody_asks_for_any_more_is_let_go() -> None:
    brief = pooled("docker", pool_idle=1.0)
    await run(brief, "print('first')")
    assert await none_left(brief)


async def test_a_name_that_stands_for_another_image_is_not_served_from_the_old_one() -> None:
    name = "belljar-test/moving:latest"
    engine = pooled("docker", images={"execution": name}, pool_idle=600.0)
    async with connected(backend_of(engine).known_address) as client:
        await client.images.tag(IMAGE, repo="belljar-test/moving", tag="latest")
        try:
            await run(engine, "print('first')")
            old = await waiting(engine)
            container = await client.containers.get(next(iter(old)))
            await container.commit(repository="belljar-test/moving", tag="latest")  # another id, the same files
            [loop_pool] = backend_of(engine).pool._loop_pools.values()  # type: ignore[union-attr]
            await loop_pool._evict(client)
            loop_pool.wanted.set()
            assert not old & await waiting(engine)
        finally:
            await client.images.delete(name, force=True)


PROGRAM = """
import sys, time, belljar
from belljar.engine.engine import Engine
from belljar.settings import load
engine = Engine(load(container={"pool": 2, "images": {"execution": sys.argv[2]}, "runtime": sys.argv[3]}))
print(belljar.run("print('hi')", engine=engine, backend=sys.argv[1]).stdout, flush=True)
sys.stdin.read()
"""


def program(flavour: str) -> subprocess.Popen[bytes]:
    settings = engines().settings(FLAVOURS[flavour][0])
    environment = os.environ | {
        "DOCKER_SOCKET_PATH": settings.docker_socket, "CONTAINER_HOST": settings.podman_socket,
    }  # fmt: skip
    line = [sys.executable, "-c", PROGRAM, FLAVOURS[flavour][0], IMAGE, FLAVOURS[flavour][1]]
    return subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


async def two_wait(engine: Engine, pid: int) -> None:
    with anyio.fail_after(60):
        while [each["State"] for each in await containers(engine, pid)] != ["running", "running"]:
            await anyio.sleep(0.05)


async def test_a_process_that_ends_takes_its_pool_with_it(engine: Engine) -> None:
    flavour = "gvisor" if engine.settings.container.runtime else engine.settings.backend
    with program(flavour) as child:
        await two_wait(engine, child.pid)
        assert child.stdin
        child.stdin.close()
        assert await anyio.to_thread.run_sync(child.wait) == 0
    assert await containers(engine, child.pid) == []


async def test_a_process_that_is_killed_leaves_containers_that_end_by_themselves_and_are_reaped(engine: Engine) -> None:
    flavour = "gvisor" if engine.settings.container.runtime else engine.settings.backend
    with program(flavour) as child:
        await two_wait(engine, child.pid)
        child.kill()
    with anyio.fail_after(30):
        while any(each["State"] == "running" for each in await containers(engine, child.pid)):
            await anyio.sleep(0.05)
    await backend_of(engine).reap()
    assert await none_left(engine, child.pid)


async def test_a_backend_that_nobody_holds_any_more_lets_its_pool_go() -> None:
    engine = pooled("docker")
    await run(engine, "print('first')")
    await waiting(engine)
    MADE.clear()
    watcher = made("docker", {"images": {"execution": IMAGE}})
    del engine
    gc.collect()
    assert await none_left(watcher)


async def test_orphans_are_looked_for_in_rounds() -> None:
    engine = pooled("docker", pool=0, reap_interval=0.2)
    with program("docker") as child:
        await two_wait(engine, child.pid)
        await run(engine, "print('this starts the rounds')")
        assert len(await containers(engine, child.pid)) >= 2, "their owner is alive"
        child.kill()
        child.wait()
        assert await none_left(engine, child.pid)
