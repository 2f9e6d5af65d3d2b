"""Suites that others wrote for sandboxes, on ours. Each is installed into a folder of its own, beside our packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import belljar

SUITES = Path(__file__).parent / "suites"
ROOT = Path(__file__).parents[2]
SUITES_OF_OTHERS = {
    "inspect_sandbox.py": (("inspect_ai==0.3.285",), 43, 1),
    "langchain_sandbox.py": (("langchain-tests==1.1.9", "deepagents==0.7.32"), 79, 7),
}  # file -> what it needs, how many checks pass, how many cannot (each with its reason in the file)


def installed(requirements: Sequence[str]) -> Path:
    """Returns a folder with packages and what they need, made once."""
    target = ROOT / "build" / "outside" / "-".join(requirements)
    if not target.exists():
        draft = target.with_name(f"{target.name}.draft")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(draft), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            pytest.skip(
                f"NOTHING was checked by {requirements[0]}: it cannot be installed: {done.stderr.strip()[-300:]}"
            )
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
@pytest.mark.exhaustive("it installs hundreds of megabytes of packages")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("suite", SUITES_OF_OTHERS)
def test_what_others_ask_of_a_sandbox_is_there(suite: str) -> None:
    native = next(one for one in belljar.list_backends() if one.backend == "native")
    if not native.available:
        pytest.skip(f"NOTHING was checked: native does not work here: {native.why_not}")
    requirements, passed, lacking = SUITES_OF_OTHERS[suite]
    said = outcome(suite, installed(requirements))
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|xfailed|errors?)", said)}
    assert counts == {"passed": passed, "xfailed": lacking}, said[-3000:]
