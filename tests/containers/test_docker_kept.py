"""`auto_remove=False`: the container of a run is kept, and nobody but its user removes it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import belljar
from belljar.core.labels import KEPT_LABEL
from belljar.engine.engine import Engine
from engines import PODMAN_AGAIN, backend_of, engines, nothing_left

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]


@pytest.fixture(params=["docker", PODMAN_AGAIN])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = engines().engine(request.param)
    yield found
    for kind, listing in (("rm", ("ps", "-aq")), ("volume rm", ("volume", "ls", "-q"))):
        names = docker(found, *listing, "--filter", f"label={KEPT_LABEL}=1").split()
        if names:
            docker(found, *kind.split(), "-f", *names)


def docker(engine: Engine, *words: str) -> str:
    """Docker's own command line, which speaks to Podman too."""
    socket = backend_of(engine).address.url
    return subprocess.run(
        ["docker", "-H", socket, *words], capture_output=True, text=True, timeout=60, check=True
    ).stdout


async def kept(engine: Engine, **options: Any) -> belljar.Result:
    words = ["sh", "-c", "echo said; echo made >out; exit 3"]
    backend = engine.settings.backend
    return await belljar.arun_in_container(words, backend=backend, engine=engine, auto_remove=False, **options)


async def test_a_container_that_is_kept_can_be_looked_at_and_removed_as_the_result_says(engine: Engine) -> None:
    result = await kept(engine)
    assert (result.exit_code, result.stdout) == (3, "said\n")
    (warning,) = result.warnings
    remove = warning.rpartition("remove it with `")[2].rstrip("`").split()
    assert remove[:3] == [engine.settings.backend, "rm", "-f"], warning
    await engine.backend(engine.settings.backend).reap()
    (facts,) = json.loads(docker(engine, "inspect", remove[3]))
    assert (facts["State"]["Running"], facts["State"]["ExitCode"]) == (False, 3)
    assert "said" in docker(engine, "logs", remove[3])
    docker(engine, *remove[1:])
    assert await nothing_left(engine)


async def test_with_files_to_collect_the_folders_are_kept_too_and_named(engine: Engine) -> None:
    result = await kept(engine, collect=["out"])
    assert [file.content for file in result.files] == [b"made\n"]
    first, _, second = result.warnings[0].rpartition("remove it with `")[2].rstrip("`").partition(" && ")
    deadline = time.monotonic() + 30
    while True:  # until the container that held the folders is gone, too
        try:
            docker(engine, *first.split()[1:])
            docker(engine, *second.split()[1:])
            break
        except subprocess.CalledProcessError as error:
            assert time.monotonic() < deadline, error.stderr
            await anyio.sleep(0.1)
    assert await nothing_left(engine)


async def test_a_project_may_want_it_and_a_backend_without_containers_says_that_it_cannot(engine: Engine) -> None:
    settings = engine.settings.model_copy(update={"auto_remove": False})
    again = Engine(settings)
    result = await belljar.arun(command=["true"], backend=settings.backend, engine=again)
    assert "the container was kept" in result.warnings[0]
    native = await belljar.arun("print(1)", backend="native", engine=again)
    assert native.warnings == ()
    assert "auto_remove=False has no effect: native has no container to keep" in native.reasons
