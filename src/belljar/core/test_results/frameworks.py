"""Finds by a project's files how its tests are run. Pure: somebody else has read them, and they may say anything."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from belljar.core import errors

# The files that are read to find the framework, and the most bytes that are read of one.
MARKERS = (
    "pyproject.toml", "pytest.ini", "setup.cfg", "tox.ini", "package.json", ".openagents/project.json", "go.mod",
    "Cargo.toml", "deno.json", "deno.jsonc", "requirements.txt", "requirements-dev.txt", "requirements-test.txt",
    "bun.lock", "bun.lockb",
)  # fmt: skip
MAX_MARKER_BYTES = 256 * 1024
_PYTEST = "python3 -m pytest"
_JS_TEST = re.compile(r"(^|/)[^/]+[.-](test|spec)\.(c|m)?(j|t)sx?$|(^|/)test/[^/]+\.(c|m)?js$|(^|/)__tests__/")
_PY_TEST = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")


class Project(NamedTuple):
    """What is known of a project.

    Attributes:
        names: its files, two levels deep, relative to it.
        texts: the content of those in `MARKERS` that it has, and of its first tests in Python.
    """

    names: frozenset[str]
    texts: Mapping[str, str]


class FoundFramework(NamedTuple):
    """How a project's tests are run.

    Attributes:
        name: of the framework.
        command: a line of shell.
        reason: why.
        language: of its tests, for a container's image.
    """

    name: str
    command: str
    reason: str
    language: str = "python"


def test_files_of_python(names: frozenset[str]) -> list[str]:
    """Returns the first files that look like tests in Python."""
    return sorted(name for name in names if _PY_TEST.search(name))[:8]


def detect(project: Project) -> FoundFramework:
    """Returns how the tests of a project are run.

    Raises:
        InvalidRequest: nothing says so.
    """
    for find in (_listed, _pytest, _javascript, _deno, _go, _cargo, _plain_python, _plain_node):
        if found := find(project):
            return found
    raise errors.InvalidRequest(
        "no test framework was found in this project: there is none of pytest, unittest, jest, vitest, mocha, node "
        "--test, bun, deno, go and cargo",
        fix="name the command: belljar test PATH -- COMMAND",
    )


def framework_of(command: str) -> str:
    """Returns the framework that a command names; empty for one that names none, such as `make test`."""
    for name, pattern in _IN_COMMANDS:
        if re.search(pattern, command):
            return name
    return ""


_IN_COMMANDS = (
    ("pytest", r"\b(pytest|py\.test)\b"), ("unittest", r"\bunittest\b"), ("vitest", r"\bvitest\b"),
    ("jest", r"\bjest\b"), ("mocha", r"\bmocha\b"), ("node", r"\bnode\b.*--test\b"), ("bun", r"\bbun\s+test\b"),
    ("deno", r"\bdeno\s+test\b"), ("go", r"\bgo\s+test\b"), ("cargo", r"\bcargo\s+(\+\S+\s+)?(test|t|nextest)\b"),
)  # fmt: skip


def _document(project: Project, name: str) -> dict[str, Any]:
    try:
        found = json.loads(project.texts.get(name, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(project: Project) -> FoundFramework | None:
    for name in (".openagents/project.json", "package.json"):
        commands = _document(project, name).get("testCommands")
        if isinstance(commands, list) and commands and all(isinstance(one, str) and one for one in commands):
            line = commands[0] if len(commands) == 1 else _all_of(commands)
            return FoundFramework(framework_of(line), line, f"testCommands of {name}", _language(line))
    return None


def _all_of(commands: list[str]) -> str:
    """Each of them is run; the code is that of the last one that failed."""
    return "; ".join(["code=0", *(f"sh -c {shlex.quote(one)} || code=$?" for one in commands), "exit $code"])


def _language(line: str) -> str:
    names = {"go": "go", "cargo": "rust", "pytest": "python", "unittest": "python"}
    return names.get(framework_of(line), "javascript" if re.search(r"\b(bun|npm|node|npx|yarn|pnpm)\b", line) else "")


def _pytest(project: Project) -> FoundFramework | None:
    texts = project.texts
    signs = (
        ("pytest.ini", ""), ("pyproject.toml", "[tool.pytest"), ("setup.cfg", "[tool:pytest]"), ("tox.ini", "[pytest]"),
    )  # fmt: skip
    for name, section in signs:
        if name in texts and section in texts[name]:
            return FoundFramework("pytest", _PYTEST, f"{name} configures pytest")
    for name in sorted(project.names):
        if name.rpartition("/")[2] == "conftest.py":
            return FoundFramework("pytest", _PYTEST, f"there is {name}")
    for name in ("pyproject.toml", "requirements.txt", "requirements-dev.txt", "requirements-test.txt", "setup.cfg"):
        if re.search(r"(?m)(^|[\"'\s])pytest([\"'\s\[<>=~;!,]|$)", texts.get(name, "")):
            return FoundFramework("pytest", _PYTEST, f"{name} names pytest")
    for name in test_files_of_python(project.names):
        if re.search(r"(?m)^\s*(import pytest|from pytest import)\b", texts.get(name, "")):
            return FoundFramework("pytest", _PYTEST, f"{name} imports pytest")
        if re.search(r"(?m)^(async )?def test\w*\(", texts.get(name, "")):  # which unittest does not see
            return FoundFramework("pytest", _PYTEST, f"{name} has tests that are plain functions")
    return None


def _javascript(project: Project) -> FoundFramework | None:
    if "package.json" not in project.texts:
        return None
    package = _document(project, "package.json")
    scripts = package.get("scripts")
    script = scripts.get("test") if isinstance(scripts, dict) else None
    wanted: dict[str, Any] = {}
    for part in ("dependencies", "devDependencies"):
        if isinstance(found := package.get(part), dict):
            wanted |= found
    if isinstance(script, str) and script and "no test specified" not in script:
        known = framework_of(script)
        if known == "bun" or "bun.lock" in project.names or "bun.lockb" in project.names:
            return FoundFramework(known or "bun", "bun run test", "package.json has a script `test`", "javascript")
        return FoundFramework(known, "npm test", "package.json has a script `test`", "javascript")
    for name, line in (
        ("vitest", "npx --no-install vitest run"), ("jest", "npx --no-install jest"),
        ("mocha", "npx --no-install mocha"),
    ):  # fmt: skip
        if name in wanted:
            return FoundFramework(name, line, f"package.json depends on {name}", "javascript")
    return None


def _deno(project: Project) -> FoundFramework | None:
    name = next((one for one in ("deno.json", "deno.jsonc") if one in project.names), "")
    return FoundFramework("deno", "deno test -A", f"there is {name}", "javascript") if name else None


def _go(project: Project) -> FoundFramework | None:
    return FoundFramework("go", "go test ./...", "there is go.mod", "go") if "go.mod" in project.names else None


def _cargo(project: Project) -> FoundFramework | None:
    return (
        FoundFramework("cargo", "cargo test", "there is Cargo.toml", "rust") if "Cargo.toml" in project.names else None
    )


def _plain_python(project: Project) -> FoundFramework | None:
    tests = test_files_of_python(project.names)
    if not tests:
        return None
    folder = tests[0].rpartition("/")[0]
    start = "" if not folder or any("/" not in name for name in tests) else f" -s {shlex.quote(folder)}"
    if start and f"{folder}/__init__.py" in project.names:
        start += " -t ."
    if not tests[0].rpartition("/")[2].startswith("test"):
        start += " -p '*_test.py'"
    return FoundFramework("unittest", f"python3 -m unittest discover{start}", f"there is {tests[0]}")


def _plain_node(project: Project) -> FoundFramework | None:
    tests = sorted(name for name in project.names if _JS_TEST.search(name) and "node_modules" not in name)
    return FoundFramework("node", "node --test", f"there is {tests[0]}", "javascript") if tests else None


def dependencies_of(text: str) -> tuple[str, ...]:
    """Returns the requirements that a pyproject.toml lists: of the project, and of its groups for tests."""
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return ()
    project = found.get("project")
    table = project if isinstance(project, dict) else {}
    lists = [table.get("dependencies")]
    for groups in (table.get("optional-dependencies"), found.get("dependency-groups")):
        if isinstance(groups, dict):
            lists += [groups.get(name) for name in ("test", "tests", "testing", "dev")]
    return tuple(dict.fromkeys(one for part in lists if isinstance(part, list) for one in part if isinstance(one, str)))
