"""Real container engines for the tests: started once, on first use, and gone with the test process.

`scripts/test_engines.sh serve` lives as long as its stdin is open, and we hold the other end: whether the tests end,
crash or are killed, the kernel closes it, and the engines are stopped and cleared away.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import belljar
from belljar.backends.containers.backend import Containers
from belljar.core.labels import LABEL
from belljar.engine.engine import Engine
from belljar.host.docker_api import connected, list_containers, list_volumes
from belljar.settings import load

IMAGE = "belljar-test/base:latest"
SCRIPT = Path(__file__).parents[2] / "scripts" / "test_engines.sh"
# What is put to the test, by the name of its parameter: backend, runtime, and the program it cannot do without.
FLAVOURS = {
    "docker": ("docker", "", "docker"),
    "gvisor": ("docker", "runsc", "runsc"),
    "podman": ("podman", "", "podman"),
}
# For tests of what Docker's API is asked, which is Podman's too: no check and no attack of the suites is among them.
PODMAN_AGAIN = pytest.param("podman", marks=pytest.mark.exhaustive("what Docker is asked, by the same API"))
_START_SECONDS = 600  # the first time, packages and an image are fetched
_SHARED: dict[tuple[object, ...], Engine] = {}


class Engines(NamedTuple):
    """Sockets by name, and why there are not more."""

    folder: Path
    sockets: dict[str, str]
    missing: dict[str, str]

    def settings(self, backend: str, runtime: str = "", **more: Any) -> Any:
        """Belljar's settings for one of them; the other backend is pointed at nothing."""
        nowhere = str(self.folder / "none.sock")
        container = {"runtime": runtime, "images": {"execution": IMAGE, "node-execution": IMAGE}}
        return load(
            docker_socket=self.sockets.get("docker", nowhere), podman_socket=self.sockets.get("podman", nowhere),
            backend=backend, **{"container": container} | more,
        )  # fmt: skip

    def engine(self, flavour: str, **more: Any) -> Engine:
        """An engine of Belljar's on one of the flavours, or a loud skip.

        Without further settings it is one and the same for all tests: each new one proves its runtimes again, which
        takes seconds.
        """
        if more:
            return self.fresh_engine(flavour, **more)
        key = (flavour, *self.sockets.items())
        if key not in _SHARED:
            _SHARED[key] = self.fresh_engine(flavour)
        return _SHARED[key]

    def fresh_engine(self, flavour: str, **more: Any) -> Engine:
        """A new engine of Belljar's, for tests that break what the shared one stands on; or a loud skip."""
        backend, runtime, needed = FLAVOURS[flavour]
        for name in (backend, needed):
            if why := self.missing.get(name):
                pytest.skip(f"NOTHING of {flavour} was checked: {why}")
        return Engine(self.settings(backend, runtime, **more))

    @asynccontextmanager
    async def restarting(self, name: str) -> AsyncIterator[int]:
        """The pid of an engine that may be killed: afterwards it is started once more."""
        try:
            yield int((self.folder / name / "pid").read_text())
        finally:
            with anyio.CancelScope(shield=True):
                line = ["sh", str(SCRIPT), "again", str(self.folder), name]
                await anyio.run_process(line, stdout=subprocess.DEVNULL, stderr=None)


@cache
def engines() -> Engines:
    """The engines of this test process; the first call starts them.

    BELLJAR_TEST_ENGINES names the folder of some that run already (`test_engines.sh start FOLDER`), for a quick try.
    """
    if running := os.environ.get("BELLJAR_TEST_ENGINES"):
        return _told(Path(running))
    install()
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(served())


@cache
def install() -> None:
    """What engines need, where it can be had."""
    subprocess.run(["sh", str(SCRIPT), "install"], timeout=_START_SECONDS, check=False)


@contextmanager
def served(*words: str) -> Iterator[Engines]:
    """Engines of one's own; a size (`1500M`) gives Docker alone, with its data on a disk of that size; `networks` one
    that makes networks, in a network namespace of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bj-"))  # short: a socket's path has at most 107 characters
    line = ["sh", str(SCRIPT), "serve", str(folder), *words]
    server = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)
    assert server.stdin
    try:
        ready = folder / "ready"
        deadline = time.monotonic() + _START_SECONDS
        while not ready.exists():
            assert server.poll() is None, "scripts/test_engines.sh ended early"
            assert time.monotonic() < deadline, "the engines did not start"
            time.sleep(0.05)
        yield _told(folder)
    finally:
        server.stdin.close()
        server.wait(timeout=120)


def _told(folder: Path) -> Engines:
    lines = [line.split(maxsplit=2) for line in (folder / "ready").read_text().splitlines()]
    sockets = {line[0]: line[1] for line in lines if line[0] != "missing"}
    missing = {line[1]: line[2] for line in lines if line[0] == "missing"}
    for name, why in missing.items():
        print(f"\nengines: {name} is not tested: {why}", flush=True)
    return Engines(folder, sockets, missing)


# --- what tests of containers ask of them ---


def backend_of(engine: Engine) -> Containers:
    backend = engine.backend(engine.settings.backend)
    assert isinstance(backend, Containers)
    return backend


async def left_behind(engine: Engine) -> list[str]:
    """The names of our containers and volumes, whoever made them."""
    wanted = f"{LABEL}=1"
    async with connected(backend_of(engine).known_address) as client:
        found = await list_containers(client, label=wanted)
        volumes = await list_volumes(client, label=wanted)
    return [*(each["Names"][0] for each in found), *(each["Name"] for each in volumes)]


async def nothing_left(engine: Engine) -> bool:
    deadline = time.monotonic() + 30
    while (left := await left_behind(engine)) and time.monotonic() < deadline:
        await anyio.sleep(0.05)
    assert left == []
    return True


async def run(engine: Engine, code: str, **options: Any) -> belljar.Result:
    return await belljar.arun(code, engine=engine, backend=engine.settings.backend, **options)
