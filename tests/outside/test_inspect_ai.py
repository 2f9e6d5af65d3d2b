"""Suites that others wrote for sandboxes, on ours. Each is installed into a folder of its own, beside our packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import belljar

SUITES = Path(__file__).parent / "suites"
ROOT = Path(__file__).parents[2]
INSPECT = "inspect_ai==0.3.285"


def installed(requirement: str) -> Path:
    """Returns a folder with a package and what it needs, made once."""
    target = ROOT / "build" / "outside" / requirement
    if not target.exists():
        draft = target.with_suffix(".draft")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(draft), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            pytest.skip(f"NOTHING was checked by {requirement}: it cannot be installed: {done.stderr.strip()[-300:]}")
        draft.rename(target)
    return target


def outcome(suite: str, packages: Path) -> str:
    """Runs a suite in a process of its own, and returns what pytest said; our own packages come first."""
    code = f"import sys, pytest; sys.path.append({str(packages)!r}); raise SystemExit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", "--rootdir", str(SUITES), "-rfE"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, str(SUITES / suite)],
        capture_output=True, text=True, check=False, timeout=800, cwd=ROOT,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.engine
@pytest.mark.exhaustive("it installs a hundred megabytes of packages")
@pytest.mark.timeout(1500)
def test_inspect_ai_finds_its_contract_kept() -> None:
    native = next(one for one in belljar.list_backends() if one.backend == "native")
    if not native.available:
        pytest.skip(f"NOTHING was checked: native does not work here: {native.why_not}")
    said = outcome("inspect_sandbox.py", installed(INSPECT))
    last = said.strip().splitlines()[-1]
    assert re.search(r"\b43 passed", last) and "1 xfailed" in last and "failed," not in last, said[-3000:]
