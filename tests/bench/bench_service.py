"""What HTTP adds to a run, and what the service stands: the fourth part of `make bench`.

A real `belljar serve` in a process of its own, asked over loopback by `belljar.Client` as users use it: one client for
each caller, whose connection stays open, and an idempotency key with each run. With one caller each round asks the
library (in this process) and the service in random order, so the difference of the medians is what client, HTTP,
admission and records add. With 10 and 100 callers all at once the service queues; every answer must still be right.
The last phase asks thousands of times and looks at the server's memory.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from bench import Part, add_part, at_most, err, machine, prepared, summary

import belljar
from belljar.backends.native.toolchains import find_bubblewrap

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from serving import Server, served

WIDTHS = (10, 100)
BACKENDS = ("wasm", "native")
Ask = Callable[[], Awaitable[float]]
_CONFIG = '[service]\nqueue = 1000\nrate = "1000000/minute"\n'


async def remote(client: belljar.AsyncClient, backend: str) -> float:
    """Milliseconds to a right answer of the service, asked as users ask it."""
    start = time.perf_counter()
    result = await client.run("print(1)", backend=backend)
    taken = (time.perf_counter() - start) * 1000
    assert result.stdout == "1\n", result
    return taken


async def library(backend: str) -> float:
    """Milliseconds to a right answer of the library in this process."""
    start = time.perf_counter()
    result = await belljar.arun("print(1)", backend=backend)
    assert result.stdout == "1\n", result
    return (time.perf_counter() - start) * 1000


async def one_caller(server: Server, rounds: int) -> dict[str, list[float]]:
    asks: dict[str, Ask] = {}
    for backend in BACKENDS:
        asks[f"belljar.arun on {backend}"] = partial(library, backend)
        asks[f"Client, {backend}"] = partial(remote, belljar.AsyncClient(server.url), backend)
    times: dict[str, list[float]] = {name: [] for name in asks}
    for number in range(rounds + 5):
        for name in random.sample(list(asks), len(asks)):
            taken = await asks[name]()
            if number >= 5:  # the first start workers and fill caches
                times[name].append(taken)
    return times


async def crowd(asks: Sequence[Ask], each: int) -> tuple[list[float], float]:
    """All answers' times, and answers a second."""
    times: list[float] = []

    async def call(ask: Ask) -> None:
        for _ in range(each):
            times.append(await ask())

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for ask in asks:
            tasks.start_soon(call, ask)
    return times, len(times) / (time.perf_counter() - start)


def clients(server: Server, backend: str, callers: int) -> list[Ask]:
    """As many callers, each with a client of its own."""
    return [partial(remote, belljar.AsyncClient(server.url), backend) for _ in range(callers)]


def sides(server: Server, backend: str, callers: int) -> dict[str, list[Ask]]:
    """The same number of callers of the library and of the service."""
    return {
        f"belljar.arun on {backend}, {callers} callers": [partial(library, backend)] * callers,
        f"Client, {backend}, {callers} callers": clients(server, backend, callers),
    }


def resident_mb(server: Server) -> float:
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no such process")


async def measure(server: Server, rounds: int, quick: bool) -> dict[str, Any]:
    with err.status("One caller: the library and HTTP in turn …"):
        times = await one_caller(server, rounds)
    rates = {}
    for backend in BACKENDS:
        for callers in WIDTHS:
            share = (400 if backend == "wasm" else 200) // (2 if quick else 1) // callers
            for name, asks in sides(server, backend, callers).items():
                with err.status(f"{name} …"):
                    await crowd(asks, 1)
                    times[name], rates[name] = await crowd(asks, max(2, share))
    many = 1000 if quick else 10_000
    with err.status(f"{many} requests, and the server's memory …"):
        asks = clients(server, "wasm", 10)
        await crowd(asks, many // 50)
        before = resident_mb(server)
        await crowd(asks, many // 10)
        grown = resident_mb(server) - before
    return {"times": times, "rates": rates, "requests": many, "before_mb": before, "grown_mb": grown}


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    offer, python = anyio.run(prepared)
    with served(config=_CONFIG, MAX_CONTAINERS="10") as server:
        found = anyio.run(measure, server, rounds, quick)
    rows = {name: summary(values) for name, values in found["times"].items()}
    added = {
        backend: round(rows[f"Client, {backend}"]["median_ms"] - rows[f"belljar.arun on {backend}"]["median_ms"], 2)
        for backend in BACKENDS
    }
    memory = f"memory after {found['requests']} requests more"
    return {
        "machine": machine(offer, python, find_bubblewrap()[0]), "times": rows,
        "ratios": {}, "added_ms": added, "throughput": {name: round(rate, 1) for name, rate in found["rates"].items()},
        "targets": [
            *(at_most(f"HTTP adds on {backend}, ms at p50", added[backend], 2) for backend in BACKENDS),
            f"errors with up to {max(WIDTHS)} callers: 0 (one would have ended this)",
            at_most(f"{memory}, MB over {found['before_mb']:.0f}", found["grown_mb"], 10),
        ],
        "missing": [],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(add_part(__doc__, bench, (200, 60), Part("service", "the service", "print(1) over HTTP")))
