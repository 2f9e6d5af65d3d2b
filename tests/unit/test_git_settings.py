"""Which names in a granted folder say what git runs."""

from __future__ import annotations

import pytest

from belljar.client import runs
from belljar.core import errors
from belljar.core.options import request
from belljar.core.request import Workspace
from belljar.host import git_settings
from belljar.protocol.requests import Execute

_SETTINGS = (
    ".git", ".GIT/config", ".git/config", ".git/Config", ".git/hooks", ".git/hooks/pre-commit", ".git/commondir",
    ".git/config.worktree", ".git/worktrees/tree/gitdir", ".git/modules/sub/config", ".git/modules/a/b/hooks/x",
    ".git/modules/a/modules/b/config", ".git/modules/lfs/config", ".git/modules/info/hooks/update",
)  # fmt: skip
_OTHERS = (
    "config", "hooks/x", "a/.git/config", ".gitignore", ".git/index", ".git/refs/heads/config", ".git/HEAD",
    ".git/objects/aa/config", ".git/modules/sub/index", ".git/modules/sub/refs/heads/hooks", ".git/config.lock",
    ".git/modules/config",
)  # fmt: skip


@pytest.mark.parametrize("path", _SETTINGS)
def test_what_git_goes_by_is_a_setting(path: str) -> None:
    assert git_settings.is_setting(path)


@pytest.mark.parametrize("path", _OTHERS)
def test_what_a_commit_changes_is_none(path: str) -> None:
    assert not git_settings.is_setting(path)


def test_gits_settings_are_granted_only_with_the_folder() -> None:
    assert request("1", workspace="/x", write=True, write_git=True).workspace == Workspace(
        path="/x", write=True, write_git=True
    )
    with pytest.raises(errors.InvalidRequest, match="write_git goes with write"):
        request("1", workspace="/x", write_git=True)


def test_a_client_sends_the_grant_to_the_server_and_the_server_reads_it() -> None:
    asked = request("1", workspace="/x", write=True, write_git=True)
    assert Execute.model_validate(runs.execution(asked)).request().workspace == asked.workspace
