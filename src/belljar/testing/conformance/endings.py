"""How a guest ends: exit codes, signals, errors that an agent can act on. Never an exception."""

from __future__ import annotations

import signal
from typing import Any

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest
from belljar.core.result import Failure, Result
from belljar.testing.conformance.bench import (
    Bench,
    CheckBody,
    check,
    equal,
    expect,
    guest,
    present,
    printed,
    refused,
    says,
    succeeded,
)


def _failure(result: Result, kind: str) -> Failure:
    """It ran and failed, in these words; whoever reads them knows what to do."""
    equal(result.status, "error", "status")
    failure = present(result.error, "error")
    equal(failure.error_type, kind, "error_type")
    expect(bool(failure.message and failure.suggestion), "the error has no message or no suggestion")
    return failure


def _exits_with(code: int) -> CheckBody:
    program = guest(f"import sys\nprint('before')\nsys.exit({code})", says("before\n", code=code))

    async def body(bench: Bench) -> None:
        result = await bench.run(program)
        equal((result.exit_code, result.stdout), (code, "before\n"), "(exit code, stdout)")
        equal(result.status, "error" if code else "success", "status")
        equal(result.error is None, code == 0, "error is None")

    return body


for _code in (0, 1, 42, 255):
    check("exit codes", f"exit code {_code} is told as {_code}")(_exits_with(_code))


def _dies_of(number: signal.Signals) -> CheckBody:
    def play(p: FakeProcess) -> None:
        p.signal(number)

    program = guest(f"import os\nos.kill(os.getpid(), {int(number)})\nimport time\ntime.sleep(30)", play)

    async def body(bench: Bench) -> None:
        result = await bench.run(program)
        equal((result.exit_code, result.status), (128 + number, "error"), "(exit code, status)")

    return body


for _signal in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
    check("signals", f"a guest that dies of {_signal.name} has exit code {128 + _signal}", "processes")(
        _dies_of(_signal)
    )

_ABSENT = guest(("belljar-has-no-such-program", "--help"), says(err="not found\n", code=127))
_PLAIN = guest(("./plain.txt",), says(err="permission denied\n", code=126))


@check("errors", "a program that does not exist is a result with exit code 127", "commands")
async def _missing_program(bench: Bench) -> None:
    result = await bench.run(_ABSENT)
    equal((result.exit_code, result.status), (127, "error"), "(exit code, status)")
    present(result.error, "error")


@check("errors", "a file that is not a program is a result with exit code 126", "commands")
async def _not_a_program(bench: Bench) -> None:
    result = await bench.run(_PLAIN, files={"plain.txt": "no program"})
    equal((result.exit_code, result.status), (126, "error"), "(exit code, status)")


def _raises(error: Exception) -> Any:
    def play(p: FakeProcess) -> None:
        raise error

    return play


_NO_MODULE = guest(
    "import belljar_no_such_package", _raises(ModuleNotFoundError("No module named 'belljar_no_such_package'"))
)
_BAD_SYNTAX = guest(
    "def broken(:\n    pass",
    says(
        err='  File "/workspace/main.py", line 1\n    def broken(:\n               ^\nSyntaxError: invalid syntax\n',
        code=1,
    ),
)
_RAISE = guest("raise ValueError('the kettle is empty')", _raises(ValueError("the kettle is empty")))


@check("errors", "a package that is missing is MISSING_PACKAGE and is named")
async def _missing_package(bench: Bench) -> None:
    failure = _failure(await bench.run(_NO_MODULE), "MISSING_PACKAGE")
    expect("belljar_no_such_package" in failure.message + failure.suggestion, "the package is not named")


@check("errors", "code that cannot be parsed is SYNTAX_ERROR")
async def _syntax(bench: Bench) -> None:
    _failure(await bench.run(_BAD_SYNTAX), "SYNTAX_ERROR")


@check("errors", "an exception is RUNTIME_ERROR, with its words in the message and its trace in stderr")
async def _exception(bench: Bench) -> None:
    result = await bench.run(_RAISE)
    failure = _failure(result, "RUNTIME_ERROR")
    expect("the kettle is empty" in failure.message, f"the message is {failure.message!r}")
    expect("Traceback" in result.stderr and "ValueError" in result.stderr, "stderr has no trace")


_COMPLAIN = guest(
    "import sys\nprint('Killed: out of memory, No space left on device', file=sys.stderr)",
    says(err="Killed: out of memory, No space left on device\n"),
)


@check("errors", "a guest that succeeds is not judged by its words")
async def _words(bench: Bench) -> None:
    result = succeeded(await bench.run(_COMPLAIN))
    expect(result.error is None, f"error is {result.error}")
    expect("No space left" in result.stderr, "stderr is missing")


# --- languages ---

_BASH = guest('set -o pipefail\nfor i in 1 2 3; do echo "line $i"; done | tail -1\n[[ ab == a* ]]', says("line 3\n"))
_JAVASCRIPT = guest("console.log([1, 2, 3].map(x => x * 2).join('-'))", says("2-4-6\n"))
_TYPESCRIPT = guest("const n: number = 21; console.log(n * 2)", says("42\n"))
_PYTHON = guest("import sys\nprint(sys.version_info.major, sys.argv[0].endswith('main.py'))", says("3 True\n"))


@check("languages", "python runs a snippet", "language:python")
async def _python(bench: Bench) -> None:
    printed(await bench.run(_PYTHON, language="python"), "3 True\n")


@check("languages", "bash runs a snippet", "language:bash")
async def _bash(bench: Bench) -> None:
    printed(await bench.run(_BASH, language="bash"), "line 3\n")


@check("languages", "javascript runs a snippet", "language:javascript")
async def _javascript(bench: Bench) -> None:
    printed(await bench.run(_JAVASCRIPT, language="javascript", memory="1G"), "2-4-6\n")


@check("languages", "typescript runs a snippet", "language:typescript")
async def _typescript(bench: Bench) -> None:
    result = succeeded(await bench.run(_TYPESCRIPT, language="typescript", memory="1G"))
    equal(result.stdout, "42\n", "stdout")


@check("languages", "an unknown language is an invalid request")
async def _unknown(bench: Bench) -> None:
    await refused(InvalidRequest, bench.run(_PYTHON, language="klingon"))
