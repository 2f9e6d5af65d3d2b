"""Reads what coverage tools write: coverage.py's JSON, istanbul's summary (c8, jest, vitest), Go's profile, llvm-cov's
JSON, and our reporter's of node's own runner."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from belljar.core.test_results.model import Coverage, FileCoverage
from belljar.core.test_results.parsed import MAX_REPORT_BYTES, path_of

_MAX_FILES = 5000
_GO_LINE = re.compile(r"^(\S+):\d+\.\d+,\d+\.\d+ (\d{1,9}) (\d{1,18})$")


def parse_coverage(text: bytes) -> Coverage:
    """Returns what a coverage report says, whichever of these tools wrote it.

    Raises:
        ValueError: it is none of theirs.
    """
    if len(text) > MAX_REPORT_BYTES:
        raise ValueError(f"it has more than {MAX_REPORT_BYTES} bytes")
    if text.startswith(b"mode: "):
        return _of_go(text.decode("utf-8", "replace"))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is no coverage report") from None
    if isinstance(found, dict) and isinstance(found.get("files"), dict):
        return _whole("coverage.py", _of_python(found["files"]))
    if isinstance(found, dict) and isinstance(found.get("node"), list):
        return _whole("node", _rows(found["node"]))
    if isinstance(found, dict) and isinstance(found.get("total"), dict):
        return _whole("istanbul", _of_istanbul(found))
    raise ValueError("it is no coverage report that is known here")


def _of_python(files: Mapping[str, Any]) -> Iterable[tuple[str, int, int]]:
    for name, facts in files.items():
        summary = facts.get("summary") if isinstance(facts, dict) else None
        if isinstance(summary, dict):
            yield name, _count(summary.get("covered_lines")), _count(summary.get("num_statements"))


def _of_istanbul(found: Mapping[str, Any]) -> Iterable[tuple[str, int, int]]:
    for name, facts in found.items():
        lines = facts.get("lines") if name != "total" and isinstance(facts, dict) else None
        if isinstance(lines, dict):
            yield name, _count(lines.get("covered")), _count(lines.get("total"))


def _rows(rows: Iterable[Any]) -> Iterable[tuple[str, int, int]]:
    for row in rows:
        if isinstance(row, dict) and isinstance(row.get("path"), str):
            yield row["path"], _count(row.get("covered")), _count(row.get("total"))


def _of_go(text: str) -> Coverage:
    blocks: dict[str, dict[str, tuple[int, bool]]] = {}
    for line in text.splitlines()[1:]:
        if found := _GO_LINE.match(line):
            place = line.rpartition(" ")[0]
            was = blocks.setdefault(found[1], {}).get(place, (0, False))[1]
            blocks[found[1]][place] = int(found[2]), was or found[3].strip("0") != ""
    rows = [
        (name, sum(count for count, hit in those.values() if hit), sum(count for count, _ in those.values()))
        for name, those in blocks.items()
    ]
    return _whole("go", rows)


def _whole(source: str, rows: Iterable[tuple[str, int, int]]) -> Coverage:
    found = [(path_of(name) or name[:200], covered, total) for name, covered, total in rows if covered <= total]
    covered, total = sum(row[1] for row in found), sum(row[2] for row in found)
    files = tuple(
        FileCoverage(path=name, percent=_percent(part, whole), covered=part, total=whole)
        for name, part, whole in sorted(found)[:_MAX_FILES]
    )
    return Coverage(percent=_percent(covered, total), files=files, source=source)


def _percent(covered: int, total: int) -> float:
    return round(100 * covered / total, 2) if total else 100.0


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else 0
