"""What failed beside other tests is run once more, alone: `scripts/run_tests.py` with a real pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import failures

def pytest_addoption(parser):
    failures.add_option(parser)

def pytest_configure(config):
    failures.write_down(config)
"""
FAILS_BESIDE_OTHERS = "import os\ndef test_one(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"


def outcome_of(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Runs the script on one file of tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {
        "PYTHONPATH": str(ROOT / "tests/support"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin",
    }
    line = [sys.executable, ROOT / "scripts/run_tests.py"]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_what_fails_only_beside_others_is_named_and_not_fatal(tmp_path: Path) -> None:
    done = outcome_of(tmp_path, FAILS_BESIDE_OTHERS)
    assert done.returncode == 0, done.stdout
    assert "1 failed" in done.stdout
    assert done.stdout.endswith("\nPASSED ONLY ALONE, to be mended (1): test_it.py::test_one\n")


def test_the_last_line_tells_what_passed_alone_from_what_failed_twice(tmp_path: Path) -> None:
    done = outcome_of(tmp_path, FAILS_BESIDE_OTHERS + "def test_two(): assert 1 == 2\n")
    assert done.returncode == 1, done.stdout
    said = "FAILED ALONE TOO (1): test_it.py::test_two; PASSED ONLY ALONE, to be mended (1): test_it.py::test_one"
    assert done.stdout.splitlines()[-1] == said


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def test_one(): assert 1 == 2\n", "FAILED ALONE TOO (1): test_it.py::test_one"),
        (
            FAILS_BESIDE_OTHERS + "def test_two(): assert 0, 'inodes: through: a file'\n",
            "FAILED: an attack got through",
        ),
        (FAILS_BESIDE_OTHERS + "".join(f"def test_{n}(): assert 0\n" for n in range(6)), "FAILED: 7 tests failed"),
    ],
)
def test_what_fails_alone_too_is_fatal_and_so_are_attacks_and_many(tmp_path: Path, tests: str, said: str) -> None:
    done = outcome_of(tmp_path, tests)
    assert done.returncode != 0
    assert said in done.stdout


def test_a_suite_that_fell_as_one_is_looked_at_once_more(tmp_path: Path) -> None:
    checks = "import os, pytest\n@pytest.mark.parametrize('name', [f'check {n}-gvisor' for n in range(9)])\n"
    checks += "def test_containers_hold_against(name): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
    done = outcome_of(tmp_path, checks)
    assert done.returncode == 0, done.stdout
    assert "PASSED ONLY ALONE, to be mended (9)" in done.stdout
