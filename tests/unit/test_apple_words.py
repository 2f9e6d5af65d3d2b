"""Apple's `container`: what it prints (of versions before and after 1.0), what it is told, and when it is not there.

No Mac was at hand: the fixtures were written from what others published, and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from belljar.backends.apple import arguments, output, ownership
from belljar.backends.apple.arguments import LEAST_MEMORY, AppleMachine
from belljar.backends.apple.backend import Apple
from belljar.backends.apple.run import MachineFigures, figures
from belljar.backends.guest_text import shell_script
from belljar.core import errors
from belljar.core.plan import Plan
from belljar.core.request import Limits, Workspace
from belljar.core.values import MIB
from belljar.host import process

pytestmark = pytest.mark.anyio
FIXTURES = Path(__file__).parents[1] / "support" / "fixtures" / "apple"


def fixture(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


# --- what it prints ---


@pytest.mark.parametrize(("name", "first"), [("list-0.12", "bj-old"), ("list-1.2", "bj-new")])
def test_the_list_is_read_alike_before_and_after_1_0(name: str, first: str) -> None:
    mine, other = output.containers(fixture(name)["stdout"])
    assert mine == (first, "running", {"belljar": "box", "belljar.owner": "/state/7-abc.apple"})
    assert other == ("web", "stopped", {})


@pytest.mark.parametrize("said", ["", "[]"])
def test_an_empty_list_is_no_machines(said: str) -> None:
    assert output.containers(said) == ()


def test_rows_that_cannot_be_understood_are_nobody_s_machines() -> None:
    said = json.dumps([1, {}, {"id": 7}, {"id": "x", "status": None, "configuration": [], "labels": 3}])
    assert output.containers(said) == (("x", "unknown", {}),)


@pytest.mark.parametrize("said", ["ID  IMAGE  OS", "{}", '"running"'])
def test_a_list_that_is_none_is_an_error_and_never_an_empty_one(said: str) -> None:
    with pytest.raises(errors.ExecutionFailed, match="nobody can read"):
        output.containers(said)


@pytest.mark.parametrize("name", ["status-1.2-running", "status-1.5-running", "status-0.11-table"])
def test_a_running_service_is_recognised_in_every_shape(name: str) -> None:
    shown = fixture(name)
    assert output.service(shown["exit_code"], shown["stdout"]) == (True, "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status-1.2-unregistered", "unregistered"),
        ("status-1.5-stopped", "not running"),
        ("status-0.9-words", "apiserver is not running and not registered with launchd"),
    ],
)
def test_a_service_that_does_not_run_says_so_in_its_own_words(name: str, words: str) -> None:
    shown = fixture(name)
    assert output.service(shown["exit_code"], shown["stdout"]) == (False, words)


def test_a_service_that_says_it_is_stopped_is_believed_whatever_its_exit_code() -> None:
    assert not output.service(0, '{"status": "not running"}').running


def test_the_version_is_found_in_the_sentence() -> None:
    assert output.version(fixture("version-1.2")["stdout"]) == (1, 2, 0)
    assert output.version("no number") == ()


@pytest.mark.parametrize(
    ("name", "kind", "fix"),
    [
        ("error-no-service", errors.NotAvailable, "container system start"),
        ("error-little-memory", errors.StartFailed, "raise `memory`"),
        ("error-option", errors.NotAvailable, output.UPGRADE),
        ("error-image", errors.ImageNotFound, "container image pull NAME, or choose another image"),
    ],
)
def test_its_prose_becomes_a_typed_error_with_a_remedy(name: str, kind: type[errors.BelljarError], fix: str) -> None:
    found = output.failure(fixture(name)["stderr"], "it failed")
    assert (type(found), found.fix) == (kind, fix)


def test_prose_that_nobody_knows_is_told_as_it_is() -> None:
    found = output.failure("Error: something\n new", "it failed")
    assert (type(found), found.message) == (errors.StartFailed, "it failed: Error: something new")


# --- what was counted ---

_V2 = "memory.events:\nlow 0\noom 1\noom_kill 2\nmemory.peak:\n1048576\ncpu.stat:\nusage_usec 2500\nuser_usec 1\n"
_V1 = "memory.oom_control:\nunder_oom 0\noom_kill 3\nmemory.max_usage_in_bytes:\n2097152\ncpuacct.usage:\n4000000\n"
_KERNEL = "kernel:\noom_kill 9\nend:\n"


def test_figures_are_read_from_either_version_of_control_groups() -> None:
    assert figures(_V2 + _KERNEL, own_kernel=False) == MachineFigures(2, 1048576, 2.5)
    assert figures(_V1 + _KERNEL, own_kernel=False) == MachineFigures(3, 2097152, 4.0)


def test_the_whole_kernel_s_count_is_taken_only_from_a_kernel_of_its_own() -> None:
    assert figures(_KERNEL, own_kernel=True) == MachineFigures(9, None, None)
    assert figures(_KERNEL, own_kernel=False) == MachineFigures(0, None, None)


# --- what it is told ---

WATCH = arguments.GuestLaunch("mark", sure=True, filter="")


def machine(workspace: Workspace | None = None, **limits: Any) -> AppleMachine:
    return AppleMachine("bj-1", "python:3.12-slim", Limits(**limits), "/state/1-a.apple", workspace)


def after(words: list[str], flag: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == flag]


def test_a_machine_is_booted_behind_every_wall_there_is() -> None:
    words = arguments.run(machine())
    assert {"--rm", "--read-only", "--init", "--interactive"} <= set(words)
    assert (after(words, "--network"), after(words, "--cap-drop")) == (["none"], ["ALL"])
    assert after(words, "--user") == ["60998:60998"]
    assert after(words, "--label") == ["belljar=box", "belljar.owner=/state/1-a.apple"]
    assert words[-3:] == ["--entrypoint", "cat", "python:3.12-slim"]
    assert {word for word in words if word.startswith("--")}.isdisjoint({"--volume", "--publish", "--ssh", "--cap-add"})


def test_memory_is_whole_megabytes_and_never_less_than_boots() -> None:
    assert after(arguments.run(machine(memory="1G")), "--memory") == ["1024M"]
    assert after(arguments.run(machine(memory=512 * MIB + 5)), "--memory") == ["512M"]
    assert after(arguments.run(machine(memory="64M")), "--memory") == ["200M"]


def test_what_a_machine_has_above_its_limit_is_taken_up_by_ballast() -> None:
    small, large = machine(memory="64M"), machine(memory=LEAST_MEMORY)
    assert (arguments.ballast(small.limits), arguments.ballast(large.limits)) == (136 * MIB, 0)
    mount = f"type=tmpfs,target={arguments.BALLAST},size=200M,mode=700"
    assert (mount in arguments.run(small), mount in arguments.run(large)) == (True, False)


def test_a_part_of_a_cpu_becomes_a_whole_one() -> None:
    assert after(arguments.run(machine(cpus=0.5)), "--cpus") == ["1"]
    assert after(arguments.run(machine(cpus=2.5)), "--cpus") == ["3"]


def test_folders_in_memory_leave_room_for_the_guest_and_are_never_of_any_size() -> None:
    def sizes(**limits: Any) -> set[str]:
        return {mount.split(",")[2] for mount in after(arguments.run(machine(**limits)), "--mount")}

    assert sizes(memory="512M", disk="1G") == {"size=192M"}
    assert sizes(memory="512M", disk="4M") == {"size=4M"}
    assert sizes(memory="512M", disk="64K") == {"size=1M"}  # Apple rounds down, and 0 would mean: no limit


def test_a_folder_granted_read_only_is_closed_to_the_guest() -> None:
    def modes(write: bool) -> dict[str, str]:
        mounts = after(arguments.run(machine(Workspace(path="/p", write=write))), "--mount")
        return {mount.split(",")[1]: mount.split(",")[3] for mount in mounts}

    assert modes(write=False) == {
        "target=/workspace": "mode=755",
        "target=/tmp": "mode=1777",
        "target=/inputs": "mode=1777",
    }
    assert modes(write=True)["target=/workspace"] == "mode=1777"


def test_the_guest_s_environment_comes_after_its_limits_are_set() -> None:
    """What LD_PRELOAD or BASH_ENV name must not run before the walls stand."""
    words = arguments.guest(
        "bj-1", 5, WATCH, 9, argv=["sh", "-c", "x"], env={"LD_PRELOAD": "/x"}, cwd="/workspace", stdin=True
    )
    assert not {"--env", "-e", "--env-file"} & set(words)
    assert words.index("LD_PRELOAD=/x") > words.index(shell_script("apple/run"))
    assert words[-3:] == ["sh", "-c", "x"]


def test_a_program_with_an_equals_sign_in_its_name_is_not_a_variable() -> None:
    words = arguments.guest("b", 5, WATCH, 9, argv=["./a=b", "c"], env={}, cwd="/workspace", stdin=False)
    assert words[-5:] == ["/bin/sh", "-c", shell_script("apple/exec_literal"), "./a=b", "c"]


def test_a_build_is_told_its_limits() -> None:
    words = arguments.build("/c", "app:1", file="/c/Dockerfile", memory_bytes=3 * MIB + 1, cpus=1.5)
    assert words[-1] == "/c"
    assert (after(words, "--memory"), after(words, "--cpus"), after(words, "--tag")) == (["4M"], ["2"], ["app:1"])


# --- when it is not there ---


async def test_on_another_system_it_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    offer = await Apple(tmp_path / "state", platform="linux").probe()
    assert (offer.available, offer.why_not) == (False, "apple needs macOS 26 on Apple silicon")
    assert offer.fix


async def test_the_platform_is_an_argument_and_no_variable_changes_it(tmp_path: Path) -> None:
    """The default is this very system, so on a Mac the word is another one."""
    offer = await Apple(tmp_path / "state", binary="/nonexistent/container").probe()
    assert not offer.available
    assert ("macOS 26" in offer.why_not) == (os.uname().sysname != "Darwin")


async def test_without_the_program_the_remedy_is_to_install_it(tmp_path: Path) -> None:
    offer = await Apple(tmp_path / "state", platform="darwin", binary="/nonexistent/container").probe()
    assert offer.why_not == "Apple's container is not installed"
    assert "install" in offer.fix


def program(tmp_path: Path, script: str) -> str:
    path = tmp_path / "container"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "why", "fix"),
    [
        ("echo container CLI version 0.11.0", "0.12 or later is needed", output.UPGRADE),
        ("echo rubbish", "0.12 or later is needed", output.UPGRADE),
        ('[ "$1" = --version ] && echo version 1.0.0 || { echo \'{"status": "unregistered"}\'; exit 1; }',
         "the services of Apple's container do not run (unregistered)", "container system start"),
        ('case $1 in --version) echo version 1.0.0;; system) echo {};; *) echo usage;; esac',
         "this container has no option --cap-drop", output.UPGRADE),
        ('case $1 in --version) echo version 1.0.0;; run) echo --cap-drop --init --label --mount --network --read-only '
         "--user;; image) exit 1;; esac",
         "the image python:3.12-slim is not here", "container image pull python:3.12-slim"),
        ("kill -9 $$", "0.12 or later is needed", output.UPGRADE),
    ],
)  # fmt: skip
async def test_a_program_that_is_not_ready_says_why_and_what_to_do(
    tmp_path: Path, script: str, why: str, fix: str
) -> None:
    offer = await Apple(tmp_path / "state", platform="darwin", binary=program(tmp_path, script)).probe()
    assert not offer.available
    assert why in offer.why_not
    assert offer.fix == fix


async def test_an_image_that_is_missing_can_be_set_up(tmp_path: Path) -> None:
    script = (
        "case $1 in --version) echo version 1.0.0;; run) echo " + " ".join(arguments.NEEDED) + ";; image) exit 1;; esac"
    )
    offer = await Apple(tmp_path / "state", platform="darwin", binary=program(tmp_path, script)).probe()
    assert offer.setup == "pulling the image python:3.12-slim"


# --- images ---


def test_the_image_is_the_asked_for_one_then_the_language_s_then_its_container_type_s(tmp_path: Path) -> None:
    backend = Apple(tmp_path, images={"go": "own/go:1", "execution": "own/python:3"})
    assert backend.image_for(Plan(image="mine:1", language="go")) == "mine:1"
    assert backend.image_for(Plan(language="go")) == "own/go:1"
    assert backend.image_for(Plan(language="python")) == backend.image_for(Plan()) == "own/python:3"
    assert backend.image_for(Plan(language="javascript")) == "node:20-slim"


# --- owners ---


def test_a_living_owner_is_not_dead_and_one_that_resigned_or_died_is(tmp_path: Path) -> None:
    owner = ownership.MachineOwner(tmp_path)
    assert not ownership.is_dead(owner.name, tmp_path)
    owner.resign()
    assert ownership.is_dead(owner.name, tmp_path)
    left = tmp_path / "99999-0123456789ab.apple"
    left.touch()
    assert ownership.is_dead(str(left), tmp_path)
    ownership.forget_dead(tmp_path)
    assert not left.exists()


def test_owners_of_another_state_directory_cannot_be_judged(tmp_path: Path) -> None:
    for name in ("", "/elsewhere/1-a.apple", str(tmp_path / "1-a.other"), f"{tmp_path}/x/../1-a.apple"):
        assert not ownership.is_dead(name, tmp_path)


# --- a Mac's ways ---


async def test_where_there_are_no_pidfds_a_wait_that_was_given_up_does_not_spoil_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(pid: int) -> int:
        raise OSError("there is no such call on a Mac")

    monkeypatch.setattr(os, "pidfd_open", missing, raising=False)
    null = subprocess.DEVNULL
    for _ in range(20):
        child = process.Child(["sleep", "60"], stdin=null, stdout=null, stderr=null)
        with anyio.move_on_after(0.02):
            await child.wait()
        child.kill()
        with anyio.fail_after(10):
            assert await child.wait() == -9
