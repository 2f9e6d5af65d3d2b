"""A project inside a preview: a copy that is thrown away, kept in step with the folder of the host as that is edited.

The guest never writes to the folder, and what changes there is seen inside at once, so that hot reload works. What is
installed (`node_modules`) and what git keeps is copied once, and not watched.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.host import files
from belljar.host.inotify import FolderWatch, opener
from belljar.living.files import AsyncFiles

_UNWATCHED = frozenset(("node_modules", ".git", ".venv", "__pycache__", ".next", ".vite", "dist", "target"))
_QUIET_SECONDS = 0.05  # after a change, in which others of the same save come
_MAX_FILE_BYTES = 16 * 1024 * 1024  # of one that changes while it is watched
_CAREFULLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


async def keep_in_step(folder: str, inside: AsyncFiles) -> None:
    """Carries changes of a folder into the copy at /workspace, until it is cancelled.

    Where this system does not tell changes, nothing is carried.
    """
    with files.opened(folder) as root:
        try:
            watch = await anyio.to_thread.run_sync(lambda: FolderWatch("/", _opener(root), recursive=True))
        except (OSError, AttributeError):  # too many are watched, or no Linux
            return
        try:
            await _Carrier(watch, root, inside).run()
        finally:
            watch.close()


class _Carrier:
    """Carries what changes a little later, and each name once, however often a save writes it."""

    def __init__(self, watch: FolderWatch, root: int, inside: AsyncFiles) -> None:
        self._watch = watch
        self._root = root
        self._inside = inside
        self._changed: set[str] = set()
        self._some = anyio.Event()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._carry_all)
            async for change in self._watch.changes():
                self._changed.add(change.path.strip("/"))
                self._some.set()
            tasks.cancel_scope.cancel()

    async def _carry_all(self) -> None:
        while True:
            await self._some.wait()
            await anyio.sleep(_QUIET_SECONDS)
            self._some = anyio.Event()
            names, self._changed = sorted(self._changed), set()
            for name in names:
                with suppress(OSError, errors.BelljarError):
                    await _carry(self._root, name, self._inside)


def _opener(root: int) -> Callable[[str], int]:
    """Returns what opens the folders that are watched."""
    opened = opener(root, None)

    def opened_if_watched(path: str) -> int:
        if _skipped(path):
            raise FileNotFoundError(errno.ENOENT, "it is not watched", path)
        return opened(path)

    return opened_if_watched


def _skipped(path: str) -> bool:
    return not _UNWATCHED.isdisjoint(path.split("/"))


async def _carry(root: int, name: str, inside: AsyncFiles) -> None:
    """Makes one name inside what it is outside: a file, a folder, or nothing."""
    if _skipped(name):
        return
    found = await anyio.to_thread.run_sync(_read, root, name)
    if found is None:
        await inside.remove(name)
    elif isinstance(found, bytes):
        await inside.write(name, found)
    elif found == "folder":
        await inside.make_dir(name)


def _read(root: int, name: str) -> bytes | str | None:
    """Returns the content of a file, "folder", "other" for what is not carried, or None if there is nothing."""
    head, _, last = name.rpartition("/")
    try:
        with files.descended(root, [part for part in head.split("/") if part]) as parent:
            fd = os.open(last, _CAREFULLY, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError:
        return "other"
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(file.fileno())
        if stat.S_ISDIR(facts.st_mode):
            return "folder"
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_FILE_BYTES:
            return "other"
        return file.read(_MAX_FILE_BYTES)


def usual_command(folder: str, port: int) -> str:
    """Returns the command that serves a project of which nobody said it: a script of its package.json, or its files.

    Raises:
        InvalidRequest: it has neither.
    """
    scripts: object = None
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads((Path(folder) / "package.json").read_bytes()[:_MAX_FILE_BYTES])
        scripts = told.get("scripts") if isinstance(told, dict) else None
    for name in ("dev", "start", "serve", "preview"):
        if isinstance(scripts, dict) and isinstance(scripts.get(name), str):
            return f"npm run {name}"
    if (Path(folder) / "index.html").is_file():
        return f"python3 -u -m http.server {port}"
    raise errors.InvalidRequest(
        "command: this project has neither package.json with a script dev or start, nor an index.html",
        fix="say what serves it: belljar preview PATH -- COMMAND",
    )
