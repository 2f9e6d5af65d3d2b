"""Defaults < administrator's file < user's file < project file < environment < flags, each wrong value by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar import errors, settings
from belljar.models import GIB, MIB
from belljar.settings import Settings

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

if Path("/etc/belljar/config.toml").exists():
    pytest.skip("SKIPPED: /etc/belljar/config.toml of this machine would speak in every test", allow_module_level=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "project" / "deep").mkdir(parents=True)
    (tmp_path / "project" / ".git").mkdir()
    return tmp_path


def load(home: Path, project: str = "project/deep", env: dict[str, str] | None = None, **flags: Any) -> Settings:
    return settings.load({"HOME": str(home / "home"), **(env or {})}, home / project, **flags)


def user_file(home: Path, text: str) -> None:
    path = home / "home" / ".config" / "belljar" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def project_file(home: Path, text: str) -> None:
    (home / "project" / ".belljar.toml").write_text(text)


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


@pytest.mark.parametrize(
    "line",
    [
        "max_containers = 99",
        "[caps]\ntimeout = 9999",
        'state_dir = "/x"',
        "user_uid = 1",
        'language_file = "x"',
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
