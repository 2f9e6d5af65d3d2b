"""What is special to container engines: clients and daemons that die, images that vanish, nonsense for an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import anyio
import pytest
from anyio.abc import SocketStream

import belljar
from belljar.control.callbacks import Cancel
from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.labels import LABEL, OWNER_LABEL
from belljar.core.options import request
from belljar.engine.engine import Engine
from belljar.host import docker_api
from belljar.host.docker_api import connected
from belljar.host.engine_address import DOCKER, EngineAddress
from belljar.settings import load
from engines import FLAVOURS, IMAGE, backend_of, engines, left_behind, nothing_left, run

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
# One write: `print` without a buffer makes two, and is heard twice.
UP = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(1)"
SLEEP = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(60)"


@pytest.fixture(params=FLAVOURS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


@pytest.fixture
def docker() -> Engine:
    return engines().engine("docker")


@pytest.mark.parametrize("flavour", ["docker", "podman"])
async def test_an_engine_is_asked_for_its_version_once_in_a_probe_and_not_by_who_connects_soon_after(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = aiodocker.Docker._query_json

    async def noted(self: aiodocker.Docker, path: Any, *words: Any, **named: Any) -> Any:
        asked.append(str(path))
        return await ask(self, path, *words, **named)

    engine = engines().fresh_engine(flavour)
    monkeypatch.setattr(docker_api, "_SPOKEN", {})
    monkeypatch.setattr(aiodocker.Docker, "_query_json", noted)
    assert (await engine.capabilities(flavour)).available
    assert asked.count("version") == 1
    async with connected(backend_of(engine).address) as client:
        assert (await client.system.info())["Containers"] >= 0
    assert asked.count("version") == 1
    docker_api._SPOKEN.clear()
    async with connected(backend_of(engine).address) as client:
        assert await client.system.info()
    assert asked.count("version") == 2


# --- the walls, as the engine itself sees them ---


async def test_every_container_has_all_its_walls(engine: Engine) -> None:
    seen: list[dict[str, Any]] = []

    async def look(_: str) -> None:
        async with connected(backend_of(engine).known_address) as client:
            for each in await client.containers.list(all=True, filters={"label": [f"{LABEL}=1"]}):
                seen.append(await each.show())

    result = await run(engine, UP, on_stdout=look, memory="200M")
    [container] = [each for each in seen if each["Config"]["Labels"]["belljar.run"] == result.container_id]
    walls, config = container["HostConfig"], container["Config"]
    assert walls["ReadonlyRootfs"] is True
    assert walls["Privileged"] is False
    assert walls["Memory"] == walls["MemorySwap"] == 200 * 2**20
    assert walls["NetworkMode"] == "none"
    assert not walls.get("CapAdd")
    assert not walls.get("Binds")
    assert [mount for mount in container["Mounts"] if mount["Type"] == "bind"] == []
    assert int(config["User"].split(":")[0]) >= 1000
    assert config["Labels"][OWNER_LABEL].split(".")[1] == str(os.getpid())


async def test_numpy_threads_and_subprocesses_run_unharmed_behind_the_profile(engine: Engine) -> None:
    code = (
        "import numpy, subprocess, threading\n"
        "t = threading.Thread(target=lambda: print('thread')); t.start(); t.join()\n"
        "print(numpy.linalg.det(numpy.eye(3)))\n"
        "print(subprocess.run(['node', '-e', 'console.log(6*7)'], capture_output=True, text=True).stdout, end='')"
    )
    result = await run(engine, code, memory="1G", timeout=60)
    assert (result.stdout, result.stderr) == ("thread\n1.0\n42\n", "")


async def test_kernel_isolation_is_gvisor_or_a_refusal() -> None:
    engine = engines().engine("gvisor", container={"images": {"execution": IMAGE}})
    assert (await engine.capabilities("docker")).guarantees.isolation is Isolation.NAMESPACE
    result = await run(engine, "import os; print(os.uname().release)", isolation="kernel")
    assert result.guarantees
    assert result.guarantees.isolation is Isolation.KERNEL
    assert result.stdout.strip() != os.uname().release
    named = await run(engine, "import os; print(os.uname().release)", runtime="runsc")
    assert named.stdout == result.stdout
    with pytest.raises(errors.PolicyDenied, match="it has no runtime 'kata'"):
        await run(engine, "print(1)", runtime="kata")


async def test_kernel_isolation_is_refused_where_no_runtime_has_a_kernel_of_its_own() -> None:
    engine = engines().engine("podman")
    with pytest.raises(errors.PolicyDenied, match="isolation namespace is weaker than kernel"):
        await run(engine, "print(1)", isolation="kernel")


# --- what dies, and what is left ---


async def test_a_container_that_ignores_sigterm_is_gone_at_once(engine: Engine) -> None:
    cancel = Cancel()
    code = f"import signal\nsignal.signal(15, signal.SIG_IGN)\n{SLEEP}"
    result = await run(engine, code, cancel=cancel, on_stdout=lambda _: cancel.cancel())
    assert (result.status, result.stdout) == ("aborted", "up\n")
    assert result.duration_ms < 9000  # an engine that asks politely waits ten seconds
    assert await nothing_left(engine)


async def test_a_sandbox_and_a_session_that_are_closed_leave_nothing(engine: Engine) -> None:
    name = engine.settings.backend
    async with belljar.AsyncSandbox(engine=engine, backend=name) as box:
        await box.write("a.txt", b"hi")
        assert (await box.exec(["cat", "a.txt"])).stdout == "hi"
    async with belljar.AsyncSession(engine=engine, backend=name) as session:
        await session.run("x = 1")
        assert (await session.run("print(x)")).stdout == "1\n"
    assert await nothing_left(engine)


def _client(engine: Engine, flavour: str, out: Path) -> subprocess.Popen[bytes]:
    """With a guest that runs: what its probe started before is over, and does not count."""
    backend, runtime, _ = FLAVOURS[flavour]
    environment = os.environ | {
        "DOCKER_SOCKET_PATH": engine.settings.docker_socket, "CONTAINER_HOST": engine.settings.podman_socket,
        "BELLJAR_IMAGE": IMAGE, "BELLJAR_RUNTIME": runtime,
    }  # fmt: skip
    words = f"-m belljar exec --backend {backend} --collect * --out {out} -- sh -c".split()
    client = subprocess.Popen([sys.executable, *words, "echo up; sleep 60"], env=environment, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    return client


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_what_kill_9_of_the_client_leaves_is_removed_by_the_next(flavour: str, tmp_path: Path) -> None:
    engine = engines().engine(flavour)
    client = _client(engine, flavour, tmp_path)
    assert len(await left_behind(engine)) >= 4, "holder, guest, two volumes"
    await backend_of(engine).reap()  # which may find what others left, and takes nothing of the living
    assert len(await left_behind(engine)) >= 4, "its owner is alive"
    client.kill()
    client.communicate()
    deadline = time.monotonic() + 90
    while await left_behind(engine) and time.monotonic() < deadline:
        await backend_of(engine).reap()  # gVisor's containers at times take more than one asking
    assert await left_behind(engine) == []


async def test_dockerd_killed_in_mid_run_is_our_failure_and_the_next_run_works(docker: Engine) -> None:
    async with engines().restarting("docker") as pid:
        with pytest.raises(errors.ExecutionFailed):
            await run(docker, SLEEP, on_stdout=lambda _: os.kill(pid, signal.SIGKILL))
    assert (await run(docker, "print('again')")).stdout == "again\n"
    await backend_of(docker).reap()  # what could not be removed while nobody was there
    assert await nothing_left(docker)


async def test_an_image_that_is_removed_after_the_probe_is_image_not_found_where_nothing_is_pulled() -> None:
    name = "belljar-test/passing:latest"
    rules = {"image_pull_policy": "never"}
    engine = engines().engine("docker", container={"images": {"execution": name}}, images=rules)
    async with connected(backend_of(engine).known_address) as client:
        await client.images.tag(IMAGE, repo="belljar-test/passing", tag="latest")
        assert (await engine.capabilities("docker")).available
        await client.images.delete(name)
    with pytest.raises(errors.ImageNotFound) as caught:
        await run(engine, "print(1)")
    assert caught.value.fix == f"belljar images pull --policy if-not-present {name}, or build it"
    assert await nothing_left(engine)


async def test_an_image_that_is_not_here_is_said_by_the_probe_with_what_to_do() -> None:
    engine = engines().engine("docker", container={"images": {"execution": "belljar-test/absent:1"}})
    offer = await engine.capabilities("docker")
    assert (offer.available, offer.why_not) == (False, "the image belljar-test/absent:1 is not here")
    assert offer.fix == "belljar images pull belljar-test/absent:1"


async def test_typescript_runs_on_a_node_that_does_not_know_it() -> None:
    """The image's Node is 18. Imports of files, an await at the top, and the line of a failure are as elsewhere."""
    engine = engines().engine("docker")
    files = {"shapes.ts": "export type Side = number;\nexport const area = (side: Side): number => side ** 2;\n"}
    code = 'import { area } from "./shapes.ts";\nconst found: number = await Promise.resolve(area(4));\n'
    result = await run(engine, f"{code}console.log(found);", language="typescript", files=files)
    assert result.stdout == "16\n", result
    enum = "enum Size { Small = 1, Large = 5 }\nconsole.log(Size.Large as number);\nthrow new Error('no');"
    result = await run(engine, enum, language="typescript", collect=["**"])
    assert result.stdout == "5\n", result
    assert "main.ts:3" in result.stderr
    assert result.error and result.error.error_type == "RUNTIME_ERROR"
    assert result.files == ()
    result = await run(engine, "const a: number = 1;\nconst b = = 2;", language="typescript")
    assert result.error and (result.error.error_type, "main.ts:2" in result.stderr) == ("SYNTAX_ERROR", True), result


