"""Runs the tests in three processes, and the few that failed there once more, alone.

Usage: run_tests.py [PYTEST_ARGUMENT ...]

Three processes share two cores, engines and the kernel's tables, so a test can fail for what runs beside it. A failure
that does not repeat itself alone is printed and counted, and is not fatal. These are fatal at once: an attack that got
through, more failures than `MAX_ALONE`, and a run that did not end (exit codes other than 1).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LANES = ["-n", "3", "--dist", "loadscope", "--no-loadscope-reorder"]
MAX_ALONE = 6
TESTS_FAILED = 1  # pytest's exit code


def pytest(*arguments: str) -> int:
    """Runs pytest and returns its exit code."""
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def fatal(failures: dict[str, bool]) -> str | None:
    """Returns why these failures (test and whether it is final) need no second look, or None."""
    if final := [test for test, is_final in failures.items() if is_final]:
        return f"an attack got through, which is never tried twice: {', '.join(final)}"
    if not failures:
        return "nothing is known of what failed"
    if len(failures) > MAX_ALONE:
        return f"{len(failures)} tests failed, and at most {MAX_ALONE} are looked at once more"
    return None


def main(arguments: list[str]) -> int:
    """Runs the tests and returns the exit code for make."""
    with tempfile.TemporaryDirectory(prefix="belljar-failures-") as folder:
        report = Path(folder) / "failures.json"
        code = pytest(*LANES, "--failures-to", str(report), *arguments)
        if code != TESTS_FAILED:
            return code
        failures: dict[str, bool] = json.loads(report.read_text()) if report.exists() else {}
    if why := fatal(failures):
        print(f"FAILED: {why}")
        return code
    print(f"\nOnce more, alone: what failed beside others ({len(failures)})", flush=True)
    tier = [word for word in arguments if word == "--exhaustive"]
    again = pytest(*tier, *failures)
    word = "FAILED ALONE TOO" if again else "PASSED ALONE, failed beside other tests (see its failure above)"
    print(*(f"{word}: {test}" for test in failures), sep="\n")
    return again


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
