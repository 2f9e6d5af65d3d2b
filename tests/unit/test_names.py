"""One class name, one class: whoever searches for a name finds one definition."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import belljar

ROOT = Path(belljar.__file__).parent


def test_no_class_name_is_defined_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
