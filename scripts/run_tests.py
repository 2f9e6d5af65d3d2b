"""Runs the tests in several processes, and the few that failed there once more, alone.

Usage: run_tests.py [PYTEST_ARGUMENT ...]

Three processes (or `BELLJAR_TEST_PROCESSES`) share the cores, because a good part of the work is waiting, and engines
and the kernel's tables, so a test can fail for what runs beside it. A failure that does not repeat itself alone is not
fatal: the last line counts those, by name. (What is known to fail at times carries the marker `second_try` with its
reason, and pytest's own line counts it as rerun.) These are fatal at once: an
attack that got through, more failures than `MAX_ALONE`, and a run that did not end (exit codes other than 1). The
tests that look up verdicts of one suite on one backend count as one failure: the suite is run once, and falls with its
engine. While the tests run, what failed so far lies in `belljar-failures-*/failures.txt` among the temporary files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

LANES = ["-n", os.environ.get("BELLJAR_TEST_PROCESSES") or "3", "--dist", "loadscope", "--no-loadscope-reorder"]
MAX_ALONE = 6
TESTS_FAILED = 1  # pytest's exit code


class Failure(NamedTuple):
    """A test that failed."""

    ran: str  # the suite on its backend, or the test itself
    final: bool  # it is not tried twice


def fatal(failures: dict[str, Failure]) -> str | None:
    """Returns why these failures, by test, need no second look, or None."""
    if final := [test for test, failure in failures.items() if failure.final]:
        return f"an attack got through, which is never tried twice: {', '.join(final)}"
    if not failures:
        return "nothing is known of what failed"
    if (many := len({failure.ran for failure in failures.values()})) > MAX_ALONE:
        return f"{many} tests failed, and at most {MAX_ALONE} are looked at once more"
    return None


def run(report: Path, *arguments: str) -> tuple[int, dict[str, Failure]]:
    """Runs pytest and returns its exit code and its failures, by test."""
    report.unlink(missing_ok=True)
    line = [sys.executable, "-m", "pytest", "--failures-to", str(report), *arguments]
    code = subprocess.run(line, check=False).returncode
    found = json.loads(report.read_text()) if report.exists() else {}
    return code, {test: Failure(*failure) for test, failure in found.items()}


def last_line(failures: Collection[str], again: Collection[str]) -> str:
    """Returns how many of the failures were none alone, by name: nobody has written a reason beside those."""
    passed = [test for test in failures if test not in again]
    failed = [test for test in failures if test in again]
    parts = [f"FAILED ALONE TOO ({len(failed)}): {', '.join(failed)}"] if failed else []
    if passed:
        parts.append(f"PASSED ONLY ALONE, to be mended ({len(passed)}): {', '.join(passed)}")
    return "; ".join(parts)


def main(arguments: list[str]) -> int:
    """Runs the tests and returns the exit code for make."""
    with tempfile.TemporaryDirectory(prefix="belljar-failures-") as folder:
        report = Path(folder) / "failures.json"
        code, failures = run(report, *LANES, *arguments)
        if code != TESTS_FAILED:
            return code
        if why := fatal(failures):
            print(f"FAILED: {why}")
            return code
        print(f"\nOnce more, alone: what failed beside others ({len(failures)})", flush=True)
        tier = [word for word in arguments if word == "--exhaustive"]
        code, again = run(report, *tier, *failures)
    if code not in (0, TESTS_FAILED):
        print(f"FAILED: the run alone of {', '.join(failures)} did not end (exit code {code})")
        return code
    print(last_line(failures, again))
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
