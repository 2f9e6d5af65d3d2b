"""What goes in beside the code: stdin, arguments, environment, working directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from belljar.backends.fake import FakeProcess
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, says, succeeded

_DIGEST = guest(
    "import hashlib, sys\ndata = sys.stdin.buffer.read()\nprint(len(data), hashlib.sha256(data).hexdigest())",
    lambda p: p.out(_digest(p.stdin)),
)
_ECHO = guest("import sys\nprint(sys.stdin.read(), end='')", lambda p: p.out(p.stdin))
_LINES = guest("print(input() + '|' + input())", lambda p: p.out("|".join(p.stdin.decode().splitlines()) + "\n"))
_DEAF = guest("print('did not listen')", says("did not listen\n"))


def _digest(data: bytes) -> str:
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}\n"


@check("stdin", "text given to stdin is read back")
async def _text(bench: Bench) -> None:
    printed(await bench.run(_ECHO, stdin="grüße\nzwei"), "grüße\nzwei")


@check("stdin", "stdin can be read line by line")
async def _lines(bench: Bench) -> None:
    printed(await bench.run(_LINES, stdin="one\ntwo\n"), "one|two\n")


@check("stdin", "every byte value passes through stdin")
async def _binary(bench: Bench) -> None:
    data = bytes(range(256)) * 3
    printed(await bench.run(_DIGEST, stdin=data), _digest(data))


@check("stdin", "without stdin the guest reads end of file at once")
async def _empty(bench: Bench) -> None:
    printed(await bench.run(_DIGEST, timeout=20), _digest(b""))


@check("stdin", "two megabytes of stdin arrive whole")
async def _large(bench: Bench) -> None:
    data = b"0123456789abcde\n" * 131_072
    printed(await bench.run(_DIGEST, stdin=data), _digest(data))


@check("stdin", "stdin that the guest does not read holds nothing up")
async def _unread(bench: Bench) -> None:
    printed(await bench.run(_DEAF, stdin=b"x" * 2_000_000, timeout=20), "did not listen\n")


# --- arguments ---

_WORDS = ("a b", "", "$HOME", "`id`", "*", "'", '"', "--flag=x", "ü", "new\nline", ";", "\\")
_ARGUMENTS = guest(("python3", "-c", "import json, sys\nprint(json.dumps(sys.argv[1:]))", *_WORDS),
                   lambda p: p.out(json.dumps(p.argv[3:]) + "\n"))  # fmt: skip


@check("arguments", "a command's words reach the program untouched by any shell", "commands")
async def _words(bench: Bench) -> None:
    result = succeeded(await bench.run(_ARGUMENTS))
    equal(json.loads(result.stdout), list(_WORDS), "argv")


_SNIPPET_ARGUMENTS = guest(
    "import json, sys\nprint(json.dumps(sys.argv[1:]))", lambda p: p.out(json.dumps(p.argv[2:]) + "\n")
)


@check("arguments", "a snippet finds its arguments in sys.argv, untouched")
async def _snippet_words(bench: Bench) -> None:
    result = succeeded(await bench.run(_SNIPPET_ARGUMENTS, args=_WORDS))
    equal(json.loads(result.stdout), list(_WORDS), "argv")
    equal(json.loads(succeeded(await bench.run(_SNIPPET_ARGUMENTS)).stdout), [], "argv without arguments")


# --- environment ---

_ENV = guest("import json, os\nprint(json.dumps(dict(os.environ)))", lambda p: p.out(json.dumps(dict(p.env)) + "\n"))


async def _environment(bench: Bench, **options: Any) -> dict[str, str]:
    result = succeeded(await bench.run(_ENV, **options))
    seen: dict[str, str] = json.loads(result.stdout)
    return seen


@contextmanager
def _host_variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@check("environment", "variables of the request are set in the guest")
async def _given(bench: Bench) -> None:
    equal((await _environment(bench, env={"GREETING": "hello"})).get("GREETING"), "hello", "GREETING")


@check("environment", "values with newlines, equals signs, quotes and unicode arrive as they are")
async def _odd_values(bench: Bench) -> None:
    given = {"LINES_": "one\ntwo", "EQUALS": "a=b=c", "QUOTES": "'\"`$(id)", "UMLAUT": "grün 🔔", "EMPTY": ""}
    seen = await _environment(bench, env=given)
    equal({name: seen.get(name) for name in given}, given, "the environment")


@check("environment", "no variable of the host is visible")
async def _hidden(bench: Bench) -> None:
    with _host_variable("BELLJAR_CONFORMANCE_SECRET", "of-the-host"):
        seen = await _environment(bench, env={"SHOWN": "1"})
    equal(seen.get("SHOWN"), "1", "SHOWN")
    expect("of-the-host" not in seen.values(), "a variable of the host is in the guest's environment")


_SANE = guest(
    "import os, tempfile\n"
    "with tempfile.TemporaryFile(dir=os.environ['HOME']): pass\n"
    "with tempfile.TemporaryFile(): pass\n"
    "print(os.environ['LANG'])",
    lambda p: p.out(p.env["LANG"] + "\n"),
)
_WHICH = guest(
    "import shutil\nprint(shutil.which('python3') is not None)", lambda p: p.out(f"{'bin' in p.env['PATH']}\n")
)


@check("environment", "HOME and the temporary folder are writable, LANG is UTF-8")
async def _sane(bench: Bench) -> None:
    lang = succeeded(await bench.run(_SANE)).stdout.strip().lower()
    expect(lang.replace("-", "").endswith("utf8"), f"LANG is {lang!r}")


@check("environment", "PATH finds python", "commands")
async def _path(bench: Bench) -> None:
    printed(await bench.run(_WHICH), "True\n")


# --- working directory ---


def _play_cwd(p: FakeProcess) -> Any:
    return p.out(f"{p.cwd}\n")


_CWD = guest("import os\nprint(os.getcwd())", _play_cwd)
_CWD_COMMAND = guest(("python3", "-c", "import os\nprint(os.getcwd())"), _play_cwd)


@check("working directory", "a run starts in /workspace")
async def _workspace(bench: Bench) -> None:
    printed(await bench.run(_CWD), "/workspace\n")


@check("working directory", "a command starts in /workspace", "commands")
async def _command_workspace(bench: Bench) -> None:
    printed(await bench.run(_CWD_COMMAND), "/workspace\n")


@check("working directory", "a command starts in the folder that workdir names", "commands")
async def _workdir(bench: Bench) -> None:
    printed(await bench.run(_CWD_COMMAND, workdir="sub/folder", files={"sub/folder/x": ""}), "/workspace/sub/folder\n")


@check("working directory", "a snippet starts in the folder that workdir names")
async def _snippet_workdir(bench: Bench) -> None:
    printed(await bench.run(_CWD, workdir="/workspace/sub", files={"sub/x": ""}), "/workspace/sub\n")
