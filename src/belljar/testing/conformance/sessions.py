"""Sessions: one interpreter across calls. Skipped where the backend has none, so these guests need no twin."""

from __future__ import annotations

from belljar.core.result import Result
from belljar.testing.conformance.bench import Bench, check, equal, expect, printed, succeeded

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


@check("sessions", "a deeply nested value is shown as text, in a result that can be written down", _PYTHON)
async def _nested(bench: Bench) -> None:
    async with bench.session() as session:
        shown = succeeded(await session.run("x = []\nfor _ in range(300): x = [x]\nx"))
        expect(str(_echo(shown)[0]).startswith("[[["), f"results are {shown.results}")
        expect("[[[" in shown.model_dump_json(), "the JSON of the result lacks the value")


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


# --- copies: skipped where a session cannot be copied -------------------------------------------


@check("checkpoints", "a fork goes on from where the session is, and neither sees what the other does", "checkpoints")
async def _forked(bench: Bench) -> None:
    async with bench.session() as session:
        succeeded(await session.run("x = [1]\nopen('here.txt', 'w').write('before')\nNone"))
        async with session.fork() as branch:
            succeeded(await branch.run("x.append(2)\nopen('here.txt', 'w').write('branch')\nNone"))
            succeeded(await session.run("x.append(3)"))
            printed(await branch.run("print(x, open('here.txt').read())"), "[1, 2] branch\n")
        printed(await session.run("print(x, open('here.txt').read())"), "[1, 3] before\n")


@check("checkpoints", "a rollback brings back variables and files, even after a turn out of time", "checkpoints")
async def _rolled_back(bench: Bench) -> None:
    async with bench.session() as session:
        succeeded(await session.run("x = 1\nopen('kept.txt', 'w').close()"))
        mark = await session.checkpoint()
        succeeded(await session.run("import os\nx = 2\nos.remove('kept.txt')\nopen('new.txt', 'w').close()"))
        equal((await session.run("while True: pass", timeout=1)).status, "timeout", "status")
        await session.rollback(mark)
        printed(await session.run("import os\nprint(x, os.listdir('.'))"), "1 ['kept.txt']\n")


@check("fuel", "a run that uses up its fuel ends, and the same run uses the same fuel", "fuel")
async def _fuel(bench: Bench) -> None:
    ended = await bench.run("print('before', flush=True)\nwhile True: pass", fuel=50_000_000)
    equal((ended.status, ended.stdout), ("fuel_exhausted", "before\n"), "(status, stdout)")
    used = [(await bench.run("print(sum(range(1000)))")).fuel_consumed for _ in range(2)]
    expect(bool(used[0]) and used[0] == used[1], f"the fuel of two equal runs was {used}")


@check("fuel", "a deterministic run can be repeated, and its sleep takes no time", "fuel")
async def _repeated(bench: Bench) -> None:
    code = "import os, random, time\ntime.sleep(3600)\nprint(random.random(), os.urandom(4), time.time())"
    one, two = [succeeded(await bench.run(code, deterministic=True, timeout=30)) for _ in range(2)]
    equal((one.stdout, one.fuel_consumed), (two.stdout, two.fuel_consumed), "(stdout, fuel)")
    other = succeeded(await bench.run(code, deterministic={"seed": 7}, timeout=30))
    expect(other.stdout != one.stdout, "another seed gave the same numbers")
