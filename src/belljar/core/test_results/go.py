"""Reads what `go test -json` prints: test2json's events, one a line.

A package is complete when its own end came. A package that failed without a failed test did not build, or its process
ended: that is an error of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

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
    seconds_of,
)

_OUTCOMES: dict[str, Outcome] = {"pass": "passed", "fail": "failed", "skip": "skipped"}
_PLACE = re.compile(r"^\s+([\w./-]+\.go):(\d{1,7}): ?(.*)$", re.MULTILINE)
_NOISE = re.compile(r"^\s*(=== \w+|--- \w+:).*\n?", re.MULTILINE)
_MOST_OUTPUT = 64 * 1024  # characters that are kept of a test's
_MOST_PACKAGES = 20_000


def parse_go(text: bytes) -> ParsedReport:
    """Returns the tests of a stream of events; lines that are none (of the compiler) are left out.

    Raises:
        ValueError: there is no event in it.
    """
    if len(text) > MAX_REPORT_BYTES:
        raise ValueError(f"it has more than {MAX_REPORT_BYTES} bytes")
    stream = _Stream()
    for line in text.split(b"\n"):
        if line.startswith(b"{"):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                stream.take(event)
    return stream.report()


class _Stream:
    """Puts the events of tests and packages together."""

    def __init__(self) -> None:
        self._output: dict[tuple[str, str], list[str]] = {}
        self._open: dict[tuple[str, str], None] = {}
        self._ended: dict[str, str] = {}
        self._tests: list[FoundTest] = []
        self._failed: set[str] = set()

    def take(self, event: dict[str, Any]) -> None:
        package, test, action = event.get("Package"), event.get("Test", ""), event.get("Action")
        if not isinstance(package, str) or not isinstance(test, str):
            return
        key = package, test
        if action in ("run", "start"):
            self._open[key] = None
        elif action == "output" and isinstance(event.get("Output"), str):
            self._open.setdefault((package, ""), None)
            kept = self._output.setdefault(key, [])
            if sum(map(len, kept[-64:])) < _MOST_OUTPUT and len(kept) < 2000:
                kept.append(event["Output"])
        elif action in _OUTCOMES and test:
            if key not in self._open:  # it was printed: before Go 1.20 nothing tells that from a real one
                return
            del self._open[key]
            self._add(_found(package, test, _OUTCOMES[action], "".join(self._output.pop(key, [])), event))
        elif action in _OUTCOMES:
            self._open.pop(key, None)
            self._ended[package] = action
        if len(self._open) + len(self._ended) > MAX_TESTS or len(self._ended) > _MOST_PACKAGES:
            raise ValueError("it tells of more tests than there can be")

    def _add(self, test: FoundTest) -> None:
        self._tests.append(test)
        if test.outcome == "failed":
            self._failed.add(test.id.partition("#")[0])
        if len(self._tests) > MAX_TESTS:
            raise ValueError(f"it has more than {MAX_TESTS} tests")

    def report(self) -> ParsedReport:
        if not self._open and not self._ended:
            raise ValueError("there is no event of go test in it")
        unfinished = [key for key in self._open if key[1]]
        for package, test in unfinished:  # its process ended meanwhile, by a panic or by os.Exit
            output = "".join(self._output.get((package, test), []))
            self._add(_found(package, test, "failed", output, {})._replace(outcome="error"))
            self._failed.add(package)
        for package, action in self._ended.items():
            if action == "fail" and package not in self._failed:
                output = "".join(self._output.get((package, ""), []))
                self._tests.append(
                    FoundTest(
                        package, package, "error", message=message_of(_first(output) or "the package failed"),
                        traceback=clean(output),
                    )
                )  # fmt: skip
        complete = all(package in self._ended for package, _ in self._open)
        return ParsedReport("go", tuple(self._tests), complete)


def _first(output: str) -> str:
    return next((line for line in output.splitlines() if line.strip() and not line.startswith("FAIL")), "")


def _found(package: str, test: str, outcome: Outcome, output: str, event: dict[str, Any]) -> FoundTest:
    place = _PLACE.search(output)
    told = clean(_NOISE.sub("", output)).strip()
    failed = outcome == "failed"
    file = f"{_folder(package)}{path_of(place[1])}" if place else ""
    return FoundTest(
        f"{package}#{test}", name_of(test), outcome, file, fail_line=number_of(int(place[2])) if place else None,
        message=message_of((place[3] if place else "") or _first(told)) if outcome != "passed" else "",
        traceback=told if failed else "", output=clean(output) if failed else "",
        seconds=seconds_of(event.get("Elapsed")),
    )  # fmt: skip


def _folder(package: str) -> str:
    """The folder of a package below its module, which is about what follows the module's name; unknown: none."""
    parts = package.split("/")
    skip = 3 if "." in parts[0] else 1
    return "".join(f"{part}/" for part in parts[skip:] if re.fullmatch(r"[\w.-]+", part))
