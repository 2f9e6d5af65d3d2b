"""What is special to living sandboxes on container engines: whose hand does what, and how their end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import belljar
from belljar.core import errors
from belljar.core.process import shell
from belljar.engine.engine import Engine
from engines import backend_of, engines, left_behind, nothing_left

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.second_try("an engine that is killed or stopped may miss a deadline on a busy machine"),
]
LIVING = ("docker", "podman")


@pytest.fixture(params=LIVING)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


@asynccontextmanager
async def living(engine: Engine, **options: object) -> AsyncIterator[belljar.AsyncSandbox]:
    box = belljar.AsyncSandbox(engine=engine, backend=engine.settings.backend, living=True, **options)  # type: ignore[arg-type]
    async with box:
        yield box
    assert await nothing_left(engine)


async def test_ending_one_of_many_commands_ends_what_it_started_and_nothing_else(engine: Engine) -> None:
    async with living(engine) as box:
        others = [await box.start("sleep 1000 & sleep 1001") for _ in range(3)]
        doomed = await box.start("sleep 2000 & setsid sleep 2001 & sleep 2002")
        looks = await box.exec(shell("sleep 3000 & echo $!"))
        await doomed.kill()
        assert all(one.running for one in others)
        left = [one.command for one in await box.processes() if one.command.startswith("sleep")]
        assert sorted(left) == ["sleep 1000"] * 3 + ["sleep 1001"] * 3 + ["sleep 3000"]
        assert int(looks.stdout) in [one.pid for one in await box.processes()]


async def test_what_outlives_its_parent_and_ignores_the_signal_is_killed_with_the_command(engine: Engine) -> None:
    async with living(engine) as box:
        stubborn = "setsid sh -c 'trap \"\" TERM; echo up; while :; do sleep 1; done' & wait"
        doomed = await box.start(stubborn)
        with anyio.fail_after(30):
            async for chunk in doomed.output():
                if "up" in chunk.text:
                    break
        assert (await doomed.kill()).status == "aborted"
        assert await box.processes() == ()


async def test_what_is_ours_in_the_container_is_not_listed_and_cannot_be_ended_by_the_guest(engine: Engine) -> None:
    async with living(engine) as box:
        one = await box.start(["sleep", "1000"])
        with anyio.fail_after(30):  # it is a program of ours until it has become that
            while [(each.command, each.pid) for each in await box.processes()] != [("sleep 1000", one.pid)]:
                await anyio.sleep(0.01)
        ended = await box.exec(shell("kill -KILL -1; echo still here"))
        assert ended.exit_code != 0 or ended.stdout == "still here\n"
        assert (await one.wait(30)).exit_code == 137
        assert (await box.exec(["echo", "again"])).stdout == "again\n"


async def test_our_own_programs_in_the_container_are_not_those_that_the_guest_put_on_its_path(engine: Engine) -> None:
    async with living(engine) as box:
        for name in ("sh", "tar", "rm", "cat", "env", "kill"):
            trap = f"#!/bin/sh\necho {name} >>/tmp/trapped\nexit 1\n"
            await box.files.write(f"~/.local/bin/{name}", trap, mode=0o755)
        assert (await box.exec([sys_python(), "/inputs/a.py"], files={"a.py": b"print(1)"})).stdout == "1\n"
        one = await box.start(["/bin/sleep", "1000"])
        assert await one.signal("TERM")
        await one.wait(30)
        await box.write("b.txt", b"b")
        assert await box.read("b.txt") == b"b"
        assert not await box.files.exists("/tmp/trapped")


def sys_python() -> str:
    return "/usr/bin/python3"


async def test_a_port_of_the_box_is_reached_and_one_of_the_host_is_not(engine: Engine) -> None:
    async with living(engine) as box, await anyio.create_tcp_listener(local_host="127.0.0.1") as ours:
        port = ours.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(ConnectionRefusedError):
            await box.dial(port)
        await box.start(["python3", "-m", "http.server", str(port), "--bind", "127.0.0.1"])
        await box.wait_for_port(port, timeout=60)
        async with await box.dial(port) as line:
            await line.send(b"GET / HTTP/1.0\r\n\r\n")
            assert (await line.receive()).startswith(b"HTTP/1.0 200")


async def test_a_paused_box_stands_still_and_goes_on(engine: Engine) -> None:
    async with living(engine) as box:
        ticking = await box.start("while :; do echo tick; sleep 0.05; done")
        await box.pause()
        heard = ticking.log.last
        await box.resume()
        with anyio.fail_after(30):
            async for chunk in ticking.output(heard):
                assert chunk.text
                break


async def test_a_runtime_with_a_kernel_of_its_own_says_why_it_has_no_living_sandboxes() -> None:
    offer = await engines().engine("gvisor").capabilities("docker")
    assert offer.living is None
    assert any("no living sandboxes: runsc" in note for note in offer.notes)
    with pytest.raises(errors.PolicyDenied, match="no living sandboxes"):
        async with living(engines().engine("docker"), runtime="runsc"):
            pass


# --- its end ---


async def test_a_container_that_somebody_removes_is_told_in_words(engine: Engine) -> None:
    async with living(engine) as box:
        one = await box.start("sleep 1000")
        [name] = [name for name in await left_behind(engine) if name.endswith("-living")]
        socket = engines().sockets[engine.settings.backend]
        line = ["docker", "-H", f"unix://{socket}", "rm", "-f", name.lstrip("/")]
        await anyio.run_process(line)
        with pytest.raises(errors.ExecutionFailed, match=r"ended|engine"):
            await one.wait(60)
        with pytest.raises(errors.BackendError, match="its container is gone"), anyio.fail_after(60):
            while True:
                await box.exec(["true"])
        with pytest.raises((errors.BackendError, OSError)):
            await box.dial(1)


@pytest.mark.parametrize("name", LIVING)
async def test_an_engine_that_is_killed_ends_the_box_in_words_and_nothing_is_left(name: str) -> None:
    found = engines()
    engine = found.fresh_engine(name)
    async with found.restarting(name) as pid:
        with pytest.raises(errors.BackendError):
            async with belljar.AsyncSandbox(engine=engine, backend=name, living=True) as box:
                one = await box.start("sleep 1000")
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(errors.BackendError):
                    await one.wait(60)
                await box.exec(["true"])
    assert await nothing_left(engine)
    async with living(engine) as box:
        assert (await box.exec(["echo", "again"])).stdout == "again\n"


@pytest.mark.parametrize("name", LIVING)
async def test_an_engine_that_stops_answering_holds_nobody_up(name: str) -> None:
    found = engines()
    engine = found.fresh_engine(name)
    pid = int((found.folder / name / "pid").read_text())
    async with belljar.AsyncSandbox(engine=engine, backend=name, living=True) as box:
        one = await box.start("sleep 1000", timeout=1)
        await box.start("sleep 1000")
        os.kill(pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(60):
                assert (await one.wait()).status == "timeout"
                await box.files.write("a.txt", "a")
                assert await box.files.read("a.txt") == b"a"
                assert len(await box.processes()) == 1
                await box.close()
        finally:
            os.kill(pid, signal.SIGCONT)
    assert await nothing_left(engine)


_OPENED = """
import sys
sys.path.insert(0, {support!r})
import anyio, belljar
from engines import Engines
from pathlib import Path

async def main():
    found = Engines(Path({folder!r}), {sockets!r}, {{}})
    engine = found.fresh_engine({name!r})
    async with belljar.AsyncSandbox(engine=engine, backend={name!r}, living=True) as box:
        await box.start("sleep 1000")
        if {paused}:
            await box.pause()
        print("open", flush=True)
        await anyio.sleep(1000)

anyio.run(main)
"""


@pytest.mark.parametrize("paused", [False, True])
async def test_the_box_of_a_client_that_is_killed_is_removed_by_the_next_one(engine: Engine, paused: bool) -> None:
    found = engines()
    code = _OPENED.format(
        support=str(Path(__file__).parents[1] / "support"), folder=str(found.folder), sockets=found.sockets,
        name=engine.settings.backend, paused=paused,
    )  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout
        assert await anyio.to_thread.run_sync(client.stdout.readline) == b"open\n"
        client.kill()
    await backend_of(engine).reap()
    assert await nothing_left(engine)
