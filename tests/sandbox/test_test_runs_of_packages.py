"""The own test suites of three published packages: in a sandbox they count what they count outside of one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.settings import load

_PACKAGES = ("six==1.17.0", "idna==3.10", "toolz==1.0.0")
pytestmark = [
    pytest.mark.exhaustive("fetches source packages from the index, and runs each of their suites twice"),
    pytest.mark.timeout(600),
]


def fetched(name: str, folder: Path) -> Path:
    """The source package, unpacked."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-binary",
        ":all:",
        "--no-deps",
        "-d",
        str(folder),
        name,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{name} cannot be fetched from the index: {done.stderr.strip()[-300:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (found,) = (one for one in folder.iterdir() if one.is_dir())
    return found


def bare(folder: Path) -> dict[str, int]:
    """What pytest itself counts, run without any sandbox on a copy."""
    copy = folder.parent / "bare"
    shutil.copytree(folder, copy)
    places = [copy, copy / "src", Path(pytest.__file__).parents[1]]
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=copy, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, places)), "CI": "1"}, timeout=300, check=False,
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1]
    counts = {word.removesuffix("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    assert counts.get("passed"), done.stdout[-2000:] + done.stderr[-2000:]
    return counts


@pytest.mark.parametrize("name", _PACKAGES)
def test_a_package_s_own_suite_counts_the_same_as_bare(name: str, tmp_path: Path, state_dir: Path) -> None:
    folder = fetched(name, tmp_path / "source")
    counts = bare(folder)
    engine = Engine(load(state_dir=str(state_dir), data_dir=str(tmp_path / "data"), backend="native"))
    try:
        report = belljar.test(
            folder, ["python3", "-m", "pytest", "-q"], engine=engine, packages=["pytest"],
            environment={"PYTHONPATH": "/workspace:/workspace/src"},
        )  # fmt: skip
    except errors.BelljarError as error:
        pytest.skip(f"pytest cannot be installed for guests: {error.message}")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    assert report.status == ("failed" if failed else "passed"), report.output[-3000:]
    assert (report.passed, report.failed) == (counts["passed"] + counts.get("xpassed", 0), failed)
    assert report.skipped == counts.get("skipped", 0) + counts.get("xfailed", 0)
    assert len(report.tests) == report.passed + report.failed + report.skipped
