"""Belljar's own containers through the proxy, on a real engine; and what the proxy refuses that the engine would do."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiodocker
import anyio
import pytest

import belljar
from belljar.backends.containers import spec
from belljar.core.labels import LABEL
from belljar.engine.engine import Engine
from belljar.host.engine_address import DOCKER, PODMAN, Flavour
from belljar.sandbox import AsyncSandbox
from belljar.socket_proxy.command import open_listener
from belljar.socket_proxy.proxy import SocketProxy
from belljar.socket_proxy.rules import ProxyRules
from engines import IMAGE, backend_of, engines, left_behind, nothing_left, run

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]


@asynccontextmanager
async def proxied(name: str = "docker", **rules: Any) -> AsyncIterator[str]:
    """The path of a proxy's socket before an engine of the tests."""
    found = engines()
    if name not in found.sockets:
        pytest.skip(f"NOTHING of the proxy was checked on a real {name}: {found.missing.get(name)}")
    with tempfile.TemporaryDirectory(prefix="bj-proxy-") as folder:
        path = Path(folder) / "engine.sock"
        listener = open_listener(path, 0o660)
        proxy = SocketProxy(ProxyRules(found.sockets[name], **rules), grace=1.0, sweep=0.2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.serve, listener)
            yield str(path)
            tasks.cancel_scope.cancel()
        listener.close()


def behind(path: str, backend: str = "docker", **container: Any) -> Engine:
    found = engines()
    settings = found.settings(backend, container={"images": {"execution": IMAGE}, **container})
    return Engine(settings.model_copy(update={f"{backend}_socket": path}))


@pytest.mark.parametrize("backend", ["docker", "podman"])
async def test_a_snippet_runs_through_the_proxy_and_nothing_is_left(backend: str) -> None:
    async with proxied(backend) as path:
        engine = behind(path, backend)
        result = await run(engine, "import sys; print(sys.stdin.read() * 2)", stdin="abc")
        assert (result.status, result.stdout) == ("success", "abcabc\n")
        assert await nothing_left(engine)


async def test_a_megabyte_goes_in_and_comes_out_unharmed() -> None:
    async with proxied() as path:
        engine, text = behind(path), "0123456789abcdef" * 65536
        result = await run(engine, "import sys; sys.stdout.write(sys.stdin.read())", stdin=text, memory="512M")
        assert result.stdout == text
        assert await nothing_left(engine)


async def test_a_run_over_its_time_is_ended_through_the_proxy() -> None:
    async with proxied() as path:
        engine = behind(path)
        assert (await run(engine, "import time; time.sleep(60)", timeout=2)).status == "timeout"
        assert await nothing_left(engine)


async def test_a_sandbox_that_keeps_files_has_its_volumes_and_loses_them_again() -> None:
    async with proxied() as path:
        engine = behind(path)
        async with AsyncSandbox(backend="docker", engine=engine) as box:
            await box.write("a.txt", b"kept")
            assert (await box.run("print(open('a.txt').read())")).stdout == "kept\n"
            assert await box.read("a.txt") == b"kept"
        assert await nothing_left(engine)


@pytest.mark.parametrize("backend", ["docker", "podman"])
async def test_a_living_sandbox_has_its_terminal_and_is_paused_through_the_proxy(backend: str) -> None:
    async with proxied(backend) as path:
        engine = behind(path, backend)
        async with AsyncSandbox(backend=backend, engine=engine, living=True) as box:
            typed = await box.start("read answer; stty size; echo $answer", pty=(100, 30))
            await box.pause()
            await box.resume()
            await typed.write("yes\n")
            assert (await typed.wait(60)).stdout.split()[-3:] == ["30", "100", "yes"]
        assert await nothing_left(engine)


async def test_the_pool_fills_and_serves_through_the_proxy() -> None:
    async with proxied() as path:
        engine = behind(path, pool=1)
        for number in range(3):
            assert (await run(engine, f"print({number})")).stdout == f"{number}\n"
        pool = backend_of(engine).pool
        assert pool
        pool.close()
        assert await nothing_left(engine)


def walled(flavour: Flavour = DOCKER) -> dict[str, Any]:
    limits = belljar.Limits()
    guest = spec.ContainerSpec(flavour, IMAGE, ("true",), 12345, limits, "o", "r")
    return spec.container(guest)