async def test_fifty_runs_at_once_get_each_its_own_answer_and_leave_nothing() -> None:
    engine = engines().engine("docker", max_containers=50)
    said: dict[int, str] = {}

    async def one(number: int) -> None:
        said[number] = (await run(engine, f"print({number})", timeout=120)).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(one, number)
    assert said == {number: f"{number}\n" for number in range(50)}
    assert await nothing_left(engine)


# --- an engine that is none ---

NONSENSE: dict[str, bytes] = {
    "a web page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "JSON of another kind": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n[1,2,3]",
    "an error without words": b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "no HTTP at all": b"\x00\xff\x17nonsense\n",
    "nothing": b"",
}


@asynccontextmanager
async def answering(path: Path, answer: bytes) -> AsyncIterator[Engine]:
    async def serve(connection: SocketStream) -> None:
        async with connection:
            await connection.receive()
            await connection.send(answer)

    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield Engine(load(docker_socket=str(path)))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("what", NONSENSE)
async def test_an_engine_that_answers_nonsense_is_not_available_and_says_so(what: str, tmp_path: Path) -> None:
    async with answering(tmp_path / "s", NONSENSE[what]) as engine:
        offer = await engine.capabilities("docker")
        assert not offer.available
        assert offer.why_not.startswith("docker at unix://")
        with pytest.raises(errors.NotAvailable):
            await engine.run(request("print(1)", backend="docker"))


async def test_no_engine_is_not_available_with_what_to_do(tmp_path: Path) -> None:
    engine = Engine(load(docker_socket=str(tmp_path / "none.sock"), podman_socket=str(tmp_path / "none.sock")))
    for name, remedy in (("docker", "DOCKER_HOST"), ("podman", "CONTAINER_HOST")):
        offer = await engine.capabilities(name)
        assert not offer.available
        assert remedy in offer.fix


def test_an_address_is_a_path_or_whatever_the_client_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Callable[..., Any] = load
    assert settings(environ={"DOCKER_HOST": "tcp://127.0.0.1:1"}).docker_socket == "tcp://127.0.0.1:1"
    both = {"DOCKER_HOST": "tcp://127.0.0.1:1", "DOCKER_SOCKET_PATH": "/run/d.sock"}
    assert settings(environ=both).docker_socket == "/run/d.sock"
    assert not EngineAddress(DOCKER, "tcp://127.0.0.1:1").local
