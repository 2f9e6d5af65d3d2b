"""What of a granted folder tells its owner's next `git` which programs to run: its configuration and hooks.

A guest that may write to the folder may change these. That is seen here, and told; it is not prevented.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress

from belljar.host import files

Stamp = tuple[int, ...]
_FILES = ("config", "config.worktree", "commondir")
_HOOKS = "hooks"
_MAX_HOOKS = 1000


def look(folder: str) -> Mapping[str, Stamp]:
    """Returns the names of git's settings and hooks in a folder, each with what changes whenever the file does."""
    try:
        with files.opened(folder) as root:
            return dict(_look(root))
    except OSError:  # it is gone, or nobody but its owner may look
        return {}


def _look(root: int) -> Iterator[tuple[str, Stamp]]:
    with suppress(FileNotFoundError):
        facts = os.stat(".git", dir_fd=root, follow_symlinks=False)
        if not stat.S_ISDIR(facts.st_mode):  # a link, or a file that says where the repository is
            yield ".git", _stamp(facts)
            return
        yield ".git", (facts.st_dev, facts.st_ino)
        with files.below(root, ".git") as git:
            yield from _stamps(git, _FILES, ".git")
        with files.below(root, f".git/{_HOOKS}") as hooks:
            yield from _stamps(hooks, sorted(os.listdir(hooks))[:_MAX_HOOKS], f".git/{_HOOKS}")


def _stamps(folder: int, names: tuple[str, ...] | list[str], above: str) -> Iterator[tuple[str, Stamp]]:
    for name in names:
        with suppress(FileNotFoundError):
            yield f"{above}/{name}", _stamp(os.stat(name, dir_fd=folder, follow_symlinks=False))


def _stamp(facts: os.stat_result) -> Stamp:
    return facts.st_dev, facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def changed(before: Mapping[str, Stamp], after: Mapping[str, Stamp]) -> list[str]:
    """Returns the names that were added, taken away or changed."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