@pytest.mark.parametrize(
    "change",
    [
        {"Privileged": True}, {"Binds": ["/:/host:rw"]}, {"NetworkMode": "host"}, {"PidMode": "host"},
        {"CapAdd": ["SYS_ADMIN"]}, {"SecurityOpt": ["no-new-privileges", "seccomp=unconfined"]}, {"privileged": True},
    ],
    ids=json.dumps,
)  # fmt: skip
async def test_a_container_with_a_wall_less_is_refused_though_the_engine_would_make_it(change: dict[str, Any]) -> None:
    body = walled()
    body["HostConfig"] |= change
    async with proxied() as path, aiodocker.Docker(url=f"unix://{path}") as client:
        with pytest.raises(aiodocker.DockerError, match="socket-proxy") as refused:
            await client.containers.create(body)
        assert refused.value.status == 403
        made = await client.containers.create(walled())  # else the refusal would prove nothing
        await made.delete(force=True)


@pytest.mark.parametrize("name", ["docker", "podman"])
@pytest.mark.parametrize("labels", [{}, {LABEL: "1"}, spec.labels("o", "r")], ids=len)
async def test_a_container_of_somebody_else_cannot_be_touched(name: str, labels: dict[str, str]) -> None:
    """With our label too: whatever anybody starts from an image of ours has it."""
    async with (
        proxied(name) as path,
        aiodocker.Docker(url=f"unix://{path}") as through,
        aiodocker.Docker(url=f"unix://{engines().sockets[name]}") as direct,
    ):
        asked = {"Image": IMAGE, "Cmd": ["sleep", "1"], "Labels": labels, "HostConfig": {"Binds": ["/etc:/x:ro"]}}
        theirs = await direct.containers.create(asked, name="somebody-elses")
        run = json.dumps({"Cmd": ["cat", "/x/passwd"], "User": "1:1"})
        calls = (
            ("GET", "json", None), ("POST", "start", None), ("POST", "kill", None), ("POST", "exec", run),
            ("POST", "wait", None), ("DELETE", "", None),
        )  # fmt: skip
        try:
            for alias in ("somebody-elses", str(theirs.id), str(theirs.id)[:12]):
                for method, what, data in calls:
                    with pytest.raises(aiodocker.DockerError, match="not one of Belljar's"):
                        async with through._query(f"containers/{alias}/{what}".rstrip("/"), method=method, data=data):
                            pass
            assert (await theirs.show())["State"]["Status"] == "created"
        finally:
            await theirs.delete(force=True)


@pytest.mark.parametrize("name", ["docker", "podman"])
async def test_a_proxy_that_was_started_again_knows_what_was_made_before(name: str) -> None:
    flavour = PODMAN if name == "podman" else DOCKER
    async with proxied(name) as path, aiodocker.Docker(url=f"unix://{path}") as client:
        made = await client.containers.create(walled(flavour) | {"Cmd": ["sleep", "600"]})
    async with proxied(name) as path, aiodocker.Docker(url=f"unix://{path}") as client:
        same = client.containers.container(str(made.id))
        try:
            await same.start()
            assert (await same.show())["State"]["Running"] is True
        finally:
            await same.delete(force=True)


async def test_an_engine_outside_of_our_container_is_told_from_one_beside_us() -> None:
    program = "import sys; from belljar.host.engine_address import is_outside; print(is_outside(sys.argv[1]))"
    async with proxied() as path:
        for apart, expected in ([], b"False"), (["unshare", "--pid", "--fork"], b"True"):
            done = await anyio.run_process([*apart, sys.executable, "-c", program, f"unix://{path}"])
            assert done.stdout.strip() == expected


async def test_what_a_killed_service_left_running_is_removed_by_the_proxy() -> None:
    async with proxied() as path:
        engine = behind(path)
        body = walled() | {"Cmd": ["sleep", "600"]}
        async with aiodocker.Docker(url=f"unix://{path}") as client:
            made = await client.containers.create(body)
            stream = made.attach(stdin=True, stdout=True, stderr=True)
            await stream._init()
            await made.start()
            with anyio.move_on_after(2.5):  # longer than the grace that the proxy gives
                await anyio.sleep_forever()
            assert (await made.show())["State"]["Running"] is True
            transport = stream._resp.connection.transport
            transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # as a death does
            with suppress(Exception):
                await stream.close()
        with anyio.fail_after(30):
            while await left_behind(engine):
                await anyio.sleep(0.1)
