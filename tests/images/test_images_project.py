"""A user's own project, from a folder to a guest: `build_image` and `run_in_container` on real engines."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from engines import IMAGE, engines
from image_engine import ImageEngine, socket_of

pytestmark = [pytest.mark.engine, pytest.mark.containers]


_AGAIN = pytest.mark.exhaustive("what Docker builds, once more, by an engine that takes three times as long")


@pytest.fixture(params=["docker", pytest.param("podman", marks=_AGAIN)])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> ImageEngine:
    return ImageEngine(socket_of(request.param), tmp_path, request.param)


@pytest.fixture
def engine(host: ImageEngine) -> Iterator[Engine]:
    rules = {"image_pull_policy": "never"}  # else an image that was not built is looked for in a public registry
    yield engines().engine(host.name, cache_dir=str(host.folder / "cache"), images=rules)
    for tag in ("mine/app:1", "mine/greedy:1", "mine/told:1"):
        host.docker("rmi", "-f", tag, check=False)


def test_a_project_is_built_with_progress_and_its_image_runs(host: ImageEngine, engine: Engine) -> None:
    once = uuid.uuid4().hex  # engines keep what a step made, and do not run it again
    project = host.project("FROM scratch\n", **{"app.py": f"print(40 + 2)  # {once}\n".encode()})
    (project / "deploy").mkdir()
    (project / "deploy" / "Sandboxfile").write_text(f"FROM {IMAGE}\nCOPY app.py /app/\nRUN echo building && ls /app\n")
    lines: list[str] = []
    report = belljar.build_image(
        project, "mine/app:1", file="deploy/Sandboxfile", memory="512M", cpus=1, backend=host.name, engine=engine,
        on_progress=lines.append,
    )  # fmt: skip
    assert report.ok, report
    assert (report.tag, report.weaker) == ("mine/app:1", ())
    assert lines.index("building") < lines.index("app.py")
    assert [line for line in lines if "COPY app.py /app/" in line]
    run = belljar.run_in_container(["python3", "/app/app.py"], image="mine/app:1", backend=host.name, engine=engine)
    assert (run.stdout, run.exit_code, run.backend) == ("42\n", 0, host.name), run


async def test_an_image_with_a_workspace_of_its_own_lets_any_guest_write_there(
    host: ImageEngine, engine: Engine
) -> None:
    """Engines give a folder in memory the permissions of the image's folder below it: root's alone, as here."""
    project = host.project(
        f"FROM {IMAGE}\nRUN mkdir -m 755 /workspace && touch /workspace/theirs\nWORKDIR /workspace\n"
    )
    report = await belljar.abuild_image(project, "mine/told:1", backend=host.name, engine=engine)
    assert report.ok, report
    where = {"image": "mine/told:1", "backend": host.name, "engine": engine}
    for more in ({}, {"collect": ["out"]}):
        command = await belljar.arun(command=["sh", "-c", "id -u >out && cat out"], **where, **more)
        assert int(command.stdout) > 0, command
        code = await belljar.arun("print(open('out', 'w').write('mine'))", **where, **more)
        assert code.stdout == "4\n", code


async def test_what_a_project_does_wrong_is_told_with_its_step_its_last_lines_and_its_code(
    host: ImageEngine, engine: Engine
) -> None:
    project = host.project(f"FROM {IMAGE}\nRUN echo fine\nRUN echo the reason >&2; exit 7\n")
    report = await belljar.abuild_image(project, "mine/broken:1", backend=host.name, engine=engine)
    assert (report.ok, report.id, report.exit_code) == (False, "", 7)
    assert "RUN echo the reason >&2; exit 7" in report.step
    assert "the reason" in report.last_lines
    assert not host.has("mine/broken:1")
    with pytest.raises(errors.InvalidRequest, match="there is no readable Absent"):
        await belljar.abuild_image(project, "mine/broken:1", file="Absent", backend=host.name, engine=engine)
    with pytest.raises(errors.InvalidRequest, match="is not a folder"):
        await belljar.abuild_image(project / "none", "mine/broken:1", backend=host.name, engine=engine)
    with pytest.raises(errors.BelljarError, match="mine/broken:1"):
        await belljar.arun_in_container(["true"], image="mine/broken:1", backend=host.name, engine=engine)


async def test_a_step_has_no_more_memory_than_the_build_was_given_and_no_network(
    host: ImageEngine, engine: Engine
) -> None:
    project = host.project(f"FROM {IMAGE}\nRUN python3 -c 'print(len(bytearray(300 << 20)))'\n")
    report = await belljar.abuild_image(project, "mine/greedy:1", memory="64M", backend=host.name, engine=engine)
    assert (report.ok, report.exit_code) == (False, 137), report
    lines: list[str] = []
    project = host.project(
        f"FROM {IMAGE}\nRUN cut -d: -f1 /proc/net/dev | tail -n +3 | xargs echo interfaces; : {uuid.uuid4()}\n"
    )
    report = await belljar.abuild_image(
        project, "mine/greedy:1", memory="1G", backend=host.name, engine=engine, on_progress=lines.append
    )
    assert report.ok, report
    (found,) = [line for line in lines if line.startswith("interfaces")]
    assert not [name for name in found.split() if name.startswith(("eth", "en", "veth", "br"))], found


async def test_an_image_says_what_it_was_built_from(host: ImageEngine, engine: Engine) -> None:
    project = host.project(f"FROM {IMAGE} AS one\nFROM scratch\nCOPY --from=one /etc/hostname /\n")
    report = await belljar.abuild_image(project, "mine/told:1", backend=host.name, engine=engine)
    assert report.ok, report
    (base,) = report.bases
    name, _, digest = base.partition("@")
    known = json.loads(host.docker("inspect", IMAGE))[0]
    assert name == IMAGE
    assert digest in (known["Id"], *(entry.partition("@")[2] for entry in known["RepoDigests"] or ()))
    labels = json.loads(host.docker("inspect", "mine/told:1"))[0]["Config"]["Labels"]
    assert labels["belljar.bases"] == base
