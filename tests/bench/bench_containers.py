"""How long a run in a container takes, beside the engines' own commands and a peer: the third part of `make bench`.

Real engines are started for it (scripts/test_engines.sh) and gone with it. As in bench.py every side is a worker
process, asked in random order; after a run of ours the worker waits, untimed, until the container is removed and the
pool is full again, so that nobody pays for another's clearing up. The engines' own commands remove theirs themselves
(`--rm`), and are timed with it, as their user is.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bench import (
    PEER,
    PEER_VENV,
    Part,
    Phase,
    Worker,
    add_part,
    at_least,
    at_most,
    interleave,
    machine,
    must,
    peer_python,
    prepared,
    summary,
)

from belljar.backends.native.toolchains import find_bubblewrap
from engines import FLAVOURS, IMAGE, engines

PATIENCE_SECONDS = 180.0
TYPED = {
    "docker run --rm": "docker run", "docker run --rm, with Belljar's walls": "docker run, walls",
    "docker run --rm --runtime runsc": "docker run, runsc", "podman --remote run --rm": "podman run",
}  # fmt: skip
PEERS = {"llm-sandbox on docker": "llm-sandbox", "llm-sandbox on docker, and closed": "llm-sandbox, and closed"}


def start(stack: ExitStack, facts: dict[str, Any], missing: list[str]) -> dict[str, Worker]:
    workers: dict[str, Worker] = {}
    for side in ("engines", "belljar on containers", "llm-sandbox on docker"):
        theirs = side.startswith("llm")
        try:
            python = (
                peer_python(PEER.replace("==", "[docker]=="), PEER_VENV, "llm_sandbox, docker")
                if theirs
                else Path(sys.executable)
            )
            workers[side] = Worker(python, facts | {"side": side, "slow": theirs}, PATIENCE_SECONDS)
        except RuntimeError as error:
            if not theirs:
                raise
            missing.append(str(error))
            continue
        stack.callback(workers[side].close)
    return workers


def measure(
    workers: dict[str, Worker], names: list[str], rounds: int, quick: bool, missing: list[str]
) -> dict[str, list[float]]:
    def jobs(side: str, contenders: dict[str, str]) -> dict[str, Any]:
        worker = workers.get(side)
        return {name: (lambda what=what: worker.time(what)) for name, what in contenders.items()} if worker else {}

    ours = {f"belljar.run on {name}": name for name in names}
    flavours = {"docker run, runsc": "gvisor", "podman run": "podman"}
    here = {name.partition(",")[0] for name in names}
    typed = {name: what for name, what in TYPED.items() if flavours.get(what, "docker") in here}
    both = jobs("engines", typed) | jobs("belljar on containers", ours)
    for job in both.values():  # once, not counted: it proves the engine, or fills the pool
        job()
    phases: list[Phase] = [("side by side", both, rounds)]
    times = interleave(phases)
    try:
        for _ in range(1 if quick else 3):  # in this order: the second tells of the first
            for name, job in jobs("llm-sandbox on docker", PEERS).items():
                times.setdefault(name, []).append(job())
    except RuntimeError as error:  # the peer's trouble; the rest is still worth knowing
        missing.append(str(error))
    return times


def with_python(socket: str) -> str:
    """The image with the name `python` too, which the peer starts."""
    name, docker = "belljar-test/python:latest", ("docker", "-H", f"unix://{socket}")
    must([*docker, "run", "--name=belljar-bench", "--network=none", IMAGE, "ln", "-sf", "python3", "/usr/bin/python"])
    must([*docker, "commit", "--change", 'CMD ["bash"]', "belljar-bench", name])
    must([*docker, "rm", "belljar-bench"])
    return name


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    found = engines()
    missing = [f"{name}: {why}" for name, why in found.missing.items()]
    flavours = {
        name: (backend, runtime)
        for name, (backend, runtime, needed) in FLAVOURS.items()
        if backend in found.sockets and needed not in found.missing
    }
    if "docker" not in flavours:
        raise RuntimeError(f"no docker here: {found.missing.get('docker')}")
    facts = {
        "image": IMAGE,
        "peer_image": with_python(found.sockets["docker"]),
        "sockets": found.sockets,
        "flavours": flavours,
        "uid": None,
    }
    names = [f"{name}, {how}" for name in flavours for how in ("cold", "pooled")]
    offer, python = anyio.run(prepared)
    with ExitStack() as stack:
        workers = start(stack, facts, missing)
        times = measure(workers, names, rounds, quick, missing)
    rows = {name: summary(values) for name, values in times.items()}
    ms = {name: row["median_ms"] for name, row in rows.items()}
    typed, cold, pooled = ms["docker run --rm"], ms["belljar.run on docker, cold"], ms["belljar.run on docker, pooled"]
    return {
        "machine": machine(offer, python, find_bubblewrap()[0]), "times": rows, "throughput": {},
        "ratios": {f"{name} / docker run --rm": round(value / typed, 3) for name, value in ms.items()},
        "targets": [
            at_most("cold, beside `docker run --rm`", cold / typed, 1.15),
            at_least("pooled, times as fast as `docker run --rm`", typed / pooled, 10),
        ],
        "missing": missing,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(add_part(__doc__, bench, (40, 5), Part("containers", "Containers", "print(1) in a container")))
