"""What the wasm runtime lacks is told apart from what would fail anywhere: only the former is worth a second run."""

from __future__ import annotations

import pytest

from belljar.core.diagnose import diagnose
from belljar.core.request import Limits
from belljar.core.result import Failure, Result, Status


def on(backend: str, headline: str) -> Failure:
    stderr = (
        f'Traceback (most recent call last):\n  File "/workspace/main.py", line 1, in <module>\n    x\n{headline}\n'
    )
    result = Result(status=Status.ERROR, exit_code=1, stderr=stderr)
    return diagnose(result, language="python", limits=Limits(), processes=backend != "wasm")


# What CPython 3.15 on WASI really says; tests/sandbox/test_auto.py provokes them.
WASM_LACKS = {
    "ModuleNotFoundError: No module named 'torch'. Site initialization is disabled, did you": "MISSING_PACKAGE",
    "ModuleNotFoundError: Unsupported platform for standard library module 'fcntl'": "MISSING_PACKAGE",
    "ModuleNotFoundError: Standard library module '_ssl' was not found": "MISSING_PACKAGE",
    "OSError: [Errno 58] wasi does not support processes.": "PROCESS_LIMIT",
    "NotImplementedError: This Python build lacks multiprocessing.synchronize, usually due to": "PROCESS_LIMIT",
    "RuntimeError: can't start new thread": "PROCESS_LIMIT",
    "OSError: [Errno 58] Not supported": "RUNTIME_ERROR",
    "AttributeError: module '_socket' has no attribute 'getaddrinfo'": "NETWORK_ERROR",
    "AttributeError: module 'os' has no attribute 'fork'": "RUNTIME_ERROR",
    "AttributeError: module 'os' has no attribute 'execv'. Did you mean '.execl' instead of '.execv'?": "RUNTIME_ERROR",
    "AttributeError: module 'signal' has no attribute 'alarm'": "RUNTIME_ERROR",
    "ImportError: cannot import name 'fork' from 'os' (<frozen os>)": "RUNTIME_ERROR",
    "OSError: ctypes is unavailable on wasm32-wasi": "RUNTIME_ERROR",
    "RecursionError: Stack overflow (used 112 kB)": "RUNTIME_ERROR",
    "FileNotFoundError: [Errno 44] No such file or directory: '/dev/null'": "RUNTIME_ERROR",
}


@pytest.mark.parametrize("headline", WASM_LACKS)
def test_what_only_wasm_lacks_is_sent_to_native_and_marked_for_a_second_run(headline: str) -> None:
    error = on("wasm", headline)
    assert error.error_type == WASM_LACKS[headline]
    assert "wasm runtime" in error.suggestion and "ask for backend=native" in error.suggestion
    assert "{" not in error.suggestion.replace("files={...}", "")
    assert error.context["stronger"] is True
    assert "limit" not in error.context, "no limit of this run is to blame"
    assert "stronger" not in on("native", headline).context


@pytest.mark.parametrize("trap", ["call stack exhausted", "wasm `unreachable` instruction executed"])
def test_a_trap_of_the_wasm_runtime_is_one_that_native_would_not_have_had(trap: str) -> None:
    result = Result(status=Status.ERROR, stderr=f"the interpreter was stopped: wasm trap: {trap}\n")
    error = diagnose(result, language="python", limits=Limits(), processes=False)
    assert error.context["stronger"] is True
    assert "ask for backend=native" in error.suggestion


@pytest.mark.parametrize(
    "headline",
    [
        "AttributeError: module 'os' has no attribute 'frok'",
        "AttributeError: module 'mine' has no attribute 'fork'",
        "ImportError: cannot import name 'frok' from 'os' (<frozen os>)",
        "FileNotFoundError: [Errno 44] No such file or directory: 'data.csv'",
        "RecursionError: maximum recursion depth exceeded",
        "ValueError: OSError: [Errno 58] wasi does not support processes.",
    ],
)
def test_what_would_fail_anywhere_is_not_marked_for_a_second_run(headline: str) -> None:
    assert "stronger" not in on("wasm", headline).context
