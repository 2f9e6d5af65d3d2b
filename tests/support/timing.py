"""Says at the end of a run how long each lane and each group took, and how busy the machine was.

With that the table in `lanes.py` can be kept true, and more processes or less work can be chosen by figures: cores that
were busy all the time need less work, idle ones more processes.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

from lanes import SECONDS, group_of

_MOST_GROUPS = 15
_LONG_SECONDS = 30.0
_IDLE = slice(3, 5)  # of a line of /proc/stat: idle, and idle while a disk is waited for


class Timing:
    """Adds up what the processes of xdist report."""

    def __init__(self) -> None:
        self._began = time.time()
        self._cpu = _cpu_times()
        self._groups: defaultdict[str, float] = defaultdict(float)
        self._lanes: defaultdict[str, float] = defaultdict(float)
        self._ends: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lane = getattr(report, "worker_id", "")
        self._groups[group_of(report.nodeid)] += report.duration
        self._lanes[lane] += report.duration
        self._ends[lane] = report.stop

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """Returns nothing for a run of a few tests."""
        longest = sorted(self._groups.items(), key=lambda item: -item[1])
        if not longest or sum(self._lanes.values()) < _LONG_SECONDS:
            return []
        lanes = [
            f"{lane}: {self._lanes[lane]:.0f} s of tests, the last ended after {end - self._began:.0f} s"
            for lane, end in sorted(self._ends.items())
            if lane
        ]
        groups = [f"{seconds:6.0f} s  {group}{_expected(group, seconds)}" for group, seconds in longest[:_MOST_GROUPS]]
        return [f"the machine's {os.cpu_count()} cores were busy {_busy(self._cpu, _cpu_times()):.0%} of the time"] + (
            [*lanes, "longest groups (lanes.SECONDS orders them):", *groups] if lanes else []
        )


def _expected(group: str, seconds: float) -> str:
    known = SECONDS.get(group, 0.0)
    off = seconds >= _LONG_SECONDS and not seconds / 2 <= known <= seconds * 2
    return f"   (SECONDS says {known:.0f})" if off else ""


def _cpu_times() -> list[int]:
    try:
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return [0] * 8


def _busy(before: list[int], after: list[int]) -> float:
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return 1 - sum(spent[_IDLE]) / max(1, sum(spent))


def tell(config: pytest.Config) -> None:
    """Registers it; the processes of xdist only report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timing())
