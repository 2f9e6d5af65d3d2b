"""What a living sandbox costs: its opening, a command in it, and a hundred that wait. A part of `make bench`.

Openings of both kinds of sandbox, commands in an open one and the same program started bare are asked for in random
order, so that a noisy moment falls on each alike. Memory is what the kernel says of all processes (their share of what
they share) and of the control groups, before a hundred sandboxes are opened and while they are idle.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
from bench import Part, Phase, add_part, at_most, err, interleave, machine, prepared, summary

import belljar
from belljar.backends.native.toolchains import find_bubblewrap
from belljar.host.procfs import descendants
from belljar.settings import load

_PROGRAM = ["/bin/true"]
_IDLE = 100
_MB = 1_000_000
_OPEN, _LIVING, _COMMAND, _BARE = "Sandbox opened", "living sandbox opened", "a command in it", "the same, bare"


def bare() -> str:
    subprocess.run(_PROGRAM, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return ""


def opened(**options: Any) -> belljar.Sandbox:
    return belljar.Sandbox.open(backend="native", **options)


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def opening(**options: Any) -> float:
    """Milliseconds to open one; closing it is not counted."""
    with ExitStack() as stack:
        return timed(lambda: stack.callback(opened(**options).close))


def held_bytes() -> int:
    """The memory of this process and of all that it has started."""
    found = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith(("Pss:", "SwapPss:")))
    return found


def idle_bytes(count: int) -> int:
    engine = belljar.Engine(load(max_containers=count))
    with ExitStack() as stack:
        before = held_bytes()
        for _ in range(count):
            stack.callback(opened(living=True, engine=engine).close)
        return held_bytes() - before


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    offer, python = anyio.run(prepared)
    with opened(living=True) as box:
        phases: list[Phase] = [
            ("openings", {_OPEN: opening, _LIVING: lambda: opening(living=True)}, rounds),
            ("commands", {_COMMAND: lambda: timed(lambda: box.exec(_PROGRAM)), _BARE: lambda: timed(bare)}, rounds * 2),
        ]
        times = interleave(phases)
    with err.status(f"{_IDLE} idle sandboxes …"):
        idle_mb = idle_bytes(_IDLE) / _MB
    rows = {name: summary(values) for name, values in times.items()}
    more = statistics.median(times[_COMMAND]) - statistics.median(times[_BARE])
    ratio = rows[_LIVING]["median_ms"] / rows[_OPEN]["median_ms"]
    targets = [
        at_most("opening a living sandbox, times another's", ratio, 1.3),
        at_most("a command in an open one, ms more than bare", more, 15),
        at_most(f"{_IDLE} idle living sandboxes, MB", idle_mb, 300),
    ]
    return {
        "machine": machine(offer, python, find_bubblewrap()[0]), "times": rows,
        "ratios": {f"{_LIVING} / {_OPEN}": round(ratio, 2)}, "throughput": {}, "targets": targets, "missing": [],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(add_part(__doc__, bench, (40, 10), Part("living", "living sandboxes", "native")))
