"""The backend `apple` over a STAND-IN for Apple's program, which really runs its arguments on a real Docker.

No Mac was at hand. What is shown here: arguments, streams, verdicts, files, clearing up. What is not: virtual machines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import witness
from belljar.backends.apple import backend as apple
from belljar.containers import abuild_image, adetect, ais_container_available, arun_in_container
from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.plan import Plan
from belljar.core.request import Limits
from belljar.engine.engine import Engine
from belljar.sandbox import AsyncSandbox, arun
from belljar.testing import conformance, escape
from belljar.testing.conformance import Check
from engines import IMAGE
from stand_ins import apple as stand_ins
from suites import SUITE_SECONDS, assert_passed, attacked, checked
from witness import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers, pytest.mark.timeout(SUITE_SECONDS)]

# What the stand-in's engine does not stop, though a virtual machine's memory would.
NOT_ON_DOCKER = {
    "socket buffers": "Docker does not count what waits in sockets where control groups are of version 1",
    "inodes across commands": "Apple's program cannot limit the number of files, only their memory (docs/apple.md)",
}
# The copy of a folder that is granted to be read belongs to root inside, and so keeps the guest from private files.
UNREADABLE_COPY = "a folder that is granted to be read is not written to by the caller either"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One loop for all: the attacks are carried out together."""
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apple")


@pytest.fixture(scope="session")
def shared(folder: Path) -> Engine:
    return stand_ins.engine(folder)


@pytest.fixture
def here(tmp_path: Path) -> Engine:
    return stand_ins.engine(tmp_path)


