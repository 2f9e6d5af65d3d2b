"""`core` decides, and touches nothing: no file, no process, no network, no environment, no event loop."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar.core

MODULES = sorted(Path(belljar.core.__file__).parent.glob("*.py"))
PURE = {
    "__future__", "ast", "base64", "collections", "contextlib", "dataclasses", "difflib", "enum", "fnmatch",
    "functools", "html", "ipaddress", "itertools", "json", "math", "operator", "posixpath", "re", "string", "textwrap",
    "types", "typing", "typing_extensions", "warnings", "pydantic", "pydantic_core", "belljar.core",
}  # fmt: skip
# What else a module may have, and why; a dot and a name: only that.
ALLOWED = {
    "diagnose": {"os", "select", "shutil", "signal", "time"},  # their names alone: is `os.fork` something at all?
    "options": {"os.PathLike", "os.fspath"},
    "plan": {"uuid.uuid4"},
    "result": {"time.time"},
    "routing": {"sys.stdlib_module_names"},  # a table: what is a package, and what comes with Python
    "values": {"datetime.fromisoformat", "datetime.fromtimestamp"},  # of a time that is given: no clock is read
}
FORBIDDEN_CALLS = {"open", "exec", "eval", "input", "print", "__import__", "breakpoint"}


def named(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.module in ("belljar", "pathlib"):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [node.module or ""]


def is_pure(name: str) -> bool:
    return name.startswith("pathlib.Pure") or any(name == pure or name.startswith(f"{pure}.") for pure in PURE)


def impurities(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    allowed = ALLOWED.get(path.stem, set())
    roots = {name.partition(".")[0] for name in allowed}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"import {name}" for name in named(node) if not is_pure(name) and name not in roots)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{node.func.id}()"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in roots:
            used = f"{node.value.id}.{node.attr}"
            yield from () if used in allowed | {"signal.Signals"} else (used,)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_of_core_imports_and_uses_only_what_does_no_io(path: Path) -> None:
    assert list(impurities(path)) == []


def test_what_does_io_would_be_found(tmp_path: Path) -> None:
    program = (
        "import os, socket\nfrom pathlib import Path, PurePosixPath\nfrom belljar import host\n"
        "from belljar.host import files\nopen('/etc/passwd')\nos.environ['HOME']\n"
    )
    (tmp_path / "options.py").write_text(program)
    assert list(impurities(tmp_path / "options.py")) == [
        "import socket", "import pathlib.Path", "import belljar.host", "import belljar.host", "open()", "os.environ",
    ]  # fmt: skip


def test_importing_all_of_core_imports_nothing_else_of_belljar_and_no_event_loop() -> None:
    names = [f"belljar.core.{path.stem}" for path in MODULES if path.stem != "__init__"]
    program = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("belljar.")} == {"belljar.core", *names}
    assert not loaded & {"asyncio", "anyio"}
