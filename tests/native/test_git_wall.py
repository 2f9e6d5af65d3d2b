"""A guest that may write to a repository commits to it, and cannot change what git runs there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import belljar
from belljar.engine.engine import Engine
from belljar.host import git_settings
from witness import eventually

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("git") is None, reason="NOT SHOWN: git is not installed here"),
]
STRANGER = 54_321
OWNERS = [0, STRANGER] if os.geteuid() == 0 else [os.geteuid()]
_GIT = {
    "GIT_CONFIG_COUNT": "3",
    **{"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
    **{"GIT_CONFIG_KEY_1": "user.name", "GIT_CONFIG_VALUE_1": "guest"},
    **{"GIT_CONFIG_KEY_2": "user.email", "GIT_CONFIG_VALUE_2": "guest@example.org"},
}
_SETTINGS = (".git/config", ".git/hooks", ".git/modules/sub/config", ".git/modules/sub/hooks", ".git/worktrees")
_ATTACKS = {
    "changes the configuration": "git config core.fsmonitor /tmp/x",
    "writes to the configuration": "echo > .git/config",
    "removes the configuration": "rm -f .git/config",
    "makes a hook": "echo > .git/hooks/post-commit",
    "makes a hook executable": "chmod 755 .git/hooks/*",
    "moves the hooks": "mv .git/hooks .git/old",
    "moves the repository": "mv .git .old",
    "exchanges the repository": "cp -r .git .new; mv --exchange .git .new || mv -T .new .git",
    "removes the repository's settings": "rm -rf .git/config .git/hooks .git/modules .git/worktrees",
    "changes a submodule": "echo > .git/modules/sub/config",
    "moves all submodules": "mv .git/modules .git/elsewhere",
    "moves a submodule": "mv .git/modules/sub .git/modules/other",
    "leads a worktree elsewhere": "echo /tmp > .git/worktrees/tree/commondir",
    "links to the configuration": "ln .git/config linked && echo > linked",
    "opens by a descriptor's name": "exec 3< .git/config; echo > /proc/self/fd/3",
}


@pytest.fixture(params=OWNERS)
def repository(request: pytest.FixtureRequest, open_folder: Path) -> Path:
    """A repository with what may be the repositories of a submodule and of a worktree, of root and of another user."""
    subprocess.run(["git", "init", "-q", "-b", "main", str(open_folder)], check=True)
    for name in ("modules/sub/hooks", "worktrees/tree"):
        (open_folder / ".git" / name).mkdir(parents=True)
    (open_folder / ".git/modules/sub/config").write_text("[core]\n")
    (open_folder / ".git/modules/sub/HEAD").write_text("ref: refs/heads/main\n")
    (open_folder / ".git/worktrees/tree/commondir").write_text("../..\n")
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{request.param}:{request.param}", str(open_folder)], check=True)
    return open_folder


def settings(folder: Path) -> Mapping[str, object]:
    """All that git goes by in a repository, with the inodes."""
    found: dict[str, object] = {".git": (folder / ".git").lstat().st_ino}
    for name in _SETTINGS:
        for path in (folder / name, *sorted((folder / name).rglob("*"))):
            facts = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (facts.st_ino, facts.st_mode, facts.st_nlink if content else 0, content)
    return found


async def test_a_guest_of_a_repository_commits_and_changes_nothing_that_git_runs(
    engine: Engine, repository: Path
) -> None:
    run = partial(
        belljar.arun, engine=engine, backend="native", workspace=str(repository), write=True, language="bash", env=_GIT
    )
    before = settings(repository)
    work = (
        "set -e; echo 1 > a; git add a; git commit -qm 1; git checkout -qb other; echo 2 > a; git commit -qam 2; "
        "git checkout -q main; git merge -q other; git branch -d other; git tag v1; git stash list; git gc -q; git log"
    )
    worked = await run(work)
    assert (worked.status, worked.warnings) == ("success", ()), worked.stderr
    assert settings(repository) == before
    for what, attack in _ATTACKS.items():
        result = await run(attack)
        assert settings(repository) == before, what
        assert result.warnings == (), what
    assert (await run("git log --format=%s")).stdout == "2\n1\n"
    assert not set(os.listdir(repository)) & {".old", "linked"}


async def test_what_git_would_go_by_that_was_not_there_is_renamed_and_told_of(engine: Engine, repository: Path) -> None:
    shutil.rmtree(repository / ".git/hooks")
    attack = "echo /workspace/x > .git/commondir; mkdir .git/hooks; echo > .git/hooks/pre-commit"
    result = await belljar.arun(
        attack, engine=engine, backend="native", workspace=repository, write=True, language="bash"
    )
    (warning,) = result.warnings
    assert ".git/commondir.by-guest-" in warning and ".git/hooks.by-guest-" in warning
    assert not (repository / ".git/commondir").exists() and not (repository / ".git/hooks").exists()


async def test_a_repository_granted_by_name_is_the_guests(engine: Engine, repository: Path) -> None:
    result = await belljar.arun(
        "git config core.fsmonitor /tmp/x && echo > .git/hooks/post-commit && mv .git x && mv x .git",
        engine=engine, backend="native", workspace=repository, write=True, write_git=True, language="bash", env=_GIT,
    )  # fmt: skip
    assert (result.status, result.warnings) == ("success", ()), result.stderr
    assert "fsmonitor" in (repository / ".git/config").read_text()


async def test_a_file_that_says_where_the_repository_is_stays(engine: Engine, open_folder: Path) -> None:
    (open_folder / ".git").write_text("gitdir: /elsewhere\n")
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "54321:54321", str(open_folder)], check=True)
    attack = "echo gitdir: /workspace/x > .git; rm -f .git; mv .git x; ls -a"
    result = await belljar.arun(
        attack, engine=engine, backend="native", workspace=open_folder, write=True, language="bash"
    )
    assert result.stdout == ".\n..\n.git\n", result.stderr
    assert (open_folder / ".git").read_text() == "gitdir: /elsewhere\n"


async def test_so_many_submodules_that_none_can_be_told_from_the_rest_are_read_only_as_a_whole(
    engine: Engine, repository: Path
) -> None:
    for number in range(120):
        (repository / ".git/modules" / f"a{number}").mkdir()
    before = settings(repository)
    attack = "echo > .git/modules/sub/config; echo > .git/modules/sub/hooks/x; touch .git/modules/new; touch .git/ok"
    result = await belljar.arun(
        attack, engine=engine, backend="native", workspace=repository, write=True, language="bash"
    )
    assert settings(repository) == before, result.stderr
    assert (repository / ".git/ok").exists() and not (repository / ".git/modules/new").exists()


async def test_a_kept_sandbox_and_its_owner_cannot_change_what_git_runs_either(
    engine: Engine, repository: Path
) -> None:
    before = settings(repository)
    async with belljar.AsyncSandbox(engine=engine, backend="native", workspace=repository, write=True) as box:
        await box.run(command=["sh", "-c", "echo > .git/config; mv .git x"])
        for name in (
            ".git/config",
            ".git/hooks/pre-commit",
            ".git/commondir",
            ".git/modules/sub/config",
            ".GIT/config",
        ):
            with pytest.raises(OSError, match="write_git"):
                await box.write(name, b"x")
        await box.write(".git/info/exclude", b"*.o\n")
    assert settings(repository) == before


_LATER = """
import os, threading, time
def later():
    while not os.path.exists("go"):
        time.sleep(0.01)
    open(".git/commondir", "w").write("../elsewhere")
