"""Engines that die, hang or have no room, and containers that somebody else lays hands on.

Each ends in a typed error, leaves nothing behind, and the next run works.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.images.progress import Progress
from engines import FLAVOURS, IMAGE, Engines, engines, left_behind, nothing_left, run, served
from image_engine import ImageEngine, Registry, serving
from witness import eventually

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.second_try("an engine that is killed, flooded or counted may miss a deadline on a busy machine"),
]
SLEEP = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(60)"
_START = re.compile(rb"^POST \S*/containers/\w+/start")
_REMOVAL = re.compile(rb"^DELETE \S*/containers/")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process makes its temporary files, so that none can be left unseen."""
    engines()  # whose folder is elsewhere
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def docker() -> Engine:
    return engines().fresh_engine("docker")


def mounts(found: Engines) -> list[str]:
    """Of containers: their roots and their folders in memory."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if f" {found.folder}/" in line and re.search(r"/merged |/_data |/shm ", line)]


async def recovered(engine: Engine, found: Engines, temporary: Path) -> bool:
    """The next run works, and nothing of the last one is left."""
    result = await run(engine, "open('a.txt', 'w').write('x')\nprint('again')", collect=["*"], timeout=60)
    assert (result.stdout, [file.path for file in result.files]) == ("again\n", ["a.txt"])
    assert await nothing_left(engine)
    assert mounts(found) == []
    assert list(temporary.iterdir()) == []
    return True


def command(found: Engines, backend: str, *words: str) -> None:
    """Somebody else: Docker's command line, which speaks to Podman too."""
    line = ["docker", "-H", f"unix://{found.sockets[backend]}", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- an engine that dies ---


@asynccontextmanager
async def tapped(socket: str, path: Path, hear: Callable[[bytes], object]) -> AsyncIterator[None]:
    """The engine behind a socket of ours, where all that is said to it is heard before it is passed on."""

    async def pass_on(source: StreamReader, target: StreamWriter, heard: Callable[[bytes], object]) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                heard(data)
                target.write(data)
                await target.drain()
            target.write_eof()

    async def serve(source: StreamReader, target: StreamWriter) -> None:
        with suppress(OSError), closing(target):
            answer, question = await asyncio.open_unix_connection(socket)
            with closing(question):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pass_on, source, question, hear)
                    await pass_on(answer, target, len)
                    tasks.cancel_scope.cancel()

    async with await asyncio.start_unix_server(serve, path):
        yield


def striking(pid: int, words: re.Pattern[bytes]) -> tuple[list[bytes], Callable[[bytes], object]]:
    """Kills once these words are on their way, if it was armed by an empty list; what it heard is in the list."""
    struck: list[bytes] = []

    def hear(data: bytes) -> None:
        if not struck and words.match(data):
            struck.append(data)
            os.kill(pid, signal.SIGKILL)

    return struck, hear


async def test_dockerd_killed_between_create_and_start_is_our_failure(
    docker: Engine, tmp_path: Path, temporary: Path
) -> None:
    found = engines()
    pid = int((found.folder / "docker" / "pid").read_text())
    struck, hear = striking(pid, _START)
    struck.append(b"not yet")
    async with tapped(found.sockets["docker"], tmp_path / "s", hear):
        engine = found._replace(sockets={"docker": str(tmp_path / "s")}).fresh_engine("docker")
        assert (await engine.capabilities("docker")).available
        async with found.restarting("docker"):
            struck.clear()
            with pytest.raises(errors.BackendError) as caught:
                await run(engine, "print(1)")
        assert struck
        assert caught.value.kind in ("start_failed", "execution_failed")
        assert await nothing_left(engine), "and without being asked to look for it"
    assert await recovered(docker, found, temporary)


async def test_dockerd_killed_while_a_container_is_removed_is_asked_again_when_it_is_back(
    docker: Engine, tmp_path: Path, temporary: Path
) -> None:
    found = engines()
    pid = int((found.folder / "docker" / "pid").read_text())
    struck, hear = striking(pid, _REMOVAL)
    struck.append(b"not yet")
    async with tapped(found.sockets["docker"], tmp_path / "s", hear):
        engine = found._replace(sockets={"docker": str(tmp_path / "s")}).fresh_engine("docker")
        assert (await engine.capabilities("docker")).available
        assert await nothing_left(engine)
        async with found.restarting("docker"):
            struck.clear()
            assert (await run(engine, "print(1)")).stdout == "1\n", "nobody waits for the removal"
            with anyio.fail_after(30):
                while not struck:
                    await anyio.sleep(0.01)
        assert await nothing_left(engine), "and without being asked to look for it"
    assert await recovered(docker, found, temporary)


