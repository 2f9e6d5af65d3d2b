"""Folders of the host that a request over the network may name: only below roots that the administrator listed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.host import files
from belljar.host.source import read_source


def check(request: RunRequest, roots: Sequence[str]) -> RunRequest:
    """Refuses what no root allows. A link anywhere on the way is judged by where it leads, and what comes back names
    that place: a link that is put there while the run waits would lead elsewhere."""
    changed: dict[str, Any] = {}
    if isinstance(request.packages, str):
        changed["packages"] = check_path(request.packages, roots, "packages")
    if request.workspace:
        path = check_path(request.workspace.path, roots)
        changed["workspace"] = request.workspace.model_copy(update={"path": path})
    return request.model_copy(update=changed)


def read_code(folder: str, path: str) -> str:
    """Returns the text of a file of a granted folder. No part of its name may be a link: that could lead anywhere."""
    with files.opened(folder) as root:
        return read_source(path, folder=root)


class Grants:
    """Folders that guests have now. Who may write to a folder can move what lies in it and leave a link in its place
    between our look and the mount: so nobody gets a folder inside it meanwhile, nor is it given while one inside is."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots
        self._given: list[tuple[str, bool]] = []

    @contextmanager
    def given(self, *folders: tuple[str | None, bool]) -> Iterator[None]:
        """`folders`: the real names that `check` told, and whether they may be written to."""
        wanted = [(path, write) for path, write in folders if path is not None]
        for path, write in wanted:
            if any(_apart(path, write, *other) for other in self._given):
                raise errors.Busy(f"project_path: {path[:200]!r} is inside or around one that is in use", retry_after=5)
        self._given += wanted
        try:
            for path, _ in wanted:  # from here on no guest of ours can move it
                if check_path(path, self._roots) != path:
                    raise errors.PolicyDenied("project_path: it was moved while the run waited", fix="send it again")
            yield
        finally:
            for one in wanted:
                self._given.remove(one)


def _apart(path: str, write: bool, other: str, writes: bool) -> bool:
    return path != other and ((write and _inside(other, path)) or (writes and _inside(path, other)))


def check_path(path: str | None, roots: Sequence[str], field: str = "project_path") -> str | None:
    return None if path is None else _below(path, roots, field)


def _below(path: str, roots: Sequence[str], field: str) -> str:
    if not roots:
        raise errors.PolicyDenied(
            f"{field}: this server grants no folder of its own",
            fix="send files with the request, or have the administrator list roots in service.projects",
        )
    try:
        real = os.path.realpath(path)
    except OSError:  # a link that is no link any more
        real = ""
    if os.path.isabs(path) and any(_inside(real, os.path.realpath(root)) for root in roots) and os.path.isdir(real):
        return real
    raise errors.PolicyDenied(
        f"{field}: {path[:200]!r} is no folder below one that the administrator listed",
        fix="name a folder below a root of service.projects", context={"field": field},
    )  # fmt: skip


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
