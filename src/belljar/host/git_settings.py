"""What of a granted folder tells its owner's next `git` which programs to run: its configuration and hooks.

A guest that may write to the folder may commit, but not change these, unless that was granted by name (`write_git`).
`parts` opens what a backend mounts over itself, so that it cannot be changed, moved or removed; `is_setting` knows them
by name; `look` and `changed` see what was changed all the same; `set_aside` renames what was not there to be mounted.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from belljar.core.request import Workspace
from belljar.host import files

Stamp = tuple[int, ...]
GIT = ".git"
_MODULES = "modules"  # the repositories of submodules, by their names, which may have slashes
_SETTINGS = ("commondir", "config", "config.worktree", "hooks", "worktrees")
_WATCHED = ("commondir", "config", "config.worktree", "hooks")  # a new worktree says nothing to git outside of it
_OTHER = ("HEAD", "branches", "index", "info", "lfs", "logs", "objects", "packed-refs", "rebase-merge", "refs")
_MAX_HOOKS = 1000
_MAX_FOLDERS = 100  # of repositories, those of submodules included


class GitPart(NamedTuple):
    """An entry of a granted folder that a guest may not replace.

    Attributes:
        path: its name below the granted folder.
        fd: an open descriptor of it, that can only be used to mount it.
        write: whether what it holds may be changed.
    """

    path: str
    fd: int
    write: bool


class _GitEntry(NamedTuple):
    path: str
    fd: int
    mode: int


def is_setting(path: str) -> bool:
    """Whether an entry of a granted folder, by its name there, decides what git runs; `.git` itself does."""
    first, *rest = path.split("/")
    if first.casefold() != GIT:
        return False
    names = rest[2:] if rest and rest[0].casefold() == _MODULES else rest[:1]  # after a submodule's name, or its start
    inside = next((name for name in names if name.casefold() in _SETTINGS or name in _OTHER), "")
    return not rest or inside.casefold() in _SETTINGS


def guarded(workspace: Workspace) -> bool:
    """Whether there is a repository in a granted folder whose settings the guest may not change, but the rest."""
    return workspace.write and not workspace.write_git and os.path.lexists(os.path.join(workspace.path, GIT))


def parts(root: int, stack: ExitStack, *, owner: int | None = None) -> list[GitPart]:
    """Opens all of a folder's git settings that are there, each after the one that it lies in.

    Args:
        root: the granted folder, open.
        stack: closes the descriptors.
        owner: with whose rights, if not with ours: what a guest cannot come to, it cannot change.
    """
    with files.acting_as(owner):
        found = list(_repositories(root, stack))
        if len(found) > _MAX_FOLDERS:  # too many to mount one by one: submodules are read-only as a whole
            return [*_walls(found[0], stack), *(GitPart(one.path, one.fd, write=False) for one in found[1:2])]
        return [part for one in found for part in _walls(one, stack)]


def _walls(one: _GitEntry, stack: ExitStack) -> Iterator[GitPart]:
    yield GitPart(one.path, one.fd, stat.S_ISDIR(one.mode))
    for name in _SETTINGS if stat.S_ISDIR(one.mode) else ():
        if part := _open(one, name, stack):
            yield GitPart(part.path, part.fd, write=False)


def _repositories(root: int, stack: ExitStack) -> Iterator[_GitEntry]:
    """Opens `.git`, then the folder of its submodules and what lies in it; one more than may be, if there are more."""
    waiting = [git] if (git := _open(_GitEntry("", root, 0), GIT, stack)) else []
    for _ in range(_MAX_FOLDERS + 1):
        if not waiting:
            return
        one = waiting.pop(0)
        yield one
        if not stat.S_ISDIR(one.mode):  # a file that says where the repository is
            return
        below = (_open(one, name, stack) for name in ([_MODULES] if one.path == GIT else _folders(one)))
        waiting += [new for new in below if new and stat.S_ISDIR(new.mode)]


def _folders(one: _GitEntry) -> list[str]:
    """The names below a folder of submodules that may be, or hold, a repository."""
    with suppress(OSError), files.descended(one.fd, ["."]) as folder:
        names = sorted(os.listdir(folder))
        skipped = () if one.path.endswith(f"/{_MODULES}") else (*_SETTINGS, *_OTHER)
        return [name for name in names if name not in skipped][: _MAX_FOLDERS + 1]
    return []


def _open(above: _GitEntry, name: str, stack: ExitStack) -> _GitEntry | None:
    """Opens an entry by its name, following no link. A link cannot be mounted over, so it counts as not there."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above.fd)
    except OSError:
        return None
    stack.callback(os.close, fd)
    mode = os.fstat(fd).st_mode
    path = f"{above.path}/{name}" if above.path else name
    return _GitEntry(path, fd, mode) if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else None


# --- what was changed all the same ---


def look(folder: str) -> Mapping[str, Stamp]:
    """Returns the names of git's settings and hooks in a folder, each with what changes whenever the file does."""
    try:
        with files.opened(folder) as root:
            return dict(_look(root))
    except OSError:  # it is gone, or nobody but its owner may look
        return {}


def _look(root: int) -> Iterator[tuple[str, Stamp]]:
    with suppress(FileNotFoundError):
        facts = os.stat(GIT, dir_fd=root, follow_symlinks=False)
        if not stat.S_ISDIR(facts.st_mode):  # a link, or a file that says where the repository is
            yield GIT, _stamp(facts)
            return
    with ExitStack() as stack:
        for one in _repositories(root, stack):
            yield one.path, _same(os.fstat(one.fd))
            yield from _stamps(one.fd, _WATCHED, one.path)
            with suppress(OSError), files.descended(one.fd, ["hooks"]) as hooks:
                yield from _stamps(hooks, sorted(os.listdir(hooks))[:_MAX_HOOKS], f"{one.path}/hooks")


def _stamps(folder: int, names: Sequence[str], above: str) -> Iterator[tuple[str, Stamp]]:
    for name in names:
        with suppress(OSError):
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield f"{above}/{name}", _same(facts) if stat.S_ISDIR(facts.st_mode) else _stamp(facts)


def _same(facts: os.stat_result) -> Stamp:
    return facts.st_dev, facts.st_ino


def _stamp(facts: os.stat_result) -> Stamp:
    return (*_same(facts), facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def changed(before: Mapping[str, Stamp], after: Mapping[str, Stamp]) -> list[str]:
    """Returns the names that were added, taken away or changed."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def set_aside(folder: str, before: Mapping[str, Stamp]) -> list[str]:
    """Renames what was made in the repositories of a folder that git would go by, so that it goes by it no more.

    Args:
        folder: the granted folder.
        before: what `look` saw in it.

    Returns:
        The new names. What a file that was there before says is not touched.
    """
    renamed: list[str] = []
    with suppress(OSError), files.opened(folder) as root, ExitStack() as stack:
        for one in _repositories(root, stack):
            if before.get(one.path) == _same(os.fstat(one.fd)):
                new = [name for name in _WATCHED if f"{one.path}/{name}" not in before]
                renamed += [f"{one.path}/{aside}" for name in new if (aside := _rename(one.fd, name))]
    return renamed


def _rename(folder: int, name: str) -> str:
    aside = f"{name}.by-guest-{secrets.token_hex(4)}"
    try:
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:  # it is not there
        return ""
    return aside
