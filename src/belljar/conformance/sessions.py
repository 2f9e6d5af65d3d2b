"""Sessions: one interpreter across calls. Skipped where the backend has none, so these guests need no twin."""

from __future__ import annotations

from belljar.conformance.bench import Bench, check, equal, expect, printed, succeeded
from belljar.models import Result

_PYTHON = "session:python"


def _echo(result: Result) -> list[object]:
    return [bundle.get("text/plain") for bundle in result.results]


@check("sessions", "variables persist from one turn to the next", _PYTHON)
async def _variables(bench: Bench) -> None:
    async with bench.session() as session:
        succeeded(await session.run("x = 20"))
        succeeded(await session.run("x += 1\ny = x * 2"))
        printed(await session.run("print(x, y)"), "21 42\n")


@check("sessions", "imports, functions and files persist", _PYTHON)
async def _imports(bench: Bench) -> None:
    async with bench.session() as session:
        succeeded(await session.run("import math\ndef twice(n):\n    return 2 * n"))
        succeeded(await session.run("open('kept.txt', 'w').write('kept')\nNone"))
        printed(await session.run("print(twice(math.floor(2.5)), open('kept.txt').read())"), "4 kept\n")


@check("sessions", "the last expression is echoed, and nothing else is", _PYTHON)
async def _echoed(bench: Bench) -> None:
    async with bench.session() as session:
        equal(_echo(await session.run("1\n'a' * 3")), ["'aaa'"], "results")
        equal(_echo(await session.run("x = 5")), [], "results of a statement")
        equal(_echo(await session.run("None")), [], "results of None")


@check("sessions", "each turn has its own output", _PYTHON)
async def _per_turn(bench: Bench) -> None:
    async with bench.session() as session:
        printed(await session.run("print('first')"), "first\n")
        second = succeeded(await session.run("import sys\nprint('second', file=sys.stderr)"))
        equal((second.stdout, second.stderr), ("", "second\n"), "(stdout, stderr)")
        printed(await session.run("print('third')"), "third\n")


@check("sessions", "an exception is the turn's error, and the session lives on", _PYTHON)
async def _exception(bench: Bench) -> None:
    async with bench.session() as session:
        succeeded(await session.run("x = 1"))
        broken = await session.run("1 / 0")
        equal(broken.status, "error", "status")
        expect("ZeroDivisionError" in broken.stderr, f"stderr is {broken.stderr!r}")
        equal(broken.error.error_type if broken.error else None, "RUNTIME_ERROR", "error_type")
        syntax = await session.run("def broken(:")
        equal(syntax.error.error_type if syntax.error else None, "SYNTAX_ERROR", "error_type")
        printed(await session.run("print(x)"), "1\n")


@check("sessions", "a turn over its time has status timeout and keeps its partial output", _PYTHON)
async def _timeout(bench: Bench) -> None:
    async with bench.session() as session:
        result = await session.run("import time\nprint('partial', flush=True)\ntime.sleep(60)", timeout=3)
    equal((result.status, result.stdout), ("timeout", "partial\n"), "(status, stdout)")


@check("sessions", "two sessions share nothing", _PYTHON)
async def _separate(bench: Bench) -> None:
    async with bench.session() as one, bench.session() as two:
        succeeded(await one.run("secret = 1\nopen('file.txt', 'w').close()"))
        printed(await two.run("import os\nprint('secret' in globals(), os.path.exists('file.txt'))"), "False False\n")


@check("sessions", "a session that was closed leaves nothing to the next one", _PYTHON)
async def _closed(bench: Bench) -> None:
    for _ in range(2):
        async with bench.session() as session:
            printed(await session.run("print('left' in globals())\nleft = True"), "False\n")
