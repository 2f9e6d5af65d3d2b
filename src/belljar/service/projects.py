"""Folders of the host that a request over the network may name: only below roots that the administrator listed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from belljar import errors
from belljar.models import RunRequest


def check(request: RunRequest, roots: Sequence[str]) -> None:
    """Refuses what no root allows. A link anywhere on the way is judged by where it leads."""
    check_path(request.packages, roots, "packages")
    check_path(request.workspace.path if request.workspace else None, roots)


def check_path(path: str | None, roots: Sequence[str], field: str = "project_path") -> None:
    if path is not None:
        _below(path, roots, field)


def _below(path: str, roots: Sequence[str], field: str) -> None:
    if not roots:
        raise errors.PolicyDenied(
            f"{field}: this server grants no folder of its own",
            fix="send files with the request, or have the administrator list roots in service.projects",
        )
    real = os.path.realpath(path)
    if os.path.isabs(path) and any(_inside(real, os.path.realpath(root)) for root in roots) and os.path.isdir(real):
        return
    raise errors.PolicyDenied(
        f"{field}: {path[:200]!r} is no folder below one that the administrator listed",
        fix="name a folder below a root of service.projects", context={"field": field},
    )  # fmt: skip


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
