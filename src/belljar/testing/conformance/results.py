"""The result as data: its fields, its figures, its way through JSON."""

from __future__ import annotations

import json

from belljar.backends.fake import FakeProcess
from belljar.core.capabilities import Isolation
from belljar.core.result import Result
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, present, printed, says, succeeded

_FIELDS = {
    "status", "exit_code", "stdout", "stderr", "truncated", "duration_ms", "startup_ms", "memory_used_mb", "cpu_ms",
    "fuel_consumed", "files", "results", "error", "backend", "container_id", "guarantees", "reasons",
    "denied", "left_out", "warnings",
}  # fmt: skip


async def _play_work(p: FakeProcess) -> None:
    p.write("out.bin", b"\xff\0")
    await p.out("worked\n")


_WORK = guest(
    "import time\n"
    "end = time.process_time() + 0.3\n"
    "while time.process_time() < end:\n"
    "    pass\n"
    "open('out.bin', 'wb').write(b'\\xff\\0')\n"
    "print('worked')",
    _play_work,
)


@check("result", "a result as JSON has the fields of the contract and no others")
async def _fields(bench: Bench) -> None:
    result = await bench.run(_WORK)
    printed(result, "worked\n")
    equal(set(json.loads(result.model_dump_json())), _FIELDS, "the fields")


@check("result", "a result survives its way through JSON, files and all")
async def _roundtrip(bench: Bench) -> None:
    result = succeeded(await bench.run(_WORK, collect=["out.bin"]))
    equal([file.content for file in result.files], [b"\xff\0"], "files")
    equal(Result.model_validate_json(result.model_dump_json()), result, "the result after JSON")


@check("result", "it says which backend ran it, what held around it, and why there")
async def _provenance(bench: Bench) -> None:
    result = succeeded(await bench.run(_WORK))
    equal(result.backend, bench.backend, "backend")
    expect(bool(result.reasons), "reasons is empty")
    guarantees = present(result.guarantees, "guarantees")
    expect(bool(guarantees.walls and guarantees.limits), "the guarantees name no wall or no limit")
    equal(guarantees, bench.capabilities.guarantees, "guarantees")


@check("result", "a failed run has all of that too")
async def _failed(bench: Bench) -> None:
    result = await bench.run(_FAIL)
    equal((result.status, result.exit_code, result.backend), ("error", 9, bench.backend), "(status, code, backend)")
    present(result.guarantees, "guarantees")
    present(result.error, "error")


_FAIL = guest("raise SystemExit(9)", says(code=9))


@check("figures", "the startup took some time, and the whole run no less")
async def _times(bench: Bench) -> None:
    result = succeeded(await bench.run(_WORK))
    expect(
        0 < result.startup_ms <= result.duration_ms,
        f"startup_ms is {result.startup_ms}, duration_ms {result.duration_ms}",
    )


@check("figures", "the cpu time is what the guest used, or is not told", alone=True)
async def _cpu(bench: Bench) -> None:
    result = succeeded(await bench.run(_WORK))
    cpu = result.cpu_ms
    # The guest's clock of CPU time is that of the host only where the kernel is: in WASI it is the wall, in gVisor it
    # ticks while the guest would run. A busy machine gives such a guest less than it counts.
    own_clock = bench.lacks("posix") or (result.guarantees and result.guarantees.isolation is Isolation.KERNEL)
    least = 50 if own_clock else 250
    expect(cpu is None or least <= cpu <= 5000, f"the guest used 300 ms of cpu time, and cpu_ms is {cpu}")


@check("figures", "the memory figure is plausible, or is not told")
async def _memory(bench: Bench) -> None:
    used = succeeded(await bench.run(_WORK)).memory_used_mb
    expect(used is None or 0 <= used <= 512, f"memory_used_mb is {used} under a limit of 512")
