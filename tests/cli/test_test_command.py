"""`belljar test`: exit codes, what people and programs see, and what failed the last time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from small_projects import HANGS, LEAVES, project

pytestmark = pytest.mark.engine


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    folders = {"BELLJAR_STATE_DIR": "state", "BELLJAR_DATA_DIR": "data", "XDG_CONFIG_HOME": "config"}
    return {
        **os.environ,
        "BELLJAR_BACKEND": "native",
        **{name: str(tmp_path / place) for name, place in folders.items()},
    }


def run(home: dict[str, str], *words: str, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "belljar", "test", *words], env=home, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def test_it_tells_what_failed_where_and_why_and_runs_only_that_again(home: dict[str, str], tmp_path: Path) -> None:
    folder = str(project(tmp_path / "p"))
    first = run(home, folder, "--junit", str(tmp_path / "out.xml"), code=1)
    assert "unittest: there is test_it.py" in first.stderr
    assert "test_it.Sums.test_bad" in first.stdout and "test_it.py:6 AssertionError: 1 != 2" in first.stdout
    assert "failed: 1 passed, 1 failed, 1 skipped" in first.stdout
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    told = json.loads(run(home, folder, "--failed", "--json", code=1).stdout)
    assert [case["id"] for case in told["tests"]] == ["test_it.Sums.test_bad"]
    (tmp_path / "p/test_it.py").write_text(Path(folder, "test_it.py").read_text().replace("1, 2,", "2, 2,"))
    assert "passed: 1 passed, 0 failed" in run(home, folder, "--failed", code=0).stdout
    run(home, folder, "--failed", code=125)


def test_each_test_has_its_line_with_v_and_no_verdict_is_no_success(home: dict[str, str], tmp_path: Path) -> None:
    shown = run(home, str(project(tmp_path / "p")), "-v", "--", "python3", "-m", "unittest", "-v", code=1).stdout
    assert "✓ test_it.Sums.test_good" in shown and "✗ test_it.Sums.test_bad" in shown
    crashed = run(home, str(project(tmp_path / "leaves", LEAVES)), code=1)
    assert "crashed: 0 passed, 0 failed" in crashed.stdout and "before it had reported" in crashed.stderr
    assert "timeout" in run(home, str(project(tmp_path / "hangs", HANGS)), "--timeout", "2", code=124).stdout
    run(home, str(tmp_path / "none"), code=125)
    run(home, str(tmp_path / "p"), "--timeout", "301", code=126)
