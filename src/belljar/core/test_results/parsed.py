"""What the readers of reports have in common: a test as it was found, and texts that are cut to a bearable length."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable
from typing import NamedTuple

from belljar.core.test_results.model import Outcome
from belljar.core.values import KIB, MIB, WORKSPACE

MAX_REPORT_BYTES = 64 * MIB  # of all reports of one run
MAX_TESTS = 200_000
_MAX_TEXT = 32 * KIB  # characters of a traceback, or of what a test printed
_MAX_NAME = 1024
_MAX_MESSAGE = 2048
_WORST: dict[str, int] = {"skipped": 0, "passed": 1, "failed": 2, "error": 3}


class FoundTest(NamedTuple):
    """One test as a report has it."""

    id: str
    name: str
    outcome: Outcome
    file: str = ""
    line: int | None = None
    fail_line: int | None = None  # where it failed, in the same file
    message: str = ""
    traceback: str = ""
    output: str = ""
    seconds: float | None = None


class ParsedReport(NamedTuple):
    """One report, or several of one run together.

    Attributes:
        framework: who wrote it.
        tests: in the order in which they ended.
        complete: whether the runner wrote it to its end.
        collected: how many tests the runner found; None where it does not say.
        exit_code: with which it was about to exit; None where it does not say.
        notes: what else it says.
    """

    framework: str
    tests: tuple[FoundTest, ...] = ()
    complete: bool = True
    collected: int | None = None
    exit_code: int | None = None
    notes: tuple[str, ...] = ()


def merged(reports: Iterable[ParsedReport]) -> ParsedReport:
    """Returns several reports as one. A test that is told of twice is as bad as the worst that is said of it."""
    found: dict[str, FoundTest] = {}
    frameworks: dict[str, None] = {}
    complete, collected = True, 0
    notes: list[str] = []
    counts = True
    for report in reports:
        frameworks[report.framework] = None
        complete = complete and report.complete
        counts = counts and report.collected is not None
        collected += report.collected or 0
        notes += report.notes
        for test in report.tests:
            was = found.get(test.id)
            if was is None or _WORST[test.outcome] >= _WORST[was.outcome]:
                found[test.id] = test
    return ParsedReport(
        " and ".join(frameworks), tuple(found.values()), complete, collected if counts else None, notes=tuple(notes)
    )


def clean(value: object, most: int = _MAX_TEXT) -> str:
    """Returns a text of a report, cut in its middle; nothing for what is no text."""
    if not isinstance(value, str):
        return ""
    text = value.encode("utf-8", "replace").decode()
    if len(text) <= most:
        return text
    half = max(most // 2 - 20, 1)
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def name_of(value: object) -> str:
    """Returns a name of a report: one line of bearable length."""
    return clean(" ".join(clean(value, 4 * _MAX_NAME).split()), _MAX_NAME)


def message_of(value: object) -> str:
    """Returns what a report says of a failure, as a sentence or two."""
    return clean(value, _MAX_MESSAGE).strip()


def path_of(value: object) -> str:
    """Returns a file of a report relative to the project; empty where it is none of the project's."""
    text = clean(value, _MAX_NAME).removeprefix("file://")
    if not text or "\0" in text or "\n" in text:
        return ""
    plain = posixpath.normpath(text.replace("\\", "/"))
    plain = plain.removeprefix(f"{WORKSPACE}/")
    return "" if plain in (".", "..") or plain.startswith("../") else plain


def number_of(value: object) -> int | None:
    """Returns a line number, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10_000_000 else None


def seconds_of(value: object) -> float | None:
    """Returns a time, or None for what is none."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds < 1e7 else None
