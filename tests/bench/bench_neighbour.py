"""What a caller feels of another one that floods the service: the fifth part of `make bench`.

A real `belljar serve` with a key for each caller. A neighbour asks for `print(1)` on wasm, again and again: first with
the service for itself, then while others flood it with outputs, half-sent bodies, sessions, files and queued runs, each
by one caller, and last with outputs of ten callers, who leave places to run in. The floods come from a process of their
own that gives way to all others: its CPU would be another machine's. Beside the times is the most memory that the
server had.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from bench import Part, add_part, at_most, err, machine, prepared, summary
from bench_service import remote
from flooder import KINDS

import belljar
from belljar.backends.native.toolchains import find_bubblewrap

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from serving import Server, served
from watching import forget_peak, peak

TEN = 10
MOST_MB = 1000
_WARM_UP = 5
_SETTLE_SECONDS = 2.0  # before a flood is a flood, and after it
_DRAIN_SECONDS = 120.0  # for what it left in the queue
_CONFIG = '[service]\nrate = "1000000/minute"\ndrain = 2\n'
ALONE = "print(1), nobody else"


def key(server: Server, name: str) -> str:
    words = [word for scope in ("run", "read", "sessions", "files") for word in ("--scope", scope)]
    made = server.belljar("keys", "create", name, *words, "--json")
    if made.returncode:
        raise RuntimeError(made.stderr)
    return str(json.loads(made.stdout)["key"])


@contextmanager
def flooding(server: Server, kind: str, keys: list[str]) -> Iterator[None]:
    """Callers that flood while the block runs."""
    program = Path(__file__).with_name("flooder.py")
    process = subprocess.Popen([sys.executable, str(program), server.url, kind, *keys])
    try:
        time.sleep(_SETTLE_SECONDS)
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the flood of {kind} ended by itself")
    finally:
        process.kill()
        process.wait()
        close_sessions(server, keys)
        settle(server)


def close_sessions(server: Server, keys: list[str]) -> None:
    """Closes what killed callers left open: it would hold places for ten minutes."""
    for one in keys:
        with httpx2.Client(base_url=server.url, headers={"Authorization": f"Bearer {one}"}, timeout=30) as http:
            for record in http.get("/api/sandbox/sessions").json():
                http.delete(f"/api/sandbox/sessions/{record['id']}")


def settle(server: Server) -> None:
    """Waits until nothing of a flood is left: what it queued is not to be felt in the next row."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_SETTLE_SECONDS)
        state = httpx2.get(f"{server.url}/readyz", timeout=10).json()
        if not state["running"] and not state["waiting"]:
            return
    raise RuntimeError("runs of a flood did not end")


async def ask(server: Server, neighbour: str, rounds: int) -> list[float]:
    client = belljar.AsyncClient(server.url, key=neighbour)
    times = [await remote(client, "wasm") for _ in range(rounds + _WARM_UP)]
    return times[_WARM_UP:]


def measure(server: Server, keys: list[str], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    neighbour, *others = keys
    floods = [(f"print(1), one floods {kind}", kind, others[:1]) for kind in KINDS]
    floods.append((f"print(1), {TEN} flood output", "output", others))
    times: dict[str, list[float]] = {ALONE: []}
    most: dict[str, float] = {}
    for name, kind, flooders in floods:
        with err.status("A neighbour alone …"):  # in turns: what the machine gives changes from one minute to the next
            times[ALONE] += anyio.run(ask, server, neighbour, rounds)
        with err.status(f"{name} …"):
            forget_peak(server.pid)
            with flooding(server, kind, flooders):
                times[name] = anyio.run(ask, server, neighbour, rounds)
            most[name] = peak(server.pid) / 1_000_000
    return times, most


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    offer, python = anyio.run(prepared)
    with served(start=False, config=_CONFIG, MAX_CONTAINERS="12") as server:
        keys = [key(server, name) for name in ("neighbour", *(f"flooder{number}" for number in range(TEN)))]
        server.start()
        times, most = measure(server, keys, rounds)
    rows = {name: summary(values) for name, values in times.items()}
    worst = {name: round(row["p99_ms"] / rows[ALONE]["p99_ms"], 2) for name, row in rows.items() if name != ALONE}
    return {
        "machine": machine(offer, python, find_bubblewrap()[0]), "times": rows, "ratios": {},
        "throughput": {},
        "p99_over_alone": worst, "most_memory_mb": {name: round(value) for name, value in most.items()},
        "targets": [
            *(at_most(f"{name}: p99 over that of nobody else", ratio, 2) for name, ratio in worst.items()),
            at_most("the server's memory under all floods, MB", round(max(most.values())), MOST_MB),
        ],
        "missing": [],
    }  # fmt: skip


if __name__ == "__main__":
    part = Part("neighbour", "the neighbour", "print(1) over HTTP while others flood the service")
    raise SystemExit(add_part(__doc__, bench, (200, 40), part))
