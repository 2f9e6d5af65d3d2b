"""A container that may write to a repository gets a copy of it: what git runs there is not copied back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from belljar.engine.engine import Engine
from engines import FLAVOURS, engines, run

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
_OWNERS = [0, 54_321] if os.geteuid() == 0 else [os.geteuid()]
_ATTACK = """
import os, shutil
for name in ("config", "hooks/pre-commit", "commondir", "index", "modules/a/b/config", "modules/a/b/index"):
    with open(f".git/{name}", "w") as file:
        file.write("of the guest")
shutil.rmtree(".git/worktrees")
os.rename(".git", "x")
os.rename("x", ".git")
open("made", "w").close()
"""


@pytest.fixture(params=FLAVOURS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


@pytest.fixture(params=_OWNERS)
def repository(request: pytest.FixtureRequest, open_folder: Path) -> Path:
    for name in ("config", "hooks/sample", "modules/a/b/config", "worktrees/tree/commondir"):
        path = open_folder / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the host")
    if os.geteuid() == 0:
        for path in (open_folder, *open_folder.rglob("*")):
            os.chown(path, request.param, request.param)
    return open_folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def test_what_git_runs_is_not_copied_back_and_a_warning_says_so(engine: Engine, repository: Path) -> None:
    before = contents(repository)
    result = await run(engine, _ATTACK, workspace=str(repository), write=True)
    (warning,) = result.warnings
    assert all(name in warning for name in (".git/commondir", ".git/config", ".git/hooks/pre-commit")), warning
    assert "not copied back" in warning
    made = {".git/index": "of the guest", ".git/modules/a/b/index": "of the guest", "made": ""}
    assert contents(repository) == before | made


@pytest.mark.parametrize("repository", _OWNERS[-1:], indirect=True)
async def test_a_repository_granted_by_name_is_changed(engine: Engine, repository: Path) -> None:
    result = await run(engine, _ATTACK, workspace=str(repository), write=True, write_git=True)
    assert (result.status, result.warnings) == ("success", ()), result.stderr
    assert contents(repository)[".git/config"] == "of the guest"
    assert not (repository / ".git/worktrees").exists()
