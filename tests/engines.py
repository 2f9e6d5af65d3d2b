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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from belljar.engine import Engine
from belljar.settings import load

IMAGE = "belljar-test/base:latest"
SCRIPT = Path(__file__).parents[1] / "scripts" / "test_engines.sh"
# What is put to the test, by the name of its parameter: backend, runtime, and the program it cannot do without.
FLAVOURS = {
    "docker": ("docker", "", "docker"),
    "gvisor": ("docker", "runsc", "runsc"),
    "podman": ("podman", "", "podman"),
}
_START_SECONDS = 600  # the first time, packages and an image are fetched


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
        """An engine of Belljar's on one of the flavours, or a loud skip."""
        backend, runtime, needed = FLAVOURS[flavour]
        for name in (backend, needed):
            if why := self.missing.get(name):
                pytest.skip(f"NOTHING of {flavour} was checked: {why}")
        return Engine(self.settings(backend, runtime, **more))


@cache
def engines() -> Engines:
    """The engines of this test process; the first call starts them.

    BELLJAR_TEST_ENGINES names the folder of some that run already (`test_engines.sh start FOLDER`), for a quick try.
    """
    if running := os.environ.get("BELLJAR_TEST_ENGINES"):
        return _told(Path(running))
    subprocess.run(["sh", str(SCRIPT), "install"], timeout=_START_SECONDS, check=False)
    folder = Path(tempfile.mkdtemp(prefix="bj-"))  # short: a socket's path has at most 107 characters
    server = subprocess.Popen(["sh", str(SCRIPT), "serve", str(folder)], stdin=subprocess.PIPE, start_new_session=True)

    def stop() -> None:
        assert server.stdin
        server.stdin.close()
        server.wait(timeout=120)

    atexit.register(stop)
    ready = folder / "ready"
    deadline = time.monotonic() + _START_SECONDS
    while not ready.exists():
        assert server.poll() is None, "scripts/test_engines.sh ended early"
        assert time.monotonic() < deadline, "the engines did not start"
        time.sleep(0.05)
    return _told(folder)


def _told(folder: Path) -> Engines:
    lines = [line.split(maxsplit=2) for line in (folder / "ready").read_text().splitlines()]
    sockets = {line[0]: line[1] for line in lines if line[0] != "missing"}
    missing = {line[1]: line[2] for line in lines if line[0] == "missing"}
    for name, why in missing.items():
        print(f"\nengines: {name} is not tested: {why}", flush=True)
    return Engines(folder, sockets, missing)
