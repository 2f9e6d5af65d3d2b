"""Reads what our own reporters write in a guest: one JSON object a line.

    {"event": "start", "framework": "pytest"}
    {"event": "collected", "count": 3}
    {"event": "test", "id": …, "name": …, "outcome": "passed" | "failed" | "error" | "skipped", "file": …, "line": …,
     "message": …, "traceback": …, "output": …, "seconds": …}
    {"event": "end", "exit": 0}

Without its last line a report is not complete: the runner ended before its end.
"""

from __future__ import annotations

import json
from typing import Any

from belljar.core.test_results.parsed import (
    MAX_TESTS,
    FoundTest,
    ParsedReport,
    clean,
    message_of,
    name_of,
    number_of,
    path_of,
    seconds_of,
)

_OUTCOMES = ("passed", "failed", "error", "skipped")
_MAX_NOTES = 20


def parse_lines(text: bytes, *, part: bool = False) -> ParsedReport:
    """Returns a report of our reporters.

    Args:
        text: the lines.
        part: whether more may come: then a last line that is cut is left out.

    Raises:
        ValueError: it is none.
    """
    lines = text.split(b"\n")
    if lines and lines[-1]:
        if not part:
            raise ValueError("its last line is cut")
        lines.pop()
    events = [event for line in lines if line.strip() for event in [_event(line)]]
    if not events or events[0].get("event") != "start":
        raise ValueError("it does not begin with its start")
    return _report(events)


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("a line of it is no JSON") from None
    if not isinstance(event, dict):
        raise ValueError("a line of it is no object")
    return event


def _report(events: list[dict[str, Any]]) -> ParsedReport:
    tests: list[FoundTest] = []
    notes: list[str] = []
    complete, collected, code = False, None, None
    for event in events[1:]:
        kind = event.get("event")
        if kind == "test":
            tests.append(_test(event))
            if len(tests) > MAX_TESTS:
                raise ValueError(f"it has more than {MAX_TESTS} tests")
        elif kind == "collected":
            collected = event["count"] if isinstance(event.get("count"), int) else None
        elif kind == "note" and len(notes) < _MAX_NOTES:
            notes.append(message_of(event.get("text")))
        elif kind == "end":
            complete, code = True, event.get("exit") if isinstance(event.get("exit"), int) else None
    return ParsedReport(
        name_of(events[0].get("framework"))[:40] or "unknown", tuple(tests), complete, collected, code, tuple(notes)
    )


def _test(event: dict[str, Any]) -> FoundTest:
    id, outcome = clean(event.get("id"), 4096), event.get("outcome")
    if not id or outcome not in _OUTCOMES:
        raise ValueError("a test in it has no name or no outcome")
    return FoundTest(
        id, name_of(event.get("name")) or name_of(id), outcome, path_of(event.get("file")),
        number_of(event.get("line")), number_of(event.get("fail_line")), message_of(event.get("message")),
        clean(event.get("traceback")), clean(event.get("output")), seconds_of(event.get("seconds")),
    )  # fmt: skip