threading.Thread(target=later, daemon=True).start()
"""


async def test_what_a_session_makes_between_its_turns_is_renamed_when_it_ends(engine: Engine, repository: Path) -> None:
    commondir = repository / ".git/commondir"
    async with belljar.AsyncSession(engine=engine, backend="native", workspace=repository, write=True) as session:
        assert (await session.run(_LATER)).ok
        (repository / "go").touch()
        assert await anyio.to_thread.run_sync(eventually, commondir.exists)
    assert not commondir.exists()
    assert [path.read_text() for path in (repository / ".git").glob("commondir.by-guest-*")] == ["../elsewhere"]


async def test_a_link_that_another_sandbox_puts_there_meanwhile_is_not_mounted(
    engine: Engine, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our look and bubblewrap's mount: it stops, and nothing of the host comes into the sandbox."""
    honest = git_settings.parts

    def swapped(*args: Any, **options: Any) -> list[git_settings.GitPart]:
        found = honest(*args, **options)
        (repository / ".git/config").unlink()
        (repository / ".git/config").symlink_to("/etc/hostname")
        return found

    monkeypatch.setattr(git_settings, "parts", swapped)
    with pytest.raises(belljar.BackendError, match="could not be built"):
        await belljar.arun(
            "cat .git/config", engine=engine, backend="native", workspace=repository, write=True, language="bash"
        )
