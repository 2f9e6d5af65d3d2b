"""Reads and writes JUnit's XML.

The reader is expat, told to refuse every document type: so there are no entities, no bombs made of them, and nothing
is fetched. Depth, attributes and counts are capped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from belljar.core.test_results.model import TestReport
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
    seconds_of,
)

_MAX_DEPTH = 64
_MAX_TEXT = 256 * 1024  # characters of one element that are kept
_TEXTS = frozenset(("failure", "error", "skipped", "system-out", "system-err"))
_PLACE = re.compile(r"^\s*(?:at |File \"|in )?[^\s\"(]*?([\w./-]+\.\w{1,6})(?:\", line |:|\()(\d+)", re.MULTILINE)
_CONTROLS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parse_junit(text: bytes) -> ParsedReport:
    """Returns the tests of a JUnit report.

    Raises:
        ValueError: it is none, or it has a document type, which no report needs.
    """
    if len(text) > MAX_REPORT_BYTES:
        raise ValueError(f"it has more than {MAX_REPORT_BYTES} bytes")
    reader = _JUnitHandler()
    try:
        reader.parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ValueError(f"it is no XML: {error}") from None
    if not reader.is_junit:
        raise ValueError("it is no JUnit report: its outermost element is not testsuites or testsuite")
    return ParsedReport("junit", tuple(reader.tests))


class _JUnitHandler:
    """Takes what expat tells."""

    def __init__(self) -> None:
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.EntityDeclHandler = self._doctype
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.is_junit = False
        self.tests: list[FoundTest] = []
        self._depth = 0
        self._suites: list[Mapping[str, str]] = []
        self._case: dict[str, str] | None = None
        self._parts: dict[str, tuple[Mapping[str, str], list[str]]] = {}
        self._into: list[str] | None = None
        self._room = 0
        self._seen: dict[str, int] = {}  # how often an id came: reports may name several tests alike

    def _doctype(self, *_: Any) -> None:
        raise ValueError("it has a document type, and may have none")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        name = tag.rpartition(":")[2]
        if self._depth == 1:
            self.is_junit = name in ("testsuites", "testsuite")
        if name == "testsuite":
            self._suites.append(attributes)
        elif name == "testcase":
            self._case, self._parts = attributes, {}
        elif self._case is not None and name in _TEXTS and name not in self._parts:
            self._into, self._room = [], _MAX_TEXT
            self._parts[name] = attributes, self._into

    def _text(self, text: str) -> None:
        if self._into is not None and self._room > 0:
            self._into.append(text[: self._room])
            self._room -= len(text)

    def _end(self, tag: str) -> None:
        self._depth -= 1
        name = tag.rpartition(":")[2]
        if name in _TEXTS:
            self._into = None
        elif name == "testsuite" and self._suites:
            self._suites.pop()
        elif name == "testcase" and self._case is not None:
            if len(self.tests) >= MAX_TESTS:
                raise ValueError(f"it has more than {MAX_TESTS} tests")
            self.tests.append(self._found(self._case))
            self._case = None

    def _found(self, case: Mapping[str, str]) -> FoundTest:
        suite = self._suites[-1] if self._suites else {}
        owner, name = case.get("classname", "") or suite.get("name", ""), case.get("name", "")
        outcome, (said, body) = self._outcome()
        text = "".join(body)
        file = path_of(case.get("file", "") or suite.get("file", ""))
        line = case.get("line", "")
        found_file, found_line = _place(text) if outcome in ("failed", "error") else ("", None)
        output = "".join(part for key in ("system-out", "system-err") for part in self._parts.get(key, ({}, []))[1])
        id = clean(f"{owner}.{name}" if owner else name, 4096) or "unnamed"
        self._seen[id] = self._seen.get(id, 0) + 1
        return FoundTest(
            id if self._seen[id] == 1 else f"{id} #{self._seen[id]}", name_of(name) or "unnamed", outcome,
            file or found_file, number_of(int(line)) if line.isascii() and line.isdigit() and len(line) < 8 else None,
            found_line if not file or file == found_file else None,
            message_of(said.get("message", "") or text.strip().partition("\n")[0]), clean(text.strip()), clean(output),
            seconds_of(case.get("time", "").replace(",", "")),
        )  # fmt: skip

    def _outcome(self) -> tuple[Any, tuple[Mapping[str, str], list[str]]]:
        for part, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
            if part in self._parts:
                return outcome, self._parts[part]
        return "passed", ({}, [])


def _place(text: str) -> tuple[str, int | None]:
    """The file and line that a traceback names first, where it names any."""
    found = _PLACE.search(text[:20_000])
    return (path_of(found[1]), number_of(int(found[2]))) if found and len(found[2]) < 8 else ("", None)


def as_junit(report: TestReport) -> str:
    """Returns a report as JUnit's XML, for tools that read nothing else."""
    failures = {failure.id: failure for failure in report.failures}
    errors = sum(case.outcome == "error" for case in report.tests)
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuites><testsuite name={_quoted(report.framework or "tests")} tests="{len(report.tests)}" '
        f'failures="{report.failed - errors if report.failed > errors else 0}" errors="{errors}" '
        f'skipped="{report.skipped}" time="{report.duration_ms / 1000:.3f}">',
    ]
    for case in report.tests:
        line = f' line="{case.line}"' if case.line else ""
        lines.append(
            f"<testcase name={_quoted(case.name)} classname={_quoted(case.id)} file={_quoted(case.file)}{line} "
            f'time="{(case.duration_ms or 0) / 1000:.3f}">'
        )
        if case.outcome == "skipped":
            lines.append(f"<skipped message={_quoted(case.message)}/>")
        elif case.outcome != "passed":
            tag, failure = "failure" if case.outcome == "failed" else "error", failures.get(case.id)
            body = escape(_plain(failure.traceback)) if failure else ""
            lines.append(f"<{tag} message={_quoted(case.message)}>{body}</{tag}>")
            if failure and failure.output:
                lines.append(f"<system-out>{escape(_plain(failure.output))}</system-out>")
        lines.append("</testcase>")
    if not report.ok and report.status != "failed":  # else a reader would take it for a good run
        why = report.error.message if report.error else report.status
        lines.append(f'<testcase name="the run itself" classname="belljar"><error message={_quoted(why)}/></testcase>')
    return "\n".join([*lines, "</testsuite></testsuites>"]) + "\n"


def _plain(text: str) -> str:
    return _CONTROLS.sub("\ufffd", text)


def _quoted(text: str) -> str:
    return quoteattr(_plain(text))
