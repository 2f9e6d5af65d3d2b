"""Where the programs of languages come from, and what is granted to a guest with them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from belljar.backends.native.toolchains import Toolchains
from belljar.core import errors, languages
from belljar.core.capabilities import LanguageSupport
from belljar.core.languages import BUILTIN
from programs import program

# --- what the host has ---


@cache
def supports() -> dict[str, LanguageSupport]:
    import anyio

    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {each.name: each for each in anyio.run(Toolchains(path, as_root=os.geteuid() == 0).support)}


def test_every_language_says_its_version_and_program_or_how_to_get_it() -> None:
    assert list(supports()) == list(BUILTIN)
    for support in supports().values():
        assert support.version and Path(support.program).exists() if support.available else support.fix


def test_typescript_is_run_by_a_node_that_strips_types() -> None:
    support = supports()["typescript"]
    if not support.available:
        pytest.skip(f"SKIPPED: typescript: {support.fix}")
    major, minor = map(int, support.version.split(".")[:2])
    assert (major, minor) >= (22, 18)


def test_a_program_s_own_prefix_is_granted_with_it(open_folder: Path) -> None:
    real = program(open_folder / "tool" / "bin", "mytool")
    tool = Toolchains(str(real.parent), as_root=True).find("mytool")
    assert tool == (str(real), str(open_folder / "tool"))


@pytest.mark.parametrize("prefix", [".local", ".cargo"])
def test_a_prefix_with_private_things_is_not_granted_only_the_program(open_folder: Path, prefix: str) -> None:
    real = program(open_folder / prefix / "tools" / ".." / "bin", "mytool").resolve()
    tool = Toolchains(str(real.parent), as_root=True).find("mytool")
    assert tool is None if prefix == ".cargo" else tool == (str(real), str(real))


def test_a_program_in_a_home_directory_s_bin_does_not_grant_the_home(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    me = pwd.getpwuid(os.geteuid())
    fields = [*me[:5], str(open_folder / "home" / "me"), me.pw_shell]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(fields))
    for folder in ("home/me/bin", "home/bin"):
        real = program(open_folder / folder, "mytool")
        tool = Toolchains(str(real.parent), as_root=True).find("mytool")
        assert tool == (str(real), str(real))


def test_a_program_that_the_guest_may_not_read_is_not_found_when_it_runs_as_another_uid(open_folder: Path) -> None:
    real = program(open_folder / "tool" / "bin", "mytool")
    (open_folder / "tool").chmod(0o700)
    assert Toolchains(str(real.parent), as_root=True).find("mytool") is None
    assert Toolchains(str(real.parent), as_root=False).find("mytool") is not None
    (open_folder / "tool").chmod(0o755)
    real.chmod(0o754)
    assert Toolchains(str(real.parent), as_root=True).find("mytool") is None


def test_behind_a_version_switch_the_real_program_is_found(open_folder: Path) -> None:
    program(open_folder / ".pyenv" / "shims", "python3.9")
    real = program(open_folder / ".pyenv" / "versions" / "3.9.1" / "bin", "python3.9")
    tool = Toolchains(str(open_folder / ".pyenv" / "shims"), as_root=True).find("python3.9")
    assert tool == (str(real), str(real.parent.parent))
    program(open_folder / ".cargo" / "bin", "myrustc")
    program(open_folder / ".rustup" / "toolchains" / "nightly-x" / "bin", "myrustc")
    stable = program(open_folder / ".rustup" / "toolchains" / "stable-x" / "bin", "myrustc")
    found = Toolchains(str(open_folder / ".cargo" / "bin"), as_root=True).find("myrustc")
    assert found == (str(stable), str(stable.parent.parent))


@pytest.mark.anyio
async def test_a_language_that_a_shell_starts_is_found_by_what_it_needs(open_folder: Path) -> None:
    real = program(open_folder / "tool" / "bin", "mytool")
    mine = languages.Language(name="mine", filename="m", argv=("sh", "-c", "mytool", "m"), needs="mytool", fix="get it")
    tools = Toolchains(str(real.parent), as_root=True, languages=[mine])
    assert await tools.tool_for("sh", "mine") == (str(real), str(open_folder / "tool"))
    assert [each.available for each in await tools.support()] == [True]
    real.unlink()
    with pytest.raises(errors.NotAvailable, match="get it"):
        await tools.tool_for("sh", "mine")
    assert [each.fix for each in await tools.support()] == ["get it"]


# --- a granted Python environment ---


@pytest.mark.parametrize("kind", ["none", "empty", "no packages"])
def test_a_folder_that_is_no_environment_is_refused_saying_how_to_make_one(open_folder: Path, kind: str) -> None:
    if kind != "none":
        (open_folder / "venv").mkdir()
    if kind == "no packages":
        (open_folder / "venv" / "pyvenv.cfg").touch()
    with pytest.raises(errors.InvalidRequest, match=r"packages: .*python3 -m venv"):
        Toolchains("/usr/bin", as_root=True).environment(str(open_folder / "venv"))


def test_an_environment_in_a_private_folder_is_refused_when_guests_are_another_uid(open_folder: Path) -> None:
    library = open_folder / "private" / "venv" / "lib" / "python3.11" / "site-packages"
    library.mkdir(parents=True)
    (open_folder / "private" / "venv" / "pyvenv.cfg").touch()
    (open_folder / "private").chmod(0o700)
    with pytest.raises(errors.PolicyDenied, match=r"packages: .*home directory"):
        Toolchains("/usr/bin", as_root=True).environment(str(open_folder / "private" / "venv"))


def test_an_environment_cannot_smuggle_in_a_folder_by_its_link_to_python(open_folder: Path) -> None:
    """`bin/python` -> /x/secrets/y: granting the folder above would show the guest what it should not see."""
    venv = open_folder / "venv"
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "pyvenv.cfg").touch()
    target = program(open_folder / "secrets" / "inner", "python")
    os.symlink(target, venv / "bin" / "python")
    grant = Toolchains("/usr/bin", as_root=True).environment(str(venv))
    assert set(grant.folders) <= {str(venv), str(target)}
