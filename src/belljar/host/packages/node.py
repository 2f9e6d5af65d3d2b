"""Sets of npm's packages: a folder `node_modules`, fetched by npm. No script of theirs is run here.

Nor does npm start git, which a package could name as the place of another: what a repository says git goes by.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from belljar.core import errors
from belljar.core.package_names import node_parts
from belljar.host.packages.installing import Workshop, file_stamp

INSIDE = "/node_modules"  # where guests find it: Node.js looks there for whatever lies anywhere
_QUIET = ("--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--no-update-notifier", "--loglevel=error")
_NO_GIT = "--git=/bin/false"
_FIX = "check names and versions (`npm view NAME versions` lists them)"


class NodeRecipe:
    """Makes folders of packages for one Node.js, which guests must be able to run."""

    kind = "node"

    def __init__(self, interpreter: str, path: str) -> None:
        """Remembers the interpreter.

        Args:
            interpreter: the program that guests will run.
            path: where npm is looked for, as in $PATH.
        """
        self._interpreter = interpreter
        self._path = path

    def stamp(self) -> Sequence[str | int]:
        """Names the interpreter, without starting it."""
        return [os.uname().machine, *file_stamp(self._interpreter)]

    async def resolve(self, names: Sequence[str], shop: Workshop) -> Sequence[str]:
        """Fixes the versions by a lock file of npm; returns what it says."""
        files = shop.folder / "files"
        files.mkdir()
        wanted = {"name": "packages", "version": "1.0.0", "private": True, "dependencies": _versions(names)}
        (files / "package.json").write_text(json.dumps(wanted))
        version = (await shop.run([self._interpreter, "--version"])).strip()
        await shop.run([self._npm, "install", "--package-lock-only", *_QUIET, _NO_GIT, *_at(files)], fix=_FIX)
        return [f"node {version}", *_lock(files / "package-lock.json")]

    async def install(self, shop: Workshop) -> None:
        """Installs what the lock file names, each by its hash."""
        files = shop.folder / "files"
        await shop.run([self._npm, "ci", *_QUIET, _NO_GIT, *_at(files)])
        (files / "node_modules").mkdir(exist_ok=True)

    @property
    def _npm(self) -> str:
        found = shutil.which("npm", path=self._path)
        if not found:
            raise errors.NotAvailable("packages: there is no npm here to fetch them", fix="install it: apt install npm")
        return found


def _at(files: Path) -> Sequence[str]:
    return ["--prefix", str(files), "--no-global", "--no-workspaces"]


def _versions(names: Sequence[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in names:
        package, wanted = node_parts(name)
        if versions.setdefault(package, wanted) != wanted:
            raise errors.InvalidRequest(f"packages: npm:{package} is asked for in two versions", fix="name one of them")
    return versions


def _lock(path: Path) -> Sequence[str]:
    """The packages of a lock file, each with its hash; one that has none could be anything."""
    lines = []
    for where, facts in sorted(json.loads(path.read_text())["packages"].items()):
        if not where:
            continue
        if facts.get("inBundle"):  # it comes with another, by whose hash it counts
            continue
        if not isinstance(facts.get("integrity"), str) or facts.get("link"):
            raise errors.PolicyDenied(
                f"packages: {where.removeprefix('node_modules/')[:100]} does not come from a registry",
                fix="ask for a version that needs no address of a repository or a file",
            )
        lines.append(f"{where} {facts.get('version')} {facts['integrity']}")
    return lines