def docker(*words: str) -> str:
    done = subprocess.run(
        ["docker", "--host", f"unix://{stand_ins.docker_socket()}", *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def machines(word: str = "belljar") -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label={word}").split()


@pytest.fixture
def left_nothing() -> Iterator[None]:
    before = set(machines())
    yield
    assert eventually(lambda: set(machines()) <= before, 20), set(machines()) - before


# --- the published suites ---


@pytest.mark.exhaustive("the stand-in is Docker once more, whose suites run in every `make test`; two minutes")
@pytest.mark.parametrize("check", conformance.checks(), ids=lambda check: check.name)
def test_apple_over_its_stand_in_conforms(check: Check, shared: Engine) -> None:
    verdict = checked("apple", shared)[check.name]
    if check.name == UNREADABLE_COPY and verdict.status == "failed" and os.geteuid() == 0:
        pytest.xfail(f"NOT SO on apple, whose copy of the folder belongs to root (docs/apple.md): {verdict.detail}")
    assert_passed(verdict)


@pytest.mark.exhaustive("the stand-in is Docker once more, whose suites run in every `make test`; two minutes")
@pytest.mark.parametrize("name", [one.name for one in escape.ATTACKS])
def test_apple_over_its_stand_in_holds_against(name: str, shared: Engine) -> None:
    verdict = attacked("apple", shared)[name]
    if name in NOT_ON_DOCKER and verdict.status == "through" and Path("/sys/fs/cgroup/memory").is_dir():
        pytest.xfail(f"NOT HELD by the stand-in: {NOT_ON_DOCKER[name]}: {verdict.detail}")
    assert verdict.held, f"{name}: {verdict.status}: {verdict.detail}"


# --- what it says of itself ---


async def test_only_walls_that_a_guest_has_seen_are_claimed(here: Engine) -> None:
    offer = await here.capabilities("apple")
    assert offer.available, offer.why_not
    assert offer.guarantees
    assert {"no root", "no capabilities", "read-only root", "no network"} <= set(offer.guarantees.walls)
    assert offer.guarantees.isolation is Isolation.NAMESPACE, "a container on this kernel is no virtual machine"
    with pytest.raises(errors.PolicyDenied, match="isolation namespace is weaker than kernel"):
        await arun("print(1)", backend="apple", isolation="kernel", engine=here)


async def test_a_guest_whose_kernel_is_not_the_host_s_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, whose kernel is not Linux at all."""
    monkeypatch.setattr(apple, "_BOOT_ID", tmp_path / "there is no such file on a Mac")
    offer = await stand_ins.backend(tmp_path).probe()
    assert offer.guarantees
    assert (offer.guarantees.isolation, offer.guarantees.walls[0]) == (Isolation.KERNEL, "a kernel of its own")


@pytest.mark.parametrize("style", ["0.12", "1.0", "1.4"])
async def test_every_release_s_words_are_understood(style: str, tmp_path: Path, left_nothing: None) -> None:
    engine = stand_ins.engine(tmp_path, style=style)
    offer = await engine.capabilities("apple")
    assert (offer.available, offer.version) == (True, f"container {style}.0")
    assert (await arun("print(6 * 7)", backend="apple", engine=engine)).stdout == "42\n"
    assert await engine.backend("apple").reap() == 0


async def test_the_stand_in_runs_on_podman_as_well(tmp_path: Path) -> None:
    engine = stand_ins.engine(tmp_path, program="podman")
    offer = await engine.capabilities("apple")
    assert offer.available, offer.why_not
    result = await arun("import os\nprint(os.getuid() > 1000)", backend="apple", engine=engine, memory="128M")
    assert (result.status, result.stdout) == ("success", "True\n")


async def test_a_service_that_is_not_running_is_said_with_its_remedy(tmp_path: Path) -> None:
    offer = await stand_ins.backend(tmp_path, socket=str(tmp_path / "nobody.sock")).probe()
    assert offer.why_not == "the services of Apple's container do not run (not running)"
    assert offer.fix == "container system start"


async def test_it_is_detected_with_its_reason_and_counts_as_a_container_engine(here: Engine) -> None:
    found = {one.backend: one for one in (await adetect(engine=here)).order}
    assert (found["apple"].available, found["apple"].reason) == (True, "container 1.0.0")
    assert await ais_container_available(backend="apple", engine=here)


# --- commands and images ---


async def test_a_command_runs_in_a_container_and_in_no_other_place(here: Engine, left_nothing: None) -> None:
    result = await arun_in_container(["sh", "-c", "id -u; pwd"], backend="apple", engine=here, memory="256M")
    uid, place = result.stdout.split()
    assert (result.backend, place) == ("apple", "/workspace")
    assert int(uid) > 1000


async def test_an_image_that_is_not_here_is_an_error_and_is_not_fetched(here: Engine, left_nothing: None) -> None:
    with pytest.raises(errors.ImageNotFound, match="nosuch:1"):
        await arun_in_container(["true"], image="nosuch:1", backend="apple", engine=here)


async def test_an_image_s_name_is_never_an_option(here: Engine) -> None:
    with pytest.raises(errors.InvalidRequest, match="not an image's name"):
        await arun_in_container(["true"], image="--privileged", backend="apple", engine=here)


async def test_an_image_is_built_with_its_progress_and_then_run(here: Engine, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo made > /made.txt\n")
    lines: list[str] = []
    tag = f"belljar-apple-{os.getpid()}:1"
    report = await abuild_image(
        context, tag, memory="512M", cpus=1, backend="apple", engine=here, on_progress=lines.append
    )
    try:
        assert report.ok, report.problem
        assert any("echo made" in line for line in lines)
        result = await arun_in_container(["cat", "/made.txt"], image=tag, backend="apple", engine=here)
        assert result.stdout == "made\n"
    finally:
        docker("rmi", "--force", tag)


async def test_a_build_that_fails_is_a_report_with_its_last_lines(here: Engine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo so far; exit 3\n")
    report = await abuild_image(tmp_path, "belljar-apple:never", backend="apple", engine=here)
    assert not report.ok
    assert report.exit_code
    assert any("so far" in line for line in report.last_lines)


async def test_a_sandbox_of_one_image_does_not_pretend_to_speak_what_is_in_another(tmp_path: Path) -> None:
    one = stand_ins.backend(tmp_path)
    one._images["node-execution"] = "other:1"
    engine = Engine(stand_ins.load(state_dir=str(tmp_path / "state")), extra=(one,))
    async with AsyncSandbox(backend="apple", engine=engine) as box:
        box.lease.engine._languages["apple"] = ()
        with pytest.raises(errors.NotAvailable, match="javascript runs in other:1"):
            await box.run("console.log(1)", language="javascript")


# --- files ---


async def test_what_a_guest_changes_in_a_granted_folder_comes_back_and_links_are_not_followed(
    here: Engine, tmp_path: Path, left_nothing: None
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "old.txt").write_text("old")
    (project / "gone.txt").write_text("gone")
    script = "echo new > new.txt; echo changed > old.txt; rm gone.txt; ln -s /etc/passwd link; mkdir d; echo x > d/y"
    result = await arun(command=["sh", "-c", script], backend="apple", engine=here, workspace=str(project), write=True)
    assert result.ok, result.stderr
    assert os.readlink(project / "link") == "/etc/passwd"  # a link, as the guest made it; we never read through it
    (project / "link").unlink()
    found = {str(path.relative_to(project)): path.read_text() for path in project.rglob("*") if path.is_file()}
    assert found == {"new.txt": "new\n", "old.txt": "changed\n", "d/y": "x\n"}


# --- nothing is left ---


async def test_a_machine_that_vanishes_under_a_run_is_our_failure_and_the_next_run_works(
    here: Engine, left_nothing: None
) -> None:
    def vanish(text: str) -> None:
        subprocess.run(
            ["docker", "--host", f"unix://{stand_ins.docker_socket()}", "rm", "--force", *machines("belljar=box")],
            capture_output=True, check=False,
        )  # fmt: skip

    with pytest.raises(errors.ExecutionFailed, match="lost"):
        await arun(
            "import os, time\nos.write(1, b'on')\ntime.sleep(60)", backend="apple", engine=here, on_stdout=vanish
        )
    assert (await arun("print(1)", backend="apple", engine=here)).stdout == "1\n"


_VICTIM = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from stand_ins.container import main
import belljar
from belljar.backends.apple.backend import Apple
apple = Apple(Path({state!r}), images={{"execution": {image!r}}}, platform="darwin", binary={program!r})
belljar.run("import os, time\\nos.write(1, b'on')\\ntime.sleep(600)", backend=apple, timeout=290,
            on_stdout=lambda text: print("on", flush=True))
"""


async def test_when_belljar_is_killed_its_machine_ends_by_itself(tmp_path: Path, left_nothing: None) -> None:
    state, program = tmp_path / "state", stand_ins.stand_in(tmp_path, stand_ins.docker_socket())
    before = set(machines())
    script = _VICTIM.format(tests=str(Path(witness.__file__).parent), state=str(state), image=IMAGE, program=program)
    victim = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert victim.stdout
    assert victim.stdout.readline() == "on\n"
    assert set(machines()) - before
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    assert eventually(lambda: set(machines()) <= before, 20)


async def test_machines_of_a_dead_owner_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    """As after a crash in which the holding process survived, or the service had hung."""
    backend = stand_ins.backend(tmp_path)
    assert (await backend.probe()).available
    owners = {"dead": f"{tmp_path}/state/1-0.apple", "foreign": f"{tmp_path}/other/1-0.apple"}
    made = {
        name: docker("run", "--detach", "--interactive", "--network", "none", "--label", "belljar=box", "--label",
                     f"belljar.owner={owner}", "--entrypoint", "cat", IMAGE).strip()
        for name, owner in owners.items()
    }  # fmt: skip
    try:
        async with backend.open(Plan(limits=Limits(timeout=5))) as box:
            assert await backend.reap() == 1
            left = docker("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}")
            assert made["dead"] not in left
            assert made["foreign"] in left
            assert box.id in left
        assert await backend.reap() == 0
    finally:
        docker("rm", "--force", made["foreign"])


async def test_what_the_stand_in_does_not_know_apple_s_program_does_not_get(tmp_path: Path) -> None:
    """The stand-in is strict: an argument that Apple's program lacks must not pass unseen."""
    program = stand_ins.stand_in(tmp_path, stand_ins.docker_socket())
    for words in (["run", "--pids-limit", "5", IMAGE], ["run", "--cpus", "0.5", IMAGE], ["ps"]):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, "Unknown option" in done.stderr) == (64, True)
    asked: dict[str, Any] = json.loads(subprocess.run([program, "system", "status", "--format", "json"],
                                                      capture_output=True, check=True).stdout)  # fmt: skip
    assert asked["status"] == "running"
