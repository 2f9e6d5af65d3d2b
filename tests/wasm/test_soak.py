"""Thousands of runs in a row on wasm: all answers are right, and nothing grows, on the host or in a worker.

They run in a process of their own: in this one, memory that other tests have freed would swallow a leak unseen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import anyio
import pytest

import belljar
import witness
from belljar.backends.wasm.backend import Wasm
from belljar.engine.engine import Engine
from witness import Traces, descendants, eventually

pytestmark = pytest.mark.anyio
ALL_RUNS, FEW_RUNS = 20_000, 2_000
AT_ONCE = 3
SAMPLES = 100
KB = 1024


class Sample(NamedTuple):
    """What this process and its workers hold at one moment; bytes, or a number of things."""

    host_memory: int
    worker_memory: int
    host_files: int
    worker_files: int
    host_threads: int
    worker_threads: int
    worker_folders: int
    processes: int


# How much more a run may take than those before it, on average: half of the leak that must not pass, which is 1 kB.
# Of things that are counted, one in a thousand runs. Threads of the workers may be more: wasmtime starts one for files
# whenever two requests happen to meet, keeps it, and has enough after seven or so for each worker.
PER_RUN = {field: 512 if field.endswith("memory") else 1 / 1000 for field in Sample._fields}
PER_RUN["worker_threads"] = 3 / 1000


def _status(pid: int | str, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def _folders(pid: int) -> int:
    """What lies in its /tmp, if that is not the host's."""
    outside = os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    return 0 if outside else len(os.listdir(f"/proc/{pid}/root/tmp"))


def _over(pids: set[int], measure: Callable[[int], int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += measure(pid)
        except OSError:  # it has ended
            continue
    return total


def _sample() -> Sample:
    workers = descendants(os.getpid())
    return Sample(
        host_memory=_status("self", "VmRSS") * KB,
        worker_memory=_over(workers, lambda pid: _status(pid, "VmRSS") * KB),
        host_files=len(os.listdir("/proc/self/fd")),
        worker_files=_over(workers, lambda pid: len(os.listdir(f"/proc/{pid}/fd"))),
        host_threads=_status("self", "Threads"),
        worker_threads=_over(workers, lambda pid: _status(pid, "Threads")),
        worker_folders=_over(workers, _folders),
        processes=len(workers),
    )


async def _soak(engine: Engine, runs: int) -> list[Sample]:
    samples: list[Sample] = []
    numbers = iter(range(runs))

    async def runner() -> None:
        for number in numbers:
            result = await belljar.arun(f"print({number})", backend="wasm", engine=engine)
            assert (result.stdout, result.status) == (f"{number}\n", "success"), (number, result)
            if number % (runs // SAMPLES) == 0:
                samples.append(_sample())

    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(runner)
    return samples


def main() -> None:
    """The process that is looked at: runs, closes the backend, and tells what it saw and what is left."""
    engine = Engine()
    began = time.monotonic()
    samples = anyio.run(_soak, engine, int(sys.argv[1]))
    seconds = time.monotonic() - began
    backend = engine.backend("wasm")
    assert isinstance(backend, Wasm)
    backend.close()
    eventually(lambda: not descendants(os.getpid()))
    print(json.dumps({"samples": samples, "seconds": seconds, "left": sorted(descendants(os.getpid()))}))


def _grown(samples: Sequence[Sample], all_runs: int) -> dict[str, str]:
    """What the last quarter holds more of than the second; the first is for warming up. Medians: bursts are no leak."""
    quarter = len(samples) // 4
    runs = quarter * 2 * all_runs // SAMPLES  # from the middle of the one to the middle of the other
    noise = ALL_RUNS / all_runs  # a single burst weighs more among few
    grown = {}
    for name, allowed in PER_RUN.items():
        before, after = (
            median(getattr(sample, name) for sample in part)
            for part in (samples[quarter : 2 * quarter], samples[3 * quarter :])
        )
        if after - before > allowed * noise * runs:
            grown[name] = f"from {before:g} to {after:g} in {runs} runs: {(after - before) / runs:.3f} a run"
    return grown


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "runs", [FEW_RUNS, pytest.param(ALL_RUNS, marks=pytest.mark.exhaustive("two minutes; fewer runs see larger leaks"))]
)
async def test_thousands_of_runs_leave_memory_descriptors_threads_and_processes_as_they_were(
    engine: Engine, traces: Traces, runs: int
) -> None:
    offer = await engine.capabilities("wasm")
    if not offer.available:
        pytest.skip(f"the soak was NOT run: wasm is missing here ({offer.why_not}): {offer.fix}")
    env = {**os.environ, "BELLJAR_STATE_DIR": str(traces.state_dir), "PYTHONPATH": str(Path(witness.__file__).parent)}
    done = subprocess.run(
        [sys.executable, __file__, str(runs)], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    samples = [Sample(*sample) for sample in told["samples"]]
    print(f"{runs} runs in {told['seconds']:.1f} s, {told['seconds'] / runs * 1000:.2f} ms each")
    print(*samples[:: len(samples) // 8], sep="\n")
    assert len(samples) == SAMPLES
    assert samples[-1].worker_memory > 0 and samples[-1].processes > 0, "the workers were seen"
    assert not _grown(samples, runs)
    assert not told["left"], "processes outlived the backend, or nobody waited for them"
    assert eventually(lambda: not traces.all()), traces.all()


def _steady(number: int) -> Sample:
    """A process that warms up, then breathes by a few megabytes."""
    breath = (number * 7919 % 13) * 300 * KB
    warm = min(number, 20) * 1000 * KB
    return Sample(50_000 * KB + warm + breath, 400_000 * KB + warm + breath, 30 + number % 5, 60, 4, 20, 3, 12)


def test_a_leak_of_a_kilobyte_a_run_or_of_a_descriptor_in_a_hundred_would_be_seen() -> None:
    steady = [_steady(number) for number in range(SAMPLES)]
    every = ALL_RUNS // SAMPLES
    assert not _grown(steady, ALL_RUNS)
    for name, allowed in PER_RUN.items():
        leak = KB if allowed > 1 else 1 / 100
        leaking = [
            sample._replace(**{name: getattr(sample, name) + int(number * every * leak)})
            for number, sample in enumerate(steady)
        ]
        assert set(_grown(leaking, ALL_RUNS)) == {name}


if __name__ == "__main__":
    main()
