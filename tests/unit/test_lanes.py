"""The tests' own order: a suite on one backend is one group, so that it is run once and not once in each process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lanes

ROOT = Path(__file__).parents[2]
CONFORM = "tests/conformance/test_conformance.py::test_a_container_engine_that_was_started_for_this_conforms"


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        (f"{CONFORM}[a guest - with a dash-gvisor]", "conformance on gvisor"),
        ("tests/escape/test_attacks_hold.py::test_containers_hold_against[host file-podman]", "escape on podman"),
        ("tests/apple/test_apple.py::test_apple_over_its_stand_in_conforms[x]", "conformance on apple's stand-in"),
        ("tests/unit/test_models.py::test_x[a::b-docker]", "unit/test_models.py"),
    ],
)
def test_a_test_shares_a_process_with_its_suite_or_its_file(nodeid: str, group: str) -> None:
    assert lanes.group_of(nodeid) == group


def test_every_function_that_is_named_as_a_suite_exists() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    for function in (*lanes._SUITES, *lanes._ON_APPLE):
        assert f"def {function}(" in text
    for group in lanes.SECONDS:
        assert " on " in group or (ROOT / "tests" / group).exists(), group


def test_two_processes_really_keep_the_tests_of_a_file_together() -> None:
    files = ["tests/unit/test_output.py", "tests/unit/test_alerts.py"]
    line = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-v", *files]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False).stdout
    seen = {(line.split("]")[0], file) for line in said.splitlines() for file in files if "gw" in line and file in line}
    assert sorted(file for _, file in seen) == sorted(files), said
