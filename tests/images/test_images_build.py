"""Images built on a real dockerd: our own five, users' projects, what their failures look like, and the garbage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belljar import __version__
from belljar.core import errors
from belljar.core.image_name import parse
from belljar.images.build import LANGUAGES
from belljar.images.progress import Progress
from engines import IMAGE, engines
from image_engine import ImageEngine, base_for, belljar, socket_of
from witness import eventually

pytestmark = [pytest.mark.engine, pytest.mark.containers]
_PACKAGE_MANAGERS = {
    *("apt", "apt-get", "dpkg", "dpkg-deb", "aptitude", "apk", "rpm", "dnf", "yum"),
    *("pip", "pip3", "easy_install", "npm", "npx", "yarn", "corepack", "rustup"),
}
_PROGRAMS = {
    "python": "python3 -c 'print(40 + 2)'",
    "node": "node -e 'console.log(40 + 2)'",
    "bash": "bash -c 'echo $((40 + 2))'",
    "go": "printf 'package main\\nfunc main() { println(40 + 2) }\\n' >/tmp/m.go && go run /tmp/m.go 2>&1",
    "rust": """printf 'fn main() { println!("{}", 40 + 2); }' >/tmp/m.rs && rustc -o /tmp/m /tmp/m.rs && /tmp/m""",
}


@pytest.fixture
def host(tmp_path: Path) -> ImageEngine:
    return ImageEngine(socket_of("docker"), tmp_path)


# --- our own -----------------------------------------------------------------------------------


_OTHERS = pytest.mark.exhaustive("the same steps make the image of Python; compilers are a gigabyte to copy")


@pytest.mark.parametrize(
    "language", [pytest.param(each, marks=() if each == "python" else _OTHERS) for each in LANGUAGES]
)
async def test_our_image_runs_its_language_as_nobody_with_a_read_only_root(language: str, host: ImageEngine) -> None:
    seen: list[Progress] = []
    base = base_for(language, host)
    report = await host.images().build_language(language, "test", base=base, listener=seen.append)
    assert report.ok, report
    assert report.tag == f"belljar/{language}:test"
    assert seen[-1].current == seen[-1].total > 5

    def inside(command: str) -> str:
        flags = ["--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL"]
        return host.docker("run", *flags, report.tag, "sh", "-c", command)

    assert inside(_PROGRAMS[language]) == "42"
    assert inside("id -u; id -g; pwd") == "65532\n65532\n/workspace"
    assert inside("python3 -m pip --version || python3 -m ensurepip --version || echo none") == "none"
    contents = host.contents(report.tag)
    assert [file.name for file in contents if file.mode & 0o6000] == []
    assert [file.name for file in contents if "SCHILY.xattr.security.capability" in file.pax_headers] == []
    programs = {Path(file.name).name for file in contents if file.mode & 0o111 and not file.isdir()}
    assert programs & {"bash", "sh"} and programs & {"python3", "node", "gcc"}, "the list of programs is empty"
    assert programs & _PACKAGE_MANAGERS == set()
    # Scanners still learn what is installed; and nothing that was removed hides in a layer below.
    assert "Package: bash" in inside("cat /var/lib/dpkg/status")
    facts = json.loads(host.docker("inspect", report.tag))[0]
    assert len(facts["RootFS"]["Layers"]) <= 2  # all of it, and the folder of WORKDIR
    assert facts["Config"]["Labels"]["belljar"] == "1"
    assert facts["Config"]["User"] == "65532:65532"


async def test_our_image_says_what_it_was_built_from_and_its_base_is_pinned_from_then_on(host: ImageEngine) -> None:
    images = host.images()
    host.docker("tag", IMAGE, "pinned-base:1")
    base = host.docker("inspect", "-f", "{{.Id}}", IMAGE)
    report = await images.build_language("bash", "pinned", base="pinned-base:1")
    assert report.ok, report
    assert report.bases == (f"pinned-base:1@{base}",)
    assert json.loads(host.docker("inspect", report.tag))[0]["Config"]["Labels"]["belljar.bases"] == report.bases[0]
    pin = images.records.lock().images["pinned-base:1"]
    assert (pin.digest, pin.of) == (base, "engine")
    # The same base is welcome where a lock is required; another one of that name is not, and does not move the pin.
    assert (await host.images(require_lock=True).build_language("bash", "pinned", base="pinned-base:1")).ok
    other = await host.local("pinned-base:1")
    with pytest.raises(errors.ImageRefused, match="is pinned") as caught:
        await images.build_language("bash", "pinned", base="pinned-base:1")
    assert caught.value.context["found"] == other
    assert images.records.lock().images["pinned-base:1"].digest == base
    host.docker("rmi", "-f", report.id, other)


async def test_a_base_comes_in_under_the_image_policy_or_not_at_all(host: ImageEngine) -> None:
    with pytest.raises(errors.ImageRefused, match="not in the lock file"):
        await host.images(require_lock=True).build_language("bash", "test", base=IMAGE)
    project = host.project(f"FROM {IMAGE}\n")
    with pytest.raises(errors.ImageRefused, match="not in the lock file"):
        await host.images(require_lock=True).build(project, "policy:1")
    with pytest.raises(errors.ImageNotFound, match="policy pulls nothing"):
        await host.images(image_pull_policy="never").build(host.project("FROM nobody/has:this\n"), "policy:1")
    with pytest.raises(errors.InvalidRequest, match="has no image of ours"):
        await host.images().build_language("cobol", "test")


# --- users' projects ---------------------------------------------------------------------------


async def test_a_project_is_built_with_its_files_and_without_what_it_ignores(host: ImageEngine) -> None:
    project = host.project(f"FROM {IMAGE}\nCOPY . /app\nRUN ls -A /app\n", **{"keep.txt": b"x", "secret.env": b"y"})
    (project / ".dockerignore").write_text("*.env\n")
    lines: list[str] = []
    report = await host.images().build(str(project), "mine/app:1", listener=lambda step: lines.append(step.step))
    assert report.ok, report
    assert "keep.txt" in lines
    assert "secret.env" not in lines
    assert host.docker("run", "--rm", "--network", "none", "mine/app:1", "ls", "/app") == "Dockerfile\nkeep.txt"
    host.docker("rmi", "-f", report.id)


async def test_a_step_that_fails_is_told_with_its_last_lines_and_leaves_no_image_and_no_container(
    host: ImageEngine,
) -> None:
    before = set(host.docker("ps", "-aq").split())
    project = host.project(f"FROM {IMAGE}\nRUN echo fine\nRUN echo the reason; echo more >&2; exit 7\nRUN never\n")
    report = await host.images().build(project, "broken:1")
    assert (report.ok, report.exit_code, report.id) == (False, 7, "")
    assert report.step == "Step 3/7 : RUN echo the reason; echo more >&2; exit 7"
    assert {"the reason", "more"} <= set(report.last_lines)
    assert "fine" not in report.last_lines
    assert "returned a non-zero code: 7" in report.problem
    assert not host.has("broken:1")
    assert set(host.docker("ps", "-aq").split()) <= before


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        (f"FROM {IMAGE}\nCOPY nothing /\n", "nothing"),
        (f"FROM {IMAGE}\nWHAT is this\n", "unknown instruction"),
        ("RUN before any base\n", "no build stage"),
    ],
)
async def test_what_a_dockerfile_does_wrong_is_a_report_and_not_an_exception(
    dockerfile: str, said: str, host: ImageEngine
) -> None:
    report = await host.images().build(host.project(dockerfile), "broken:1")
    assert not report.ok
    assert said in report.problem.lower()


async def test_a_build_has_no_network_and_no_more_memory_than_it_was_given(host: ImageEngine) -> None:
    interfaces = host.project(f"FROM {IMAGE}\nRUN tail -n +3 /proc/net/dev | cut -d: -f1 && date +%N\n")
    lines: list[str] = []
    report = await host.images().build(interfaces, "quiet:1", listener=lambda step: lines.append(step.step.strip()))
    assert report.ok
    shown = lines[lines.index(next(line for line in lines if line.startswith("Step 2"))) :]
    assert "lo" in shown and not [line for line in shown if line.startswith(("eth", "en", "docker"))]
    host.docker("rmi", "-f", report.id)
    greedy = host.project(f"FROM {IMAGE}\nRUN python3 -c 'x = bytearray(300 << 20); print(len(x))'\n")
    assert (await host.images().build(greedy, "greedy:1", memory="64M")).exit_code == 137
    report = await host.images().build(greedy, "greedy:1", memory="1G", cpus=1)
    assert report.ok
    host.docker("rmi", "-f", report.id)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "999G"}, "the caps are"),
        ({"cpus": 9999}, "the caps are"),
        ({"network": True}, "builds have no network here"),
    ],
)
async def test_a_build_that_asks_for_too_much_is_refused(options: dict[str, Any], said: str, host: ImageEngine) -> None:
    with pytest.raises(errors.PolicyDenied, match=said):
        await host.images(build_network="never").build(host.project("FROM scratch\n"), "app:1", **options)


async def test_a_build_that_never_ends_is_ended_and_its_container_with_it(host: ImageEngine) -> None:
    project = host.project(f"FROM {IMAGE}\nRUN exec sleep 31415\n")
    with pytest.raises(errors.BackendTimeout, match="no end after 3 s"):
        await host.images(build_timeout=3).build(project, "slow:1")
    assert eventually(lambda: "sleep 31415" not in host.docker("ps", "--no-trunc"), 60)


# --- garbage -----------------------------------------------------------------------------------


async def test_only_our_own_unused_unpinned_old_images_are_collected(host: ImageEngine) -> None:
    images = host.images()

    async def make(tag: str, content: bytes) -> str:
        report = await images.build(host.project('FROM scratch\nCOPY data /\nCMD ["/data"]\n', data=content), tag)
        assert report.ok
        return report.id

    old, superseded = await make("ours/old:1", b"1"), await make("ours/new:1", b"2")
    newest, used, pinned = (
        await make("ours/new:1", b"3"),
        await make("ours/used:1", b"4"),
        await make("ours/pinned:1", b"5"),
    )
    await images.lock(["ours/pinned:1"])
    container = host.docker("create", "--network", "none", "ours/used:1")
    child = host.project("FROM ours/old:1\nENV a=b\n")
    host.docker("build", "-q", "-t", "theirs/child:1", str(child))
    theirs = host.docker("inspect", "-f", "{{.Id}}", "theirs/child:1")

    none = await images.gc(older_than=3600)
    assert not {image.id for image in none.removed} & {old, superseded, newest, used, pinned, theirs}
    planned = await images.gc(older_than=0, dry_run=True)
    assert host.has("ours/old:1")
    done = await images.gc(older_than=0)
    gone = {image.id for image in done.removed}
    assert gone == {image.id for image in planned.removed}
    assert {superseded, newest} <= gone
    assert not gone & {used, pinned, theirs}
    assert host.has("theirs/child:1") and host.has("ours/used:1") and host.has("ours/pinned:1") and host.has(IMAGE)
    assert not host.has("ours/new:1")
    assert done.kept["theirs/child:1"] == "it was made from one of ours, by somebody else"
    host.docker("rm", container)
    for name in ("theirs/child:1", "ours/used:1", "ours/pinned:1"):
        host.docker("rmi", "-f", name)


async def test_an_image_in_use_is_not_removed_without_force_and_the_error_says_so(host: ImageEngine) -> None:
    images = host.images()
    report = await images.build(host.project('FROM scratch\nCOPY data /\nCMD ["/data"]\n', data=b"x"), "busy:1")
    container = host.docker("create", "--network", "none", report.tag)
    with pytest.raises(errors.CleanupFailed):
        await images.remove("busy:1")
    assert host.has("busy:1")
    host.docker("rm", container)
    assert (await images.remove("busy:1")).id == report.id
    assert report.id not in images.records.built()
    with pytest.raises(errors.ImageNotFound):
        await images.remove("busy:1")


# --- podman ------------------------------------------------------------------------------------


async def test_podman_builds_fails_and_collects_through_the_same_words(tmp_path: Path) -> None:
    found = engines()
    if "podman" not in found.sockets:
        pytest.skip(f"NOTHING about Podman's images was checked: {found.missing.get('podman')}")
    host = ImageEngine(found.sockets["podman"], tmp_path)
    images = host.images()
    (base,) = [image.reference for image in await images.list() if image.reference.endswith(IMAGE)]
    broken = await images.build(host.project(f"FROM {base}\nRUN echo because; exit 4\n"), "broken:1")
    assert (broken.ok, broken.exit_code, broken.last_lines) == (False, 4, ("because",))
    made = await images.build(host.project(f"FROM {base} AS one\nFROM scratch\nCOPY --from=one /bin/sh /\n"), "made:1")
    assert made.ok, made
    assert (await images.pull("made:1", policy="never")).image.id == made.id
    with pytest.raises(errors.ImageNotFound):
        await images.pull("127.0.0.1:1/absent:1", policy="never")
    gone = await images.gc(older_than=0)
    assert made.id in {image.id for image in gone.removed}
    assert base in {image.reference for image in await images.list()}


@pytest.mark.exhaustive("the image that Docker builds, once more; what Podman does otherwise is in the test above")
async def test_podman_builds_our_image_without_setuid_files_and_package_managers_just_the_same(tmp_path: Path) -> None:
    host = ImageEngine(socket_of("podman"), tmp_path, "podman")
    report = await host.images().build_language("bash", "test", base=IMAGE)
    assert report.ok, report
    contents = host.contents(report.tag)
    assert [file.name for file in contents if file.mode & 0o6000] == []
    programs = {Path(file.name).name for file in contents if file.mode & 0o111 and not file.isdir()}
    assert "bash" in programs
    assert programs & _PACKAGE_MANAGERS == set()
    (base,) = report.bases
    assert host.images().records.lock().images[IMAGE].digest == base.partition("@")[2]
    host.docker("rmi", "-f", report.id)


# --- the command line --------------------------------------------------------------------------


def test_the_command_builds_a_project_and_tells_a_failing_step_with_exit_code_1(host: ImageEngine) -> None:
    broken = host.project(f"FROM {IMAGE}\nRUN echo because; exit 3\n")
    done = belljar(host, "build", "--context", str(broken), "--tag", "cli:1")
    assert done.returncode == 1
    assert "RUN echo because; exit 3" in done.stderr
    assert "│ because" in done.stderr
    told = json.loads(belljar(host, "build", "--json", "--context", str(broken), "--tag", "cli:1").stdout)
    assert (told["builds"][0]["ok"], told["builds"][0]["exit_code"]) == (False, 3)
    fine = host.project("FROM scratch\nCOPY data /\n", data=b"x")
    assert belljar(host, "build", "--context", str(fine), "--tag", "cli:1").stdout.startswith("✓ cli:1 sha256:")
    assert "removed cli:1" in belljar(host, "gc", "--older-than", "0s").stdout
    assert belljar(host, "build", "--context", str(fine)).returncode == 125
    assert belljar(host, "build", "--context", str(fine), "--tag", "x:1", "--memory", "999G").returncode == 126


def test_the_command_builds_our_own_image_under_belljars_version(host: ImageEngine) -> None:
    done = belljar(host, "build", "bash", "--base", IMAGE)
    assert done.returncode == 0, done.stderr
    assert parse(done.stdout.split()[1]).key == f"belljar/bash:{__version__}"
    rows = json.loads(belljar(host, "list", "--ours", "--json").stdout)["images"]
    assert f"belljar/bash:{__version__}" in [tag for row in rows for tag in row["tags"]]
