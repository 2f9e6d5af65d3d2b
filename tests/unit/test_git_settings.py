"""Which names in a granted folder say what git runs."""

from __future__ import annotations

import pytest

from belljar.host import git_settings

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
