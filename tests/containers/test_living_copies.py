"""Snapshots and forks of living sandboxes on container engines: files as they were, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import belljar
from belljar.core.process import shell
from belljar.engine.engine import Engine
from engines import engines, nothing_left

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.second_try("an engine that has much to do may miss a deadline"),
]
_FILES = """
set -e; export TZ=UTC
mkdir -p a ~/d; echo one > a/one; ln a/one a/twin; ln -s /etc/passwd a/link; printf '#!' > a/run
chmod 755 a/run; mkfifo a/pipe
echo h > ~/d/h; echo t > /tmp/t; echo x > a/locked; chmod 000 a/locked; touch -d '2020-01-02 03:04:05' a/old
"""
_LOOK = """
cat a/one ~/d/h /tmp/t; readlink a/link; stat -c '%a %h' a/run a/twin a/locked; stat -c %Y a/old; test -O a/run
echo $?; ls a | wc -l; chmod 600 a/locked && cat a/locked
"""
_SEEN = "one\nh\nt\n/etc/passwd\n755 1\n644 2\n0 1\n1577934245\n0\n6\nx\n"


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return engines().engine(request.param, data_dir=str(tmp_path))


async def test_a_fork_and_a_snapshot_have_the_files_and_no_process(engine: Engine) -> None:
    backend = engine.settings.backend
    async with belljar.AsyncSandbox(engine=engine, backend=backend, living=True) as box:
        done = await box.exec(shell(_FILES))
        assert done.ok, done.stderr
        server = await box.start("sleep 1000")
        snapshot = await box.snapshot()
        async with await box.fork() as fork:
            assert (await fork.exec(shell(_LOOK))).stdout == _SEEN
            assert "sleep 1000" not in [one.command for one in await fork.processes()]
            await fork.exec(shell("echo two > a/one"))
        assert (await box.files.read_text("a/one")) == "one\n" and server.running and not box.paused
    assert snapshot.quiet == ("pause" in (await engine.capabilities(backend)).living)  # type: ignore[operator]
    assert (snapshot.files, snapshot.left_out) == (7, ())
    async with belljar.AsyncSandbox(engine=engine, backend=backend, snapshot=snapshot, home="/home/new") as again:
        assert (await again.exec(shell(_LOOK))).stdout == _SEEN
    await belljar.aremove_snapshot(snapshot.id, engine=engine)
    assert await nothing_left(engine)
