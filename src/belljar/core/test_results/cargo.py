"""Reads what `cargo test` prints: the text of libtest, of one test program after the other and of the documentation's.

It has no structured report in stable Rust. A program's tests count only if its own last line counts as many: what a
test prints past libtest's capture makes the report incomplete, not better.
"""

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

_RUNNING = re.compile(r"^running (\d{1,7}) tests?$")
_TEST = re.compile(r"^test (.{1,1000}?) \.\.\. (ok|FAILED|ignored)(?:, (.*?))?(?: <[\d.]+s>)?$")
_RESULT = re.compile(r"^test result: (?:ok|FAILED)\. (\d{1,7}) passed; (\d{1,7}) failed; (\d{1,7}) ignored;")
_SECTION = re.compile(r"^---- (.{1,1000}) (?:stdout|stderr) ----$")
_PANIC = re.compile(r"panicked at ([\w./-]+):(\d{1,7}):\d+:?\n?(.*)")
_OUTCOMES: dict[str, Outcome] = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}


def has_tests(text: bytes) -> bool:
    """Whether a test program began at all: what does not compile has none."""
    return re.search(rb"^running \d+ tests?$", text, re.MULTILINE) is not None


def parse_cargo(text: bytes) -> ParsedReport:
    """Returns the tests of all programs.

    Raises:
        ValueError: it is too large.
    """
    if len(text) > MAX_REPORT_BYTES:
        raise ValueError(f"it has more than {MAX_REPORT_BYTES} bytes")
    programs: list[_Program] = []
    for line in text.decode("utf-8", "replace").splitlines():
        if running := _RUNNING.match(line):
            programs.append(_Program(int(running[1])))
        elif programs:
            programs[-1].take(line)
    tests: list[FoundTest] = []
    seen: dict[str, int] = {}
    for program in programs:
        for test in program.tests():
            seen[test.id] = seen.get(test.id, 0) + 1
            tests.append(test if seen[test.id] == 1 else test._replace(id=f"{test.id} #{seen[test.id]}"))
            if len(tests) > MAX_TESTS:
                raise ValueError(f"it has more than {MAX_TESTS} tests")
    return ParsedReport("cargo", tuple(tests), bool(programs) and all(program.complete for program in programs))


class _Program:
    """What one test program printed."""

    def __init__(self, announced: int) -> None:
        self.complete = False
        self._announced = announced
        self._found: list[tuple[str, Outcome, str]] = []
        self._sections: dict[str, list[str]] = {}
        self._into: list[str] | None = None
        self._told = False  # the list of tests is over

    def take(self, line: str) -> None:
        if result := _RESULT.match(line):
            counted = [
                sum(outcome == name for _, outcome, _ in self._found) for name in ("passed", "failed", "skipped")
            ]
            self.complete = counted == [int(number) for number in result.groups()] and sum(counted) == self._announced
            self._told, self._into = True, None
        elif self._told and (section := _SECTION.match(line)):
            self._into = self._sections.setdefault(section[1], [])
        elif line == "failures:":
            self._told, self._into = True, None
        elif self._into is not None:
            self._into.append(line)
        elif not self._told and (test := _TEST.match(line)):
            self._found.append((test[1].removesuffix(" - should panic"), _OUTCOMES[test[2]], test[3] or ""))

    def tests(self) -> list[FoundTest]:
        """Returns its tests, with what it says of those that failed."""
        return [self._test(*found) for found in self._found]

    def _test(self, name: str, outcome: Outcome, why: str) -> FoundTest:
        text = "\n".join(self._sections.get(name, []))
        panic = _PANIC.search(text)
        file = path_of(panic[1]) if panic else ""
        return FoundTest(
            clean(name, 1000), name_of(name), outcome, file, fail_line=number_of(int(panic[2])) if panic else None,
            message=message_of(why or (panic[3] if panic else "") or ("" if outcome != "failed" else text)),
            traceback=clean(text), output=clean(text[: panic.start()]) if panic else "",
        )  # fmt: skip