async def test_podman_killed_in_mid_run_is_our_failure_and_its_container_goes_when_it_is_back(temporary: Path) -> None:
    found = engines()
    engine = found.fresh_engine("podman")
    async with found.restarting("podman") as pid:
        with pytest.raises(errors.ExecutionFailed):
            await run(engine, SLEEP, on_stdout=lambda _: os.kill(pid, signal.SIGKILL))
    assert await nothing_left(engine), "its guests outlive Podman's service, and are removed all the same"
    assert await recovered(engine, found, temporary)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("registry")) as found:
        yield found


async def test_dockerd_killed_in_mid_pull_is_a_typed_error_and_no_half_image_has_a_name(
    docker: Engine, registry: Registry, tmp_path: Path, temporary: Path
) -> None:
    found = engines()
    bench = ImageEngine(found.sockets["docker"], tmp_path)
    name = registry.name("halved:1")
    digest = await bench.publish(name, os.urandom(64 << 20))
    seen: list[Progress] = []
    async with found.restarting("docker") as pid:

        def strike(progress: Progress) -> None:
            seen.append(progress)
            if progress.step == "Downloading":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        with pytest.raises(errors.BackendError) as caught:
            await bench.images().pull(name, listener=strike)
    assert 0 < seen[-1].current < seen[-1].total, "it was killed in the middle"
    assert caught.value.kind == "not_available"
    assert not bench.has(name.rpartition(":")[0])
    assert (await bench.images().pull(name)).image.digest == digest
    bench.docker("rmi", "-f", name)
    assert await recovered(docker, found, temporary)


