"""Images of runs, on a real dockerd with a real registry on loopback: brought by their policy, with no other needed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import belljar
from belljar.core import errors
from belljar.core.options import request
from belljar.core.version import __version__
from belljar.engine.engine import Engine
from engines import IMAGE, engines
from image_engine import ImageEngine, Registry, serving, socket_of

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
ABSENT = "127.0.0.1:1/absent:1"  # where nobody listens
USUAL = {"execution": ABSENT, "node-execution": ABSENT}
# What our launcher and the probe need, and nothing else: a few megabytes instead of the base's hundreds.
SMALL = f"""FROM {IMAGE} AS large
RUN mkdir -p /small/bin /small/tmp /small/workspace /small/proc /small/sys /small/dev /small/etc && \
    for name in sh cat chmod echo env head id ls mkdir mv printf readlink rm sleep tar touch uname; do \
      cp -L /bin/$name /small/bin/ || exit 1; \
    done && head -c 100000 /dev/urandom >/small/etc/once && echo ONCE && \
    for file in $(ldd /small/bin/* | grep -o '/lib[^ ]*' | sort -u); do \
      mkdir -p "/small$(dirname $file)" && cp -L $file "/small$file"; \
    done
FROM scratch
COPY --from=large /small /
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def host(tmp_path: Path) -> ImageEngine:
    return ImageEngine(socket_of("docker"), tmp_path)


@pytest.fixture(scope="module")
def small(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an image that is in the registry, and not on the engine."""
    host = ImageEngine(socket_of("docker"), tmp_path_factory.mktemp("small"))
    name = registry.name("small:1")
    words = ["docker", "-H", f"unix://{host.socket}", "build", "--network", "none", "-t", name, "-"]
    done = subprocess.run(
        words, input=SMALL.replace("ONCE", registry.name("")), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    host.docker("push", name)
    host.docker("rmi", "-f", name)
    return name


@pytest.fixture
def absent(small: str, host: ImageEngine) -> Iterator[str]:
    """The same; what the test pulled is removed."""
    forget(small, host)
    yield small
    forget(small, host)


def forget(name: str, host: ImageEngine) -> None:
    """Removes an image, when the last of its containers is gone."""
    deadline = time.monotonic() + 30
    while found := host.docker("images", "-q", "--no-trunc", name.rpartition(":")[0]).split():
        assert time.monotonic() < deadline, found
        host.docker("rmi", "-f", *found, check=False)
        time.sleep(0.05)


def engine_with(told: list[str] | None = None, backend: str = "auto", **more: Any) -> Engine:
    settings = engines().settings(backend, **{"container": {"images": USUAL}} | more)
    return Engine(settings, on_setup=(told if told is not None else []).append)


SAY = ["sh", "-c", "echo from the registry"]


async def test_a_named_image_is_pulled_and_run_though_no_other_can_be_had(absent: str) -> None:
    """The usual images can never be pulled here: nothing of them is asked for."""
    told: list[str] = []
    engine = engine_with(told)
    events: list[belljar.Event] = []
    result = await belljar.arun(command=SAY, image=absent, engine=engine, on_event=events.append)
    assert (result.backend, result.stdout) == ("docker", "from the registry\n"), result
    assert told[0] == f"pulling {absent}"
    assert told[-1].startswith(f"pulled {absent}: ") and told[-1].endswith(" MB"), told
    again = await belljar.arun(command=SAY, image=absent, backend="docker", engine=engine, on_event=events.append)
    assert again.stdout == "from the registry\n"
    assert [event.kind for event in events].count("started") == 2
    assert len(told) == len(set(told))


async def test_an_image_that_is_missing_at_a_run_is_pulled_and_the_run_s_events_tell_it(
    absent: str, host: ImageEngine
) -> None:
    engine = engine_with(container={"images": {"execution": IMAGE}})
    await engine.capabilities("docker")
    for _ in range(2):  # it is brought again after somebody has removed it
        events: list[belljar.Event] = []
        result = await belljar.arun(command=SAY, image=absent, backend="docker", engine=engine, on_event=events.append)
        assert result.stdout == "from the registry\n", result
        steps = [event.text for event in events if event.kind == "progress"]
        assert steps[0] == f"pulling {absent}", events
        assert "MB" in steps[-1], steps
        assert [event.kind for event in events].index("started") >= len(steps)
        await anyio.to_thread.run_sync(forget, absent, host)


async def test_the_usual_image_is_pulled_for_a_run_that_names_none(absent: str) -> None:
    engine = engine_with(container={"images": {"execution": absent}})
    result = await belljar.arun_in_container(SAY, engine=engine)
    assert result.stdout == "from the registry\n", result


async def test_where_policy_pulls_nothing_a_missing_image_is_not_found_and_the_remedy_is_told(absent: str) -> None:
    engine = engine_with(container={"images": {"execution": IMAGE}}, images={"image_pull_policy": "never"})
    with pytest.raises(errors.ImageNotFound, match="policy pulls nothing") as caught:
        await engine.run(request(command=SAY, image=absent, backend="docker"))
    assert "belljar images pull" in caught.value.fix


async def test_a_short_name_comes_from_the_settings_registry(absent: str) -> None:
    place, _, short = absent.rpartition("/")
    engine = engine_with(images={"image_registry": place})
    result = await belljar.arun(command=SAY, image=short, engine=engine)
    assert (result.backend, result.stdout) == ("docker", "from the registry\n"), result


async def test_a_language_whose_image_can_be_pulled_is_not_refused_beforehand(absent: str) -> None:
    engine = engine_with(container={"images": {"execution": IMAGE, "go": absent}})
    row = {row.name: row for row in await engine.languages_of("docker")}["go"]
    assert (row.available, row.setup) == (False, f"its image, {absent}, is pulled")
    result = await belljar.arun("package main", language="go", backend="docker", engine=engine)
    assert "go" in result.stderr and result.exit_code == 127, result  # the image is here now, and has no go


async def test_our_own_image_is_the_usual_one_once_it_is_built(host: ImageEngine) -> None:
    ours = f"belljar/python:{__version__}"
    settings = engines().settings("docker", container={"images": {}}, audit_log=str(host.folder / "audit"))
    project = host.project(f"FROM {IMAGE}\nCOPY made.txt /\n", **{"made.txt": b"hardened"})
    report = await host.images().build(project, ours)
    try:
        assert report.ok, report
        result = await belljar.arun("print(open('/made.txt').read())", engine=Engine(settings), backend="docker")
        assert result.stdout == "hardened\n", result
        assert f'"image":"{ours}"' in (host.folder / "audit").read_text().replace(" ", "")
    finally:
        host.docker("rmi", "-f", ours)
