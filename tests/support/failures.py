"""Writes down which tests failed, for `scripts/run_tests.py`, which looks at them once more, alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lanes import suite_of


class Failures:
    """Collects the failed tests of a session: what was run for each, and whether it is final (an attack got through).

    Each is written down when it fails, its traceback into a file beside: a long run can be looked at while it goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, tuple[str, bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            before = report.nodeid in self._failed and self._failed[report.nodeid][1]
            final = before or ": through: " in report.longreprtext
            self._failed[report.nodeid] = suite_of(report.nodeid) or report.nodeid, final
            self._path.write_text(json.dumps(self._failed))
            with self._path.with_suffix(".txt").open("a") as tracebacks:
                tracebacks.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._failed))


def add_option(parser: pytest.Parser) -> None:
    """Adds `--failures-to`."""
    parser.addoption(
        "--failures-to", metavar="FILE", help="write the names of failed tests there: scripts/run_tests.py"
    )


def write_down(config: pytest.Config) -> None:
    """Registers the collector where `--failures-to` asks for it; the processes of xdist only report to it."""
    path = config.getoption("--failures-to")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)))
