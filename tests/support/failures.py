"""Writes down which tests failed, for `scripts/run_tests.py`, which looks at them once more, alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


class Failures:
    """Collects the failed tests of a session, and whether a failure is final: an attack that got through."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            final = ": through: " in report.longreprtext
            self._failed[report.nodeid] = self._failed.get(report.nodeid, False) or final

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
