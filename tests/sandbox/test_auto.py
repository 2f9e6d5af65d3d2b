"""`auto` on real backends: what fits goes to wasm, the rest to native, and what was misjudged can be run again."""

from __future__ import annotations

import json

import pytest

import belljar
from belljar.backends.native.backend import Native
from belljar.backends.native.toolchains import Tool, Toolchains
from belljar.backends.wasm import modules
from belljar.core import hints
from belljar.core.capabilities import Guarantees
from belljar.engine.engine import Engine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def both(engine: Engine) -> None:
    for offer in await engine.backends():
        if offer.backend in ("wasm", "native") and not offer.available:
            pytest.skip(f"{offer.backend} is missing here ({offer.why_not}): {offer.fix}")


FITS = {
    "arithmetic": "print(sum(range(10)))",
    "the standard library": "import json, re, sqlite3, decimal, datetime, pathlib, random; print(json.dumps([1]))",
    "files": "import os, tempfile\nos.makedirs('a/b')\nprint(os.listdir('.'), tempfile.mkdtemp())",
    "numpy": "import numpy; print(numpy.arange(3).sum())",
    "a lock": "import threading\nwith threading.Lock(): print('held')",
    "numpy and a recursion with a cache": (
        "import functools, numpy\n@functools.lru_cache\ndef f(n): return n and n + f(n - 1)\n"
        "print(f(50), numpy.arange(3))"
    ),
    "numpy and a higher limit": "import sys, numpy\nsys.setrecursionlimit(5000)\nprint(numpy.arange(3).sum())",
    "numpy and a look at threads": "import threading, numpy\nprint(threading.active_count(), numpy.arange(3))",
    "a cache": "import functools\n@functools.cache\ndef f(n): return n * 2\nprint(f(2))",
}
NEEDS_MORE = {
    "a process": ("import subprocess\nprint(subprocess.check_output(['echo', 'hi']))", "may start processes"),
    "a shell": ("import os\nprint(os.system('true'))", "may start processes"),
    "a thread": ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", "may start threads"),
    "a pool": (
        "from concurrent.futures import ThreadPoolExecutor as P\nwith P(2) as p: print(list(p.map(abs, [-1])))",
        "may start threads",
    ),
    "an event loop": ("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "may use sockets"),
    "a socket": ("import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))", "may use sockets"),
    "an alarm": ("import signal\nprint(signal.alarm(10))", "may use signals"),
    "C code": ("import ctypes\nprint(ctypes.sizeof(ctypes.CDLL(None).getpid() and ctypes.c_int))", "C code"),
    "a system's module": (
        "import resource\nprint(resource.getrusage(0)[0] >= 0)",
        "imports resource, which wasm lacks",
    ),
    "a device": ("import os\nprint(open(os.devnull).read())", "may ask the operating system"),
    "a deep recursion": (
        "import functools\n@functools.cache\ndef f(n): return n and 1 + f(n - 1)\nprint(f(300))",
        "may recurse deeply",
    ),
}


async def test_native_is_proved_once_although_wasm_runs_in_its_jail(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs, prove = list[Native](), Native._prove

    async def counted(native: Native) -> Guarantees:
        proofs.append(native)
        return await prove(native)

    monkeypatch.setattr(Native, "_prove", counted)
    fresh = Engine(engine.settings)
    assert (await belljar.arun("print(1)", engine=fresh, backend="wasm")).ok
    assert (await belljar.arun("print(1)", engine=fresh, backend="native")).ok
    assert len(proofs) == 1


@pytest.mark.parametrize("what", FITS)
async def test_code_that_fits_runs_on_wasm(engine: Engine, what: str) -> None:
    result = await belljar.arun(FITS[what], engine=engine)
    assert (result.backend, result.status) == ("wasm", "success"), (result.stderr, result.reasons)


@pytest.mark.parametrize("what", NEEDS_MORE)
async def test_code_that_needs_more_runs_on_native_and_the_reason_is_told(engine: Engine, what: str) -> None:
    code, why = NEEDS_MORE[what]
    result = await belljar.arun(code, engine=engine)
    assert (result.backend, result.status) == ("native", "success"), (result.stderr, result.reasons)
    assert result.reasons[0].startswith("wasm passed over: ") and why in result.reasons[0]


@pytest.mark.parametrize("what", NEEDS_MORE)
async def test_on_wasm_by_name_the_same_code_fails_and_is_told_where_it_would_not(engine: Engine, what: str) -> None:
    result = await belljar.arun(NEEDS_MORE[what][0], backend="wasm", engine=engine)
    assert result.error is not None, result.stdout
    assert result.error.context.get("stronger") is True, result.stderr
    assert "ask for backend=native" in result.error.suggestion


async def test_a_need_that_the_text_hides_is_met_by_a_second_run(engine: Engine) -> None:
    hidden = "print('first')\nexec(\"im\" + \"port subprocess; subprocess.run(['echo', 'from a shell'])\")"
    once = await belljar.arun(hidden, engine=engine)
    assert (once.backend, once.status, once.stdout) == ("wasm", "error", "first\n")
    twice = await belljar.arun(hidden, engine=engine, retry="stronger")
    assert (twice.backend, twice.status) == ("native", "success"), twice.stderr
    assert sorted(twice.stdout.splitlines()) == ["first", "from a shell"], "and nothing of the first run"
    assert twice.reasons[0].startswith("wasm ran it first: OSError")


async def test_an_open_sandbox_can_do_everything_because_nobody_knows_what_comes(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine) as box:
        assert (await box.exec(["echo", "hi"])).stdout == "hi\n"


async def test_a_session_is_on_wasm_unless_something_speaks_against_it(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as session:
        assert (await session.run("1 + 1")).backend == "wasm"
    async with belljar.AsyncSession(engine=engine, net=["example.org"]) as session:
        assert (await session.run("1 + 1")).backend == "native"


async def test_typescript_with_an_old_node_goes_to_wasm_and_the_reason_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(toolchains: Toolchains, node: Tool | None) -> None:
        return None

    monkeypatch.setattr(Toolchains, "_typescript", none)
    fresh = Engine(engine.settings)
    result = await belljar.arun("const n: number = 2; console.log(n)", language="typescript", engine=fresh)
    assert (result.backend, result.stdout) == ("wasm", "2\n"), result
    assert "native passed over: typescript cannot be run by native here" in result.reasons


async def test_what_wasm_is_said_to_have_is_what_it_has(engine: Engine) -> None:
    code = (
        "import sys, json, importlib.util\n"
        "names, out = json.load(sys.stdin), {}\n"
        "out['built in'] = sorted({name.partition('.')[0] for name in sys.builtin_module_names})\n"
        "out['missing'] = [name for name in names if importlib.util.find_spec(name) is None]\n"
        "def fails(name):\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: return True\n"
        "talkative = {'this', 'antigravity', '__hello__', '__phello__'}\n"
        "standard = [name for name in names if name in sys.stdlib_module_names - talkative]\n"
        "out['broken'] = [name for name in standard if fails(name)]\n"
        "print(json.dumps(out))"
    )
    names = json.dumps(sorted(modules.bundled() | modules.BROKEN))
    result = await belljar.arun(code, backend="wasm", engine=engine, stdin=names, timeout=60)
    assert result.ok, result.stderr
    real = json.loads(result.stdout)
    assert modules.BUILT_IN <= set(real["built in"]) <= modules.bundled()
    assert real["missing"] == []
    assert set(real["broken"]) == modules.BROKEN


async def test_every_call_to_the_system_that_native_has_and_wasm_lacks_is_known_to_the_analysis(engine: Engine) -> None:
    code = "import json, os, signal\nprint(json.dumps({m.__name__: dir(m) for m in (os, signal)}))"
    there = {
        name: json.loads((await belljar.arun(code, backend=name, engine=engine)).stdout) for name in ("wasm", "native")
    }
    for module in ("os", "signal"):
        lacking = [n for n in set(there["native"][module]) - set(there["wasm"][module]) if n.islower() and n[0] != "_"]
        assert len(lacking) > 10
        unknown = [n for n in lacking if not hints.analyse(f"import {module}\n{module}.{n}()").system]
        assert set(unknown) <= {"waitid_result", "struct_siginfo"}, "types, of no use without their functions"


async def test_an_administrators_fuel_ends_an_endless_loop_on_wasm_and_leaves_native_alone(engine: Engine) -> None:
    limits = engine.settings.defaults.model_copy(update={"fuel": 400_000_000})
    careful = Engine(engine.settings.model_copy(update={"defaults": limits}))
    assert (await belljar.arun("while True: pass", engine=careful)).status == "fuel_exhausted"
    assert (await belljar.arun("echo here", language="bash", engine=careful)).backend == "native"


async def test_a_package_that_native_lacks_is_found_on_wasm_from_a_session_too(engine: Engine) -> None:
    async with belljar.AsyncSession(backend="native", engine=engine) as session:
        turn = await session.run("import numpy")
    assert turn.error is not None
    assert "the wasm runtime has it: ask for backend=wasm" in turn.error.suggestion


async def test_a_client_without_a_network_says_so_at_once(engine: Engine) -> None:
    for command in ("git clone https://a.example/x.git", "curl -sS https://a.example"):
        result = await belljar.arun(command, language="bash", backend="native", engine=engine)
        assert result.error is not None
        assert result.error.error_type in ("NETWORK_ERROR", "MISSING_PACKAGE"), result.stderr
    shown = await belljar.arun("import os; print(os.environ['PIP_RETRIES'])", backend="native", engine=engine)
    assert shown.stdout == "0\n"
    own = await belljar.arun(
        "echo $PIP_RETRIES", language="bash", backend="native", env={"PIP_RETRIES": "7"}, engine=engine
    )
    assert own.stdout == "7\n"
