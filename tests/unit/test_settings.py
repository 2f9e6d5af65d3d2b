"""Defaults < administrator's file < user's file < project file < environment < flags, each wrong value by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar import settings
from belljar.core import errors
from belljar.core.policy import decide
from belljar.core.request import RunRequest
from belljar.core.settings import Settings
from belljar.core.values import GIB, MIB
from settings_home import home, load, project_file, user_file

__all__ = ["home"]  # a fixture

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure


def test_without_any_file_the_mission_s_defaults_hold(home: Path) -> None:
    found = load(home)
    assert (found.defaults.timeout, found.defaults.memory, found.defaults.pids) == (30, 512 * MIB, 100)
    assert (found.caps.timeout, found.max_containers, found.backend) == (300, 10, "auto")
    assert found.state_dir and found.home == str(home / "home")


def test_each_layer_goes_over_the_one_before_field_by_field(home: Path) -> None:
    assert load(home).defaults.timeout == 30
    user_file(home, 'backend = "native"\n[defaults]\ntimeout = 1\nmemory = "100M"\npids = 11\n[caps]\ntimeout = 60\n')
    assert load(home).defaults.timeout == 1
    project_file(home, "[defaults]\ntimeout = 2\npids = 12\n")
    assert load(home).defaults.timeout == 2
    env = {"SANDBOX_DEFAULT_TIMEOUT_SECONDS": "3"}
    assert load(home, env=env).defaults.timeout == 3
    found = load(home, env=env, defaults={"timeout": 4})
    assert (found.defaults.timeout, found.defaults.pids, found.defaults.memory) == (4, 12, 100 * MIB)
    assert (found.caps.timeout, found.backend) == (60, "native")


def test_the_user_s_file_is_found_where_xdg_says(home: Path) -> None:
    (home / "xdg" / "belljar").mkdir(parents=True)
    (home / "xdg" / "belljar" / "config.toml").write_text("max_containers = 3\n")
    assert load(home, env={"XDG_CONFIG_HOME": str(home / "xdg")}).max_containers == 3


def test_a_project_file_is_looked_for_up_to_the_repository_s_root_and_no_further(home: Path) -> None:
    (home / ".belljar.toml").write_text("[defaults]\ntimeout = 9\n")
    assert load(home).defaults.timeout == 30
    project_file(home, "[defaults]\ntimeout = 8\n")
    assert load(home).defaults.timeout == 8


LOUD = "[defaults]\ntimeout = 9\n"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away and mount")


def test_a_project_file_is_looked_for_up_to_the_home_and_no_further(home: Path) -> None:
    deep = home / "home" / "work" / "deep"
    deep.mkdir(parents=True)
    (home / ".belljar.toml").write_text(LOUD)
    assert load(home, "home/work/deep").defaults.timeout == 30
    (home / "home" / ".belljar.toml").write_text("[defaults]\ntimeout = 8\n")
    assert load(home, "home/work/deep").defaults.timeout == 8


def test_the_root_of_all_folders_is_not_looked_at_from_below(home: Path) -> None:
    looked = list(settings._project_folders(Path("/usr/lib"), home / "home"))
    assert looked[0] == Path("/usr/lib")
    assert Path("/") not in looked
    assert list(settings._project_folders(Path("/"), home / "home")) == [Path("/")]


@as_root
def test_a_project_file_beyond_a_mount_is_not_looked_at(home: Path) -> None:
    inner = home / "mounted"
    inner.mkdir()
    (home / ".belljar.toml").write_text(LOUD)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(inner)], check=True)
    try:
        (inner / "deep").mkdir()
        assert load(home, "mounted/deep").defaults.timeout == 30
        (inner / ".belljar.toml").write_text("[defaults]\ntimeout = 8\n")
        assert load(home, "mounted/deep").defaults.timeout == 8
    finally:
        subprocess.run(["umount", str(inner)], check=True)


@as_root
@pytest.mark.parametrize("name", [".belljar.toml", ".belljar.json", "package.json"])
def test_a_project_file_of_another_user_is_not_read_and_said_so(
    home: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = home / "project" / "deep" / name
    file.write_text(LOUD if name.endswith("toml") else '{"sandbox": {"enabled": false}}')
    os.chown(file, 12345, 12345)
    found = load(home)
    assert (found.defaults.timeout, found.switched_off) == (30, "")
    assert f"{file} is not read: it belongs to another user (uid 12345)" in caplog.text


@as_root
def test_a_link_of_another_user_to_a_file_of_ours_is_not_followed(home: Path) -> None:
    (home / "elsewhere.toml").write_text(LOUD)
    link = home / "project" / "deep" / ".belljar.toml"
    link.symlink_to(home / "elsewhere.toml")
    assert load(home).defaults.timeout == 9
    os.lchown(link, 12345, 12345)
    assert load(home).defaults.timeout == 30


@as_root
def test_a_user_s_file_that_belongs_to_somebody_else_is_not_read(home: Path) -> None:
    user_file(home, "max_containers = 3\n")
    assert load(home).max_containers == 3
    os.chown(home / "home" / ".config" / "belljar" / "config.toml", 12345, 12345)
    assert load(home).max_containers != 3


def test_a_pipe_that_is_called_like_a_project_file_keeps_nobody_waiting(home: Path) -> None:
    os.mkfifo(home / "project" / "deep" / ".belljar.toml")
    assert load(home).defaults.timeout == 30


@pytest.mark.parametrize(
    "line",
    [
        "max_containers = 99",
        "[caps]\ntimeout = 9999",
        'state_dir = "/x"',
        "user_uid = 1",
        'language_file = "x"',
        "[container]\nread_only_root = false",
        '[container]\nmemory_limit = "1G"',
        '[container.types.preview]\nmemory = "1G"',
        '[images]\nimage_pull_policy = "never"',
        'path = "/x"',
        'home = "/x"',
    ],
)
def test_a_project_file_cannot_set_what_is_the_administrator_s(home: Path, line: str) -> None:
    project_file(home, line)
    with pytest.raises(errors.InvalidRequest, match=r"\.belljar\.toml: \w+ cannot be set by a project.*administrator"):
        load(home)


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS", "120", lambda s: s.caps.timeout == 120),
        ("SANDBOX_DEFAULT_TIMEOUT_SECONDS", "2.5", lambda s: s.defaults.timeout == 2.5),
        ("SANDBOX_DEFAULT_MEMORY_LIMIT_MB", "256", lambda s: s.defaults.memory == 256 * MIB),
        ("SANDBOX_DEFAULT_CPU_QUOTA_PERCENT", "150", lambda s: s.defaults.cpus == 1.5),
        ("SANDBOX_PID_LIMIT", "50", lambda s: s.defaults.pids == 50),
        ("SANDBOX_LANGUAGE_CONFIG_FILE", "/x.json", lambda s: s.language_file == "/x.json"),
        ("SANDBOX_DEFAULT_USER_UID_GID", "70000:70000", lambda s: s.user_uid == 70000),
        ("DOCKER_SOCKET_PATH", "/run/d.sock", lambda s: s.docker_socket == "/run/d.sock"),
        ("MAX_CONTAINERS", "4", lambda s: s.max_containers == 4),
        ("BELLJAR_BACKEND", "native", lambda s: s.backend == "native"),
        ("BELLJAR_STATE_DIR", "/x", lambda s: s.state_dir == "/x"),
        ("BELLJAR_MAX_MEMORY", "2G", lambda s: s.caps.memory == 2 * GIB),
        ("BELLJAR_MAX_CPUS", "3", lambda s: s.caps.cpus == 3),
        ("BELLJAR_MAX_PIDS", "7", lambda s: s.caps.pids == 7),
        ("BELLJAR_DEFAULT_DISK", "100M", lambda s: s.defaults.disk == 100 * MIB),
        ("BELLJAR_DEFAULT_IO_IOPS", "100", lambda s: s.defaults.io_iops == 100),
    ],
)  # fmt: skip
def test_each_variable_is_read(home: Path, name: str, text: str, read: Any) -> None:
    assert read(load(home, env={name: text}))


NUMBERS = [
    "SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS", "SANDBOX_DEFAULT_TIMEOUT_SECONDS", "SANDBOX_DEFAULT_MEMORY_LIMIT_MB",
    "SANDBOX_DEFAULT_CPU_QUOTA_PERCENT", "SANDBOX_PID_LIMIT", "SANDBOX_DEFAULT_USER_UID_GID", "MAX_CONTAINERS",
    "BELLJAR_MAX_MEMORY", "BELLJAR_MAX_PIDS", "BELLJAR_MAX_CPUS", "BELLJAR_DEFAULT_MEMORY", "BELLJAR_DEFAULT_PIDS",
]  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["", "many", "-1", "nan", "1e999"])
def test_a_variable_that_cannot_be_read_is_refused_by_its_name(home: Path, name: str, text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=name) as caught:
        load(home, env={name: text})
    assert name in caught.value.fix


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[defaults]\nmemory = 'lots'\n", r"memory.*512M"), ("[defaults]\ntimeout = 0\n", r"defaults\.timeout: "),
        ("colour = 1\n", r"colour: "), ("max_containers = 0\n", r"max_containers: "), ("[defaults\n", r"\.toml: "),
        ("defaults = 3\n", r"defaults: "), ("[caps]\nmemory = 'x'\n", r"caps\.memory: "),
        ("[caps]\ntimeout = -1\n", r"caps\.timeout: "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_naming_file_and_field(home: Path, text: str, said: str) -> None:
    user_file(home, text)
    with pytest.raises(errors.InvalidRequest, match=said) as caught:
        load(home)
    assert "config.toml" in caught.value.message


def test_a_file_that_is_no_text_is_refused_by_name(home: Path) -> None:
    user_file(home, "")
    (home / "home" / ".config" / "belljar" / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(errors.InvalidRequest, match=r"config\.toml: "):
        load(home)


@patient
@given(name=st.sampled_from(sorted(settings._VARIABLES)), text=st.text(max_size=12))
def test_any_text_in_a_variable_gives_settings_or_a_refusal_by_name(name: str, text: str) -> None:
    env = {"HOME": "/nonexistent", name: text}
    try:
        settings.load(env, Path("/nonexistent"))
    except errors.InvalidRequest as error:
        assert name in error.message


def test_the_state_directory_is_private_to_the_user(home: Path) -> None:
    (home / "run").mkdir()
    found = load(home, env={"XDG_RUNTIME_DIR": str(home / "run")}).state_dir
    assert found == ("/run/belljar" if os.geteuid() == 0 else f"{home}/run/belljar")


def test_flags_of_the_wrong_kind_are_refused_as_flags(home: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"the flags: max_containers: "):
        load(home, max_containers="many")


# --- a block in a project's JSON ---


def project_json(home: Path, block: object, name: str = "package.json", **others: object) -> None:
    (home / "project" / name).write_text(json.dumps({**others, "sandbox": block}))


@pytest.mark.parametrize("name", ["package.json", ".belljar.json"])
def test_the_sandbox_block_of_a_project_s_json_sets_the_defaults_of_a_run(home: Path, name: str) -> None:
    block = {"enabled": True, "backend": "docker", "image": "app:1", "memoryLimit": "256M", "cpuLimit": 0.5}
    project_json(home, block, name)
    found = load(home)
    assert (found.backend, found.defaults.memory, found.defaults.cpus) == ("docker", 256 * MIB, 0.5)
    assert found.container.images["execution"] == found.container.images["test-runner"] == "app:1"
    assert (found.switched_off, found.caps, found.defaults.timeout) == ("", Settings().caps, 30)


def test_a_project_s_json_without_the_block_says_nothing(home: Path) -> None:
    (home / "project" / "package.json").write_text('{"name": "app", "version": "1"}')
    assert load(home) == load(home, project="home")


def test_the_user_s_own_word_goes_over_the_block_and_the_caps_stay_the_administrator_s(home: Path) -> None:
    user_file(home, "[caps]\nmemory = '64M'\n")
    project_json(home, {"memoryLimit": "8G", "backend": "native"})
    found = load(home, env={"BELLJAR_BACKEND": "wasm"})
    assert (found.backend, found.caps.memory) == ("wasm", 64 * MIB)
    assert decide(RunRequest(code="1"), found).limits.memory == 64 * MIB


def test_of_several_project_files_the_nearest_folder_s_first_one_speaks(home: Path) -> None:
    project_json(home, {"cpuLimit": 3})
    assert load(home).defaults.cpus == 3
    project_json(home, {"cpuLimit": 4}, ".belljar.json")
    assert load(home).defaults.cpus == 4
    project_file(home, "[defaults]\ncpus = 5\n")
    assert load(home).defaults.cpus == 5
    (home / "project" / "deep" / "package.json").write_text('{"sandbox": {"cpuLimit": 6}}')
    assert load(home).defaults.cpus == 6


@pytest.mark.parametrize(
    "key",
    ["caps", "state_dir", "user_uid", "max_containers", "memory", "docker_socket", "container", "type", "Enabled"],
)
def test_the_block_cannot_set_what_is_the_administrator_s(home: Path, key: str) -> None:
    project_json(home, {key: 1})
    with pytest.raises(errors.InvalidRequest, match=rf"package\.json: sandbox\.{key} cannot be set.*administrator"):
        load(home)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"memoryLimit": "lots"}, r"sandbox\.memoryLimit: .*512M"),
        ({"memoryLimit": 1}, r"sandbox\.memoryLimit: "),
        ({"cpuLimit": 0}, r"sandbox\.cpuLimit: "),
        ({"cpuLimit": "two"}, r"sandbox\.cpuLimit: "),
        ({"cpuLimit": 1e999}, r"sandbox\.cpuLimit: "),
        ({"enabled": "false"}, r"sandbox\.enabled: "),
        ({"enabled": 0}, r"sandbox\.enabled: "),
        ({"backend": ""}, r"sandbox\.backend: "),
        ({"image": "--privileged"}, r"sandbox\.image: "),
        ({"image": 3, "cpuLimit": -1}, r"sandbox\.image: .*; sandbox\.cpuLimit: "),
        (["enabled"], r"sandbox: must be an object"),
        (False, r"sandbox: must be an object"),
    ],
)
def test_a_wrong_value_in_the_block_is_refused_naming_file_and_key(home: Path, block: object, said: str) -> None:
    project_json(home, block)
    with pytest.raises(errors.InvalidRequest, match=rf"package\.json: .*{said}"):
        load(home)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000, b" " * (5 << 20)])
def test_a_project_s_json_that_cannot_be_read_is_refused_by_name(home: Path, text: bytes) -> None:
    (home / "project" / "package.json").write_bytes(text)
    with pytest.raises(errors.InvalidRequest, match=r"package\.json: "):
        load(home)


def test_a_project_that_switched_belljar_off_is_refused_and_never_run_without_a_sandbox(home: Path) -> None:
    project_json(home, {"enabled": False})
    found = load(home)
    for request in (RunRequest(code="print(1)"), RunRequest(command=("true",), backend="native")):
        with pytest.raises(
            errors.PolicyDenied, match=r"switched Belljar off \(.*package\.json: sandbox\.enabled"
        ) as caught:
            decide(request, found)
        assert "nothing is ever run without a sandbox" in caught.value.fix
