"""Every example runs as it is written, and prints what it promises."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar import sandbox
from belljar.backends.fake import Fake
from belljar.backends.native import backend as native
from belljar.backends.wasm import store

EXAMPLES = Path(__file__).parents[2] / "examples"

# What each prints, as a pattern for the whole of stdout.
PROMISES = {
    "showcase.py": r"Belljar runs code.*7 words of 5\.1 letters.*MISSING_PACKAGE.*→ moonphase is not installed.*"
    r"timeout, exit code.*✓ it was stopped.*✓ not one line of the host's accounts was found.*"
    r"Backend (wasm|native).*walls .*Four runs, four sandboxes.*",
    "hello.py": r"success 0\nhello from Python 3[.\d]+\nran on (wasm|native) with network: none\n",
    "streaming.py": r"tick 0\ntick 1\ntick 2\ntick 3\n(tick \d+\n)*(tick( \d*)?)?the run was aborted\n",
    "files_in_and_out.py": r"sales\.csv: (Permission denied|Read-only file system)\n"
    r'report\.json: \{"months": 3, "total": 358\}\n',
    "session.py": r"area: 12\.566\d*\nas JSON: \[.*'area': 12\.57\}\]\nerror RUNTIME_ERROR\n"
    r"timeout - and the session lives on: 2\n",
    "agent_loop.py": r"How many.*attempt 1: MISSING_PACKAGE: .*suggestion: \S.*attempt 2: RUNTIME_ERROR: .*"
    r"suggestion: \S.*attempt 3: success\nanswer: 3\n",
    "test_with_the_fake.py": r"(passed: [^\n]+\n){3}",
    "granted_workspace.py": r"read-only, reading: hello\nread-only, writing: error - the file still says hello\n"
    r"granted, writing: the file says changed\nrefused: workspace\.path: /etc would expose /etc of the host\n",
    "limits.py": r"time: timeout, TIMEOUT\nmemory: oom_killed, OOM_KILLED\ndisk: disk_limit, DISK_LIMIT\n"
    r"output: output_limit, OUTPUT_LIMIT\nprocesses: \w+, PROCESS_LIMIT\nover the cap: .*300 s\n",
}


def test_every_example_has_a_promise() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.engine
@pytest.mark.parametrize("name", PROMISES)
def test_the_example_runs_as_written_and_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(PROMISES[name], done.stdout, re.DOTALL), done.stdout
    assert list(tmp_path.iterdir()) == [], "an example littered the folder it was started in"


def showcase() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "showcase.py"))


def test_the_showcase_says_so_and_exits_1_when_a_claim_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accounts = Path("/etc/passwd").read_text()
    promise = belljar.run("", backend=Fake({"": lambda guest: 0})).guarantees
    robbed = belljar.Result(status=belljar.Status.SUCCESS, exit_code=0, stdout=f"guest\n{accounts}", guarantees=promise)
    monkeypatch.setattr(belljar, "run", lambda code, **limits: robbed)
    assert showcase()["main"]() == 1
    said = capsys.readouterr().out
    assert "✗ not so: not one line of the host's accounts was found" in said
    assert "✓" not in said


def test_the_showcase_says_what_doctor_says_and_exits_1_where_no_sandbox_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "find_bubblewrap", list)
    monkeypatch.setattr(store, "_VERIFIED", {"wasmtime": "never"})
    monkeypatch.setattr(sandbox, "_engine", None)
    try:
        assert showcase()["main"]() == 1
    finally:
        sandbox._engine = None
    said = capsys.readouterr().out
    assert "no sandbox here can run this" in said
    assert "✗ native does not work here: bubblewrap is not installed" in said
