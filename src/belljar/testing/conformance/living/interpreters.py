"""Interpreters in a living sandbox: each keeps its variables, all share its files and processes."""

from __future__ import annotations

import anyio

from belljar.core.result import Result
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, says, succeeded
from belljar.testing.conformance.living.guests import PORT, SERVER
from belljar.testing.conformance.living.waiting import SECONDS, done, until

_AREA = "interpreters"
_PYTHON = ("living", "session:python")
_READ = guest("cat shared.txt", says("from a turn\n"))


@check(_AREA, "an interpreter keeps its variables, and shares files with everything else", *_PYTHON, shared=True)
async def _shares(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as python:
        succeeded(await python.run("x = 20"))
        printed(await python.run("print(x + 1)"), "21\n")
        succeeded(await python.run("open('shared.txt', 'w').write('from a turn\\n')\nNone"))
        printed(await done(box, _READ), "from a turn\n")
        await box.files.write("~/given.txt", "given")
        printed(await python.run("import os\nprint(open(os.path.expanduser('~/given.txt')).read())"), "given\n")


@check(_AREA, "two interpreters have variables of their own", *_PYTHON, shared=True)
async def _two(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as one, box.interpreter(env={"WHO": "other"}) as other:
        succeeded(await one.run("x = 1"))
        succeeded(await other.run("x = 2"))
        printed(await one.run("import os\nprint(x, os.environ.get('WHO'))"), "1 None\n")
        printed(await other.run("import os\nprint(x, os.environ.get('WHO'))"), "2 other\n")


_WAIT = "import time\nkept = 'kept'\nprint('waiting', flush=True)\nwhile True:\n    time.sleep(0.05)"


@check(_AREA, "an interrupted turn ends, and the interpreter keeps what it had", *_PYTHON, shared=True)
async def _interrupted(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as python:
        begun, results = anyio.Event(), list[Result]()

        async def wait() -> None:
            results.append(await python.run(_WAIT, on_stdout=lambda _: begun.set()))

        with anyio.fail_after(SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await begun.wait()
                equal(python.interrupt(), True, "whether a turn was interrupted")
        expect(not results[0].ok and "KeyboardInterrupt" in str(results[0].error), f"the turn came to {results[0]!r}")
        printed(await python.run("print(kept)"), "kept\n")
        equal(python.interrupt(), False, "whether nothing was interrupted")


@check(_AREA, "a turn over its time is ended, and the interpreter keeps what it had", *_PYTHON, shared=True)
async def _late(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as python:
        result = await python.run(_WAIT, timeout=1)
        equal((result.status, result.stdout), ("timeout", "waiting\n"), "(status, stdout)")
        printed(await python.run("print(kept)"), "kept\n")


@check(_AREA, "an exception is its turn's error, by name, and the next turn goes on", *_PYTHON, shared=True)
async def _exception(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as python:
        result = await python.run("x = 1\n1 / 0")
        expect(not result.ok and "ZeroDivisionError" in str(result.error), f"the error is {result.error}")
        printed(await python.run("print(x)"), "1\n")


@check(_AREA, "code of an interpreter reaches the ports of the sandbox", *_PYTHON, shared=True)
async def _ports(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as python:
        await box.start(SERVER)
        await box.wait_for_port(PORT, timeout=SECONDS)
        asked = (
            f"import socket\nplug = socket.create_connection(('127.0.0.1', {PORT}))\nplug.sendall(b'hello\\n')\n"
            "print(plug.makefile().readline(), end='')"
        )
        printed(await python.run(asked), "HELLO\n")


@check(_AREA, "closing an interpreter ends it, and nothing else", *_PYTHON, shared=True)
async def _closed(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter() as stays:
        succeeded(await stays.run("x = 1"))
        before = len(await box.processes())
        async with box.interpreter() as python:
            succeeded(await python.run("y = 1"))

        async def fewer() -> bool:
            return len(await box.processes()) <= before

        await until(fewer, "something of the closed interpreter still runs")
        printed(await stays.run("print(x)"), "1\n")


@check(
    _AREA, "JavaScript keeps its variables beside Python", "living", "session:python", "session:javascript", shared=True
)
async def _javascript(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter("javascript") as javascript, box.interpreter() as python:
        succeeded(await javascript.run("let x = 20; require('fs').writeFileSync('js.txt', 'from js');"))
        printed(await javascript.run("console.log(x + 1)"), "21\n")
        printed(await python.run("print(open('js.txt').read())"), "from js\n")


@check(_AREA, "a shell keeps its variables and its folder", "living", "session:bash", shared=True)
async def _bash(bench: Bench) -> None:
    async with bench.machine() as box, box.interpreter("bash") as bash:
        succeeded(await bash.run("x=20; mkdir -p deep; cd deep"))
        printed(await bash.run('echo "$((x + 1)) $PWD"'), "21 /workspace/deep\n")
        equal((await bash.run("false")).exit_code, 1, "the exit code of a turn that fails")
        printed(await bash.run("pwd"), "/workspace/deep\n")
