"""Reads TAP, the test anything protocol: `ok 1 - name`, `not ok 2 - name # TODO why`, `1..2`."""

from __future__ import annotations

import re

from belljar.core.test_results.model import Outcome
from belljar.core.test_results.parsed import (
    MAX_REPORT_BYTES,
    MAX_TESTS,
    FoundTest,
    ParsedReport,
    clean,
    message_of,
    name_of,
    number_of,
    path_of,
)

_VERSION = re.compile(rb"\s*TAP version \d+\s*(?:\r?\n|$)")
_POINT = re.compile(r"^(not )?ok\b(?:\s+(\d{1,9}))?(?:\s+-)?\s*([^#]*)(?:#\s*(skip|todo)\S*\s*(.*))?", re.IGNORECASE)
_PLAN = re.compile(r"^1\.\.(\d{1,9})")
_PLACE = re.compile(r"([\w./-]+\.\w{1,6}):(\d{1,7})")


def is_tap(text: bytes) -> bool:
    """Whether a text begins as TAP does."""
    return _VERSION.match(text) is not None


def parse_tap(text: bytes) -> ParsedReport:
    """Returns the tests of a TAP document: its outermost ones.

    Raises:
        ValueError: it is none, or has no plan.
    """
    if len(text) > MAX_REPORT_BYTES:
        raise ValueError(f"it has more than {MAX_REPORT_BYTES} bytes")
    tests: list[tuple[str, Outcome, str, list[str]]] = []
    planned, bailed = None, ""
    for line in text.decode("utf-8", "replace").splitlines():
        if point := _POINT.match(line):
            tests.append(_point(point, len(tests) + 1))
            if len(tests) > MAX_TESTS:
                raise ValueError(f"it has more than {MAX_TESTS} tests")
        elif plan := _PLAN.match(line):
            planned = int(plan[1])
        elif line.startswith("Bail out!"):
            bailed = line.removeprefix("Bail out!").strip() or "without a reason"
        elif tests and line.startswith((" ", "#")) and len(tests[-1][3]) < 400:
            tests[-1][3].append(line)
    if planned is None and not tests:
        raise ValueError("it is no TAP: it has no plan and no tests")
    return ParsedReport(
        "tap", tuple(_found(number, *test) for number, test in enumerate(tests, 1)),
        complete=not bailed and planned == len(tests), collected=planned,
        notes=(f"it bailed out: {message_of(bailed)}",) if bailed else (),
    )  # fmt: skip


def _point(point: re.Match[str], number: int) -> tuple[str, Outcome, str, list[str]]:
    name, directive = point[3].strip() or f"test {point[2] or number}", (point[4] or "").lower()
    outcome: Outcome = "failed" if point[1] else "passed"
    if directive == "skip" or (directive == "todo" and point[1]):
        outcome = "skipped"
    return name, outcome, point[5] or "", []


def _found(number: int, name: str, outcome: Outcome, why: str, details: list[str]) -> FoundTest:
    text = "\n".join(details)
    place = _PLACE.search(text) if outcome == "failed" else None
    told = re.search(r"^\s*(?:message|error):\s*['\"|>-]*\s*(.+?)['\"]?$", text, re.MULTILINE)
    return FoundTest(
        f"{number}: {clean(name, 1000)}", name_of(name), outcome, path_of(place[1]) if place else "",
        number_of(int(place[2])) if place else None, message=message_of(why or (told[1] if told else "")),
        traceback=clean(text) if outcome == "failed" else "",
    )  # fmt: skip
