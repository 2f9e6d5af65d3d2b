"""The table of backends: one row each, and none of them reads settings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import belljar
from belljar.engine.backends import BACKENDS, NAMES, NEVER_CHOSEN, Backends
from belljar.settings import load

SOURCES = sorted((Path(belljar.__file__).parent / "backends").rglob("*.py"))


@pytest.mark.parametrize("name", BACKENDS)
def test_each_row_makes_the_backend_of_its_name_and_always_the_same_one(name: str, tmp_path: Path) -> None:
    backends = Backends(load(state_dir=str(tmp_path)))
    assert backends[name].name == name
    assert backends[name] is backends[name]
    assert (name in NAMES) is (name not in NEVER_CHOSEN)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_backend_is_handed_facts_and_reads_no_settings(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    read = [f"{node.module}.{name.name}" for node in imports for name in node.names]
    assert "belljar.core.settings.Settings" not in read
    assert not [name for name in read if name.startswith("belljar.settings")]
