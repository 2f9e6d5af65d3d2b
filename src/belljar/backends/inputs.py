"""The read-only files that a sandbox was opened with (`files=`): the caller finds them where the guest does."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import PurePosixPath

from belljar.core.plan import Plan
from belljar.core.result import Entry, File
from belljar.core.values import WORKSPACE
from belljar.host import git_settings


def check_writable(plan: Plan, given: Iterable[File]) -> None:
    """Raises PermissionError for what the guest could not write either: an input, a file of a read-only
    grant, or what git runs in another."""
    for file in given:
        if plan.workspace and not plan.workspace.write:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), file.path)
        if plan.workspace and not plan.workspace.write_git and git_settings.is_setting(file.path):
            raise OSError(errno.EROFS, "it says what git runs, and write_git was not granted", file.path)
        if _is_input(plan, file.path):
            raise PermissionError(errno.EACCES, "it is a read-only input of this sandbox", file.path)


def reading(plan: Plan, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]] | None:
    """Gives an input's content as `Box.reading` does; None: it is none."""
    return whole(plan.files[path]) if _is_input(plan, path) else None


def listed(plan: Plan, found: Sequence[Entry]) -> tuple[Entry, ...]:
    """Returns a listing of /workspace with the inputs, and the folders on the way to them."""
    if not plan.files or plan.inputs != WORKSPACE:
        return tuple(found)
    names = {entry.path: entry for entry in found}
    for path, content in plan.files.items():
        for folder in PurePosixPath(path).parents[:-1]:
            names.setdefault(str(folder), Entry(str(folder), "folder", 0))
        names[path] = Entry(path, "file", len(content))
    return tuple(sorted(names.values()))


def _is_input(plan: Plan, path: str) -> bool:
    return plan.inputs == WORKSPACE and path in plan.files


@asynccontextmanager
async def whole(content: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    """Gives content that is at hand as `Box.reading` does."""

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    yield pieces()
