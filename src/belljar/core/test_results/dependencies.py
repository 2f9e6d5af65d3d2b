"""Finds by a project's files which packages its tests need, as names that can be installed beforehand. Pure.

Only plain names with their versions are taken: what names an address, a path, an option or a marker is left out, and
that is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from belljar.core.package_names import MOST_NAMES, NPM, package, project
from belljar.core.test_results.frameworks import Project, dependencies_of

_LISTS = ("requirements.txt", "requirements-dev.txt", "requirements-test.txt")


class Dependencies(NamedTuple):
    """What is to be installed for a project's tests.

    Attributes:
        names: of packages, as `packages` takes them.
        left_out: what its files list beside them, and why it is left out.
    """

    names: tuple[str, ...]
    left_out: tuple[str, ...]


def dependencies(found: Project, framework: str, *, coverage: bool) -> Dependencies:
    """Returns the packages that a project's files list, and what its framework is.

    Args:
        found: the project.
        framework: of its tests; pytest is added if nobody lists it.
        coverage: whether coverage.py is wanted, too.
    """
    names: dict[str, str] = {}  # package -> as it was asked for
    left_out: list[str] = []
    for source, text in _listed(found):
        try:
            name = package(text)
        except ValueError:
            left_out.append(f"{source}: {text[:80]!r} is not installed: it is no plain name with its versions")
            continue
        names.setdefault(project(name), name)
    if framework == "pytest":
        names.setdefault("pytest", "pytest")
    if coverage and framework in ("pytest", "unittest"):
        names.setdefault("coverage", "coverage")
    most = list(names.values())
    left_out += [f"{name} is not installed: there are more than {MOST_NAMES}" for name in most[MOST_NAMES:]]
    return Dependencies(tuple(most[:MOST_NAMES]), tuple(left_out))


def _listed(found: Project) -> Iterator[tuple[str, str]]:
    for name in _LISTS:
        yield from ((name, line) for line in _lines(found.texts.get(name, "")))
    yield from (("pyproject.toml", one) for one in dependencies_of(found.texts.get("pyproject.toml", "")))
    try:
        document = json.loads(found.texts.get("package.json", "{}"))
    except (ValueError, RecursionError):
        return
    for part in ("dependencies", "devDependencies"):
        table = document.get(part) if isinstance(document, dict) else None
        if isinstance(table, dict):
            yield from (("package.json", f"{NPM}{name}@{range_}") for name, range_ in table.items())


def _lines(text: str) -> Iterable[str]:
    for line in text.replace("\\\n", " ").splitlines():
        plain = re.sub(r"(^|\s)#.*$", "", line).strip()
        if plain:
            yield re.sub(r"\s+--hash=\S+", "", plain)
