"""`--server` before and after a command: whom it asks, and which commands refuse it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY, VARIABLE = "http://127.0.0.1:1", "http://127.0.0.1:2"
# What a command needs, to come as far as asking its server.
ASKING = {
    "run": ["run", "-c", "print(1)"], "exec": ["exec", "true"], "session": ["session"], "doctor": ["doctor"],
    "languages": ["languages"], "top": ["top", "--once"], "ps": ["ps"], "open": ["open"], "snapshots": ["snapshots"],
}  # fmt: skip


def _belljar(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "belljar", *words], text=True, capture_output=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL, env={**os.environ, "BELLJAR_SERVER": VARIABLE},
    )  # fmt: skip


@pytest.mark.parametrize("command", ASKING)
def test_a_server_may_be_named_before_the_command_or_after_it_and_counts_more_than_the_variable(command: str) -> None:
    name, *rest = ASKING[command]
    for words in (["--server", NOBODY, name, *rest], [name, "--server", NOBODY, *rest]):
        done = _belljar(*words)
        assert done.returncode == 125 and NOBODY in done.stderr and VARIABLE not in done.stderr, (words, done.stderr)


@pytest.mark.parametrize("command", [["keys", "list"], ["records", "list"], ["version"], ["serve"], ["setup", "wasm"]])
def test_a_command_of_this_machine_refuses_a_server_wherever_it_stands(command: list[str]) -> None:
    for words in (["--server", NOBODY, *command], [*command, "--server", NOBODY]):
        done = _belljar(*words)
        assert done.returncode == 125 and f"{command[0]} does not work with --server" in done.stderr, done.stderr
        assert done.stdout == "" and "it goes with" in done.stderr
