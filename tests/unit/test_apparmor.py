"""Our AppArmor profile: its text and its place. No kernel of ours has AppArmor, so nothing is loaded here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from belljar.backends.containers.facts import EngineFacts, security
from belljar.core import errors
from belljar.core.settings import GRANTABLE, ContainerSettings
from belljar.host import apparmor
from belljar.host.engine_address import DOCKER, EngineAddress


def test_the_profile_denies_mounts_tracing_and_other_profiles_and_allows_no_capability_that_cannot_be_given() -> None:
    lines = [line.strip() for line in apparmor.PROFILE_PATH.read_text().splitlines()]
    assert any(line.startswith(f"profile {apparmor.PROFILE} ") for line in lines)
    for wall in ("mount", "remount", "umount", "pivot_root", "ptrace", "change_profile"):
        assert f"deny {wall}," in lines
    allowed = {line.split()[1].rstrip(",").upper() for line in lines if line.startswith("capability ")}
    assert allowed and allowed <= set(GRANTABLE)


def test_the_profile_compiles() -> None:
    program = shutil.which("apparmor_parser", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        pytest.skip("the AppArmor profile was NOT compiled: apt install apparmor")
    words = [program, "--skip-kernel-load", "--skip-cache", "--names", str(apparmor.PROFILE_PATH)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, apparmor.PROFILE), done.stderr


def test_a_kernel_tells_whether_it_has_apparmor_and_what_cannot_be_seen_is_not_loaded(tmp_path: Path) -> None:
    enabled = tmp_path / "enabled"
    assert apparmor.missing(enabled) == "this kernel has no AppArmor"
    enabled.write_text("N\n")
    assert "switched off" in apparmor.missing(enabled)
    enabled.write_text("Y\n")
    assert apparmor.missing(enabled) == ""
    assert not apparmor.is_loaded(policy=tmp_path)
    (tmp_path / "profiles").write_text("docker-default (enforce)\nbelljar-guest-of-mine (enforce)\n")
    assert not apparmor.is_loaded(policy=tmp_path)
    (tmp_path / "profiles").write_text("docker-default (enforce)\nbelljar-guest (enforce)\n")
    assert apparmor.is_loaded(policy=tmp_path)
    (tmp_path / "profiles").unlink()
    (tmp_path / "policy" / "profiles" / "belljar-guest.12").mkdir(parents=True)
    assert apparmor.is_loaded(policy=tmp_path)


def test_containers_have_our_profile_where_it_is_loaded_and_the_administrator_names_no_other() -> None:
    address = EngineAddress(DOCKER, "unix:///x.sock")
    facts = EngineFacts("docker 99", address, "6.1.0", "cgroup v2", {}, ("runc", "runsc"), "runc", False, False)
    facts = facts._replace(security="name=apparmor", apparmor=apparmor.PROFILE)
    assert security(ContainerSettings(), facts) == ("apparmor=belljar-guest",)
    assert security(ContainerSettings(), facts, "runsc") == ()
    assert security(ContainerSettings(apparmor_profile="mine"), facts) == ("apparmor=mine",)
    assert security(ContainerSettings(), facts._replace(apparmor="")) == ()


async def test_where_something_is_missing_nothing_is_installed_and_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apparmor, "missing", lambda: "this kernel has no AppArmor")
    with pytest.raises(errors.NotAvailable, match="this kernel has no AppArmor: nothing was installed"):
        await apparmor.install(tmp_path)
    monkeypatch.setattr(apparmor, "missing", lambda: "")
    with pytest.raises(errors.NotAvailable, match="not installed") as caught:
        apparmor.parser(str(tmp_path))
    assert caught.value.fix == "apt install apparmor"
    assert list(tmp_path.iterdir()) == []


async def test_the_profile_is_written_and_the_parser_called_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, asked = tmp_path / "parser", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >{asked}; exit $(cat {tmp_path}/code)\n')
    program.chmod(0o755)
    folder = tmp_path / "apparmor.d"
    folder.mkdir()
    monkeypatch.setattr(apparmor, "missing", lambda: "")
    monkeypatch.setattr(apparmor, "parser", lambda: str(program))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (tmp_path / "code").write_text("0")
    path = await apparmor.install(folder)
    assert path.read_text() == apparmor.PROFILE_PATH.read_text()
    assert asked.read_text() == f"--replace --write-cache {path}\n"
    (tmp_path / "code").write_text("1")
    with pytest.raises(errors.ExecutionFailed, match="apparmor_parser"):
        await apparmor.install(folder)


def test_the_command_shows_the_profiles_and_says_whether_ours_is_loaded() -> None:
    def belljar(*words: str) -> str:
        line = [sys.executable, "-m", "belljar", "profiles", *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout

    assert belljar("show", "apparmor") == apparmor.PROFILE_PATH.read_text()
    assert '"defaultAction"' in belljar("show", "seccomp")
    assert ("is loaded" if apparmor.is_loaded() else "is not loaded") in belljar("status")