async def test_dockerd_killed_in_mid_build_is_a_typed_error_and_no_half_image_has_a_name(
    docker: Engine, tmp_path: Path, temporary: Path
) -> None:
    found = engines()
    bench = ImageEngine(found.sockets["docker"], tmp_path)
    before = set(bench.docker("ps", "-aq").split())
    project = bench.project(f"FROM {IMAGE}\nRUN echo up; exec sleep 31415\n")
    async with found.restarting("docker") as pid:

        def strike(progress: Progress) -> None:
            if progress.step.strip() == "up":
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(errors.BackendError) as caught:
            await bench.images().build(project, "halved:1", listener=strike)
    assert caught.value.kind in ("not_available", "execution_failed")
    assert not bench.has("halved:1")
    left = set(bench.docker("ps", "-aq").split()) - before
    try:
        assert eventually(lambda: set(bench.docker("ps", "-q").split()) <= before, 60), "the step does not run on"
        # The engine's builder gives its containers no label: what it left when it was killed, nobody can tell for ours.
        assert [bench.docker("inspect", "-f", "{{.Config.Labels}}", each) for each in left] == ["map[]"]
    finally:
        bench.docker("rm", "-f", *left)  # the tests after this one count mounts
    (project / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo up\n")
    report = await bench.images().build(project, "halved:1")
    assert report.ok, report
    bench.docker("rmi", "-f", report.id)
    assert await recovered(docker, found, temporary)


# --- an engine that hangs ---


@pytest.mark.parametrize("name", ["docker", "podman"])
async def test_an_engine_that_stops_answering_does_not_hold_a_run_beyond_its_time(name: str, temporary: Path) -> None:
    found = engines()
    engine = found.fresh_engine(name)
    assert (await engine.capabilities(name)).available
    pid = int((found.folder / name / "pid").read_text())
    try:
        with anyio.fail_after(60):
            result = await run(engine, SLEEP, timeout=3, on_stdout=lambda _: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (result.status, result.stdout, result.warnings) == ("timeout", "up\n", ())
    assert result.duration_ms < 10_000, "its processes are ours to kill, and are seen to be dead"
    assert await nothing_left(engine)
    assert await recovered(engine, found, temporary)


# --- somebody else ---


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_container_that_somebody_else_removes_in_mid_run_is_our_failure(flavour: str, temporary: Path) -> None:
    found = engines()
    engine = found.fresh_engine(flavour)

    async def remove(_: str) -> None:
        [name] = await left_behind(engine)
        await anyio.to_thread.run_sync(command, found, engine.settings.backend, "rm", "-f", name.lstrip("/"))

    with pytest.raises(errors.ExecutionFailed) as caught:
        await run(engine, SLEEP, on_stdout=remove)
    assert re.search(r"(?i)no such container|no container with", caught.value.message)
    assert await recovered(engine, found, temporary)


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_container_that_somebody_else_pauses_still_ends_at_its_time(flavour: str, temporary: Path) -> None:
    found = engines()
    engine = found.fresh_engine(flavour)
    assert (await engine.capabilities(engine.settings.backend)).available

    async def pause(_: str) -> None:
        [name] = await left_behind(engine)
        await anyio.to_thread.run_sync(command, found, engine.settings.backend, "pause", name.lstrip("/"))

    with anyio.fail_after(60):
        result = await run(engine, SLEEP, timeout=5, on_stdout=pause)
    assert (result.status, result.stdout) == ("timeout", "up\n")
    assert result.duration_ms < 30_000
    assert await recovered(engine, found, temporary)


# --- a full disk ---


@pytest.fixture(scope="module")
def small() -> Iterator[Engines]:
    engines()  # which installs what is needed
    with served("1500M") as found:
        if why := found.missing.get("docker"):
            pytest.skip(f"NOTHING about full disks was checked: {why}")
        yield found


def fill(found: Engines) -> Path:
    """To the last block; the engine itself may free one meanwhile."""
    ballast = found.folder / "docker" / "data" / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (256 << 20, 1 << 20, *[4096] * 20):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            os.fsync(file.fileno())
            if size == 4096 and os.statvfs(ballast.parent).f_bavail == 0:
                return ballast
    ballast.unlink()
    raise AssertionError("the disk was not full for a moment")


@pytest.mark.parametrize("collect", [[], ["*"]], ids=["one container", "with folders"])
async def test_a_run_on_a_full_disk_says_so_and_works_when_there_is_room(
    collect: list[str], small: Engines, temporary: Path
) -> None:
    engine = small.fresh_engine("docker")
    assert (await engine.capabilities("docker")).available
    ballast = fill(small)
    try:
        with pytest.raises(errors.StartFailed, match="no space left on device") as caught:
            await run(engine, "print(1)", collect=collect)
        assert "make room" in caught.value.fix
        offer = await small.fresh_engine("docker").capabilities("docker")
        assert not offer.available
        assert "no space left on device" in offer.why_not
    finally:
        ballast.unlink()
    assert await recovered(engine, small, temporary)


async def test_a_disk_that_fills_in_mid_run_does_not_cost_the_run_its_result(small: Engines, temporary: Path) -> None:
    engine = small.fresh_engine("docker")
    code = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(1)\nprint('done')"
    try:
        result = await run(engine, code, on_stdout=lambda _: fill(small), timeout=30)
    finally:
        (small.folder / "docker" / "data" / "ballast").unlink()
    assert (result.status, result.stdout) == ("success", "up\ndone\n")
    assert await recovered(engine, small, temporary)


async def test_a_pull_onto_a_full_disk_says_so_and_works_when_there_is_room(
    registry: Registry, small: Engines, tmp_path: Path, temporary: Path
) -> None:
    bench = ImageEngine(small.sockets["docker"], tmp_path)
    name = registry.name("large:1")
    digest = await bench.publish(name, os.urandom(16 << 20))
    before = set(bench.docker("images", "-aq", "--no-trunc").split())
    ballast = fill(small)
    try:
        with pytest.raises(errors.PullFailed, match="no space left on device") as caught:
            await bench.images().pull(name)
        assert "make room" in caught.value.fix
        assert set(bench.docker("images", "-aq", "--no-trunc").split()) == before
    finally:
        ballast.unlink()
    assert (await bench.images().pull(name)).image.digest == digest
    assert await recovered(small.fresh_engine("docker"), small, temporary)
