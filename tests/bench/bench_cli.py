"""How long a command takes from the prompt to the prompt: a part of `make bench`.

Every command is a process of its own, in random order, beside what Python and the libraries that every run needs take
alone. Where the machine is busy, the CPU time of a command and its children is what can be compared.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
from bench import Part, add_part, at_most, err, machine, prepared, summary

from belljar.backends.native.toolchains import find_bubblewrap

# As `belljar` itself does, without a look for pydantic's plugins.
_LIBRARIES = """
import os
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
import asyncio, anyio, typer
from pydantic import BaseModel
class One(BaseModel): pass
"""
_BELLJAR = str(Path(sys.executable).with_name("belljar"))
_TARGET_MS = {"--help": 100, "native": 200, "wasm": 200}
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python, and Belljar's libraries": [sys.executable, "-c", _LIBRARIES],
    "belljar --help": [_BELLJAR, "--help"],
    "belljar run on native": [_BELLJAR, "run", "--backend", "native", "-c", "print(1)"],
    "belljar run on wasm": [_BELLJAR, "run", "--backend", "wasm", "-c", "print(1)"],
}
# Bytecode is kept, as it is for whoever installs Belljar; some build machines forbid it.
_ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(argv: list[str]) -> tuple[float, float]:
    """Milliseconds of wall clock, and of CPU with all children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, env=_ENV, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken * 1000, cpu * 1000


def measure(rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        for name in random.sample(list(COMMANDS), len(COMMANDS)):
            wall, cpu = run(COMMANDS[name])
            if number >= 2:  # the first write bytecode, and probe
                times.setdefault(name, []).append(wall)
                times.setdefault(f"{name}: CPU", []).append(cpu)
    return {name: times[name] for command in COMMANDS for name in (command, f"{command}: CPU")}


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    offer, python = anyio.run(prepared)
    with err.status("The command line …"):
        rows = {name: summary(values) for name, values in measure(rounds).items()}
    targets = [
        at_most(f"{name}, ms at the median", rows[name]["median_ms"], target)
        for name in COMMANDS
        for word, target in _TARGET_MS.items()
        if name.endswith(word)
    ]
    return {
        "machine": machine(offer, python, find_bubblewrap()[0]), "times": rows, "ratios": {}, "throughput": {},
        "targets": targets, "missing": [],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(add_part(__doc__, bench, (40, 15), Part("cli", "the command line", "belljar run -c 'print(1)'")))
