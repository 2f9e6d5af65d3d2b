"""Limits: each one stops the guest, says so in its own status, and leaves the rest of the answer whole."""

from __future__ import annotations

from belljar.backends.fake import FakeProcess
from belljar.core.capabilities import Isolation
from belljar.core.errors import InvalidRequest, PolicyDenied
from belljar.core.result import Result
from belljar.testing.conformance.bench import (
    Bench,
    check,
    equal,
    expect,
    guest,
    present,
    printed,
    refused,
    says,
    succeeded,
)
from belljar.testing.conformance.sandboxes import BEAT_ON, expect_silence

_MIB = 1 << 20
_SLACK_MS = 3000  # a busy machine may be late; one that waits for the guest's own end would be later


def _told(result: Result, status: str, kind: str) -> None:
    """The limit has the verdict, and the error says what an agent can do about it."""
    equal(result.status, status, "status")
    failure = present(result.error, "error")
    equal(failure.error_type, kind, "error_type")
    expect(bool(failure.message and failure.suggestion), "the error has no message or no suggestion")


# --- wall clock ---


async def _play_hang(p: FakeProcess) -> None:
    await p.out("partial\n")
    await p.err("also partial\n")
    await p.sleep(60)


_HANG = guest(
    "import sys, time\n"
    "print('partial', flush=True)\n"
    "print('also partial', file=sys.stderr, flush=True)\n"
    "time.sleep(60)",
    _play_hang,
)
_STUBBORN = guest(
    "import signal, time\n"
    "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "print('partial', flush=True)\nwhile True:\n    time.sleep(1)",
    _play_hang,
)


@check("timeout", "a guest over its time has status timeout, and its partial output is returned", alone=True)
async def _timeout(bench: Bench) -> None:
    result = await bench.run(_HANG, timeout=2)
    _told(result, "timeout", "TIMEOUT")
    equal((result.stdout, result.stderr), ("partial\n", "also partial\n"), "(stdout, stderr)")
    expect(2000 <= result.duration_ms < 2000 + _SLACK_MS, f"a timeout of 2 s took {result.duration_ms:.0f} ms")


@check("timeout", "a guest that ignores every signal is ended all the same", alone=True)
async def _stubborn(bench: Bench) -> None:
    result = await bench.run(_STUBBORN, timeout=2)
    equal((result.status, result.stdout), ("timeout", "partial\n"), "(status, stdout)")
    expect(result.duration_ms < 2000 + _SLACK_MS, f"a timeout of 2 s took {result.duration_ms:.0f} ms")


@check("timeout", "a timeout ends the guest's children too", "processes", alone=True)
async def _children(bench: Bench) -> None:
    async with bench.sandbox() as box:
        result = await box.run(BEAT_ON, timeout=2)
        equal(result.status, "timeout", "status")
        await expect_silence(box, result)


async def _play_short(p: FakeProcess) -> None:
    await p.sleep(0.3)
    await p.out("in time\n")


_SHORT = guest("import time\ntime.sleep(0.3)\nprint('in time')", _play_short)


@check("timeout", "a guest that ends in time is left alone")
async def _in_time(bench: Bench) -> None:
    result = await bench.run(_SHORT, timeout=20)
    printed(result, "in time\n")
    expect(300 <= result.duration_ms < 15_000, f"0.3 s took {result.duration_ms:.0f} ms")


# --- memory ---


def _takes(size: int) -> str:
    async def play(p: FakeProcess) -> None:
        await p.out("before\n")
        p.allocate(size)
        await p.out("after\n")

    return guest(f"print('before', flush=True)\nkept = b'x' * {size}\nprint('after', flush=True)", play)


_TOO_MUCH, _ENOUGH = _takes(400 * _MIB), _takes(64 * _MIB)


@check("memory", "a guest over its memory has status oom_killed, and its partial output is returned")
async def _out_of_memory(bench: Bench) -> None:
    result = await bench.run(_TOO_MUCH, memory="128M")
    _told(result, "oom_killed", "OOM_KILLED")
    equal(result.stdout, "before\n", "stdout")


@check("memory", "a guest below its memory limit runs well, and its use is told if it is known")
async def _enough_memory(bench: Bench) -> None:
    result = await bench.run(_ENOUGH, memory="256M")
    printed(result, "before\nafter\n")
    used = result.memory_used_mb
    expect(used is None or 60 <= used <= 256, f"64 MB were taken, and memory_used_mb is {used}")


# --- processes ---


def _forks(count: int) -> str:
    async def play(p: FakeProcess) -> None:
        for i in range(count):
            try:
                p.spawn()
            except BlockingIOError:
                await p.out(f"refused {i}\n")
                return
        await p.out("all\n")

    return guest(
        "import os, time\n"
        f"for i in range({count}):\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "            os._exit(0)\n"
        "    except BlockingIOError:\n"
        "        print('refused', i, flush=True)\n"
        "        break\n"
        "else:\n"
        "    print('all')\n",
        play,
    )


_MANY, _FEW = _forks(200), _forks(10)


@check("processes", "a fork over the limit is refused to the guest, which survives it", "processes")
async def _refused_forks(bench: Bench) -> None:
    result = succeeded(await bench.run(_MANY, pids=20))
    expect(result.stdout.startswith("refused "), f"stdout is {result.stdout!r}")
    count = int(result.stdout.split()[1])
    expect(5 <= count <= 20, f"{count} children were allowed under a limit of 20")


@check("processes", "processes below the limit are allowed", "processes")
async def _few(bench: Bench) -> None:
    printed(await bench.run(_FEW, pids=20), "all\n")


# --- disk ---


def _fills(path: str, *, catch: bool) -> str:
    async def play(p: FakeProcess) -> None:
        await p.out("before\n")
        try:
            p.write(path, b"x" * 20 * _MIB)
        except OSError as error:
            if not catch:
                raise
            await p.out(f"{error.strerror}\n")

    write = f"with open('{path}', 'wb') as file:\n    for _ in range(20):\n        file.write(b'x' * {_MIB})\n"
    if catch:
        body = "".join(f"    {line}\n" for line in write.splitlines())
        write = f"try:\n{body}except OSError as error:\n    print(error.strerror)\n"
    return guest(f"print('before', flush=True)\n{write}", play)


_FILL_WORKSPACE, _FILL_TMP = _fills("/workspace/big", catch=False), _fills("/tmp/big", catch=False)
_FILL_AND_CATCH = _fills("/workspace/caught", catch=True)


@check("disk", "a guest that dies of a full /workspace has status disk_limit")
async def _full_workspace(bench: Bench) -> None:
    result = await bench.run(_FILL_WORKSPACE, disk="4M")
    _told(result, "disk_limit", "DISK_LIMIT")
    equal(result.stdout, "before\n", "stdout")


@check("disk", "a guest that dies of a full /tmp has status disk_limit")
async def _full_tmp(bench: Bench) -> None:
    _told(await bench.run(_FILL_TMP, disk="4M"), "disk_limit", "DISK_LIMIT")


@check("disk", "a guest that copes with a full disk goes on")
async def _coped(bench: Bench) -> None:
    printed(await bench.run(_FILL_AND_CATCH, disk="4M"), "before\nNo space left on device\n")


@check("disk", "the limit holds in a sandbox that keeps its files")
async def _kept(bench: Bench) -> None:
    async with bench.sandbox(disk="4M") as box:
        _told(await box.run(_FILL_WORKSPACE), "disk_limit", "DISK_LIMIT")


@check("disk", "writing below the limit works")
async def _below(bench: Bench) -> None:
    printed(await bench.run(_FILL_AND_CATCH, disk="64M"), "before\n")


# --- cpu ---

_BUSY = guest(
    "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end:\n    pass\nprint(time.process_time())",
    says("0.5\n"),
)


@check("cpu", "half a cpu gives about half the time", "limit:cpus", alone=True)
async def _half(bench: Bench) -> None:
    result = succeeded(await bench.run(_BUSY, cpus=0.5))
    used = float(result.stdout)
    counted = result.cpu_ms is not None and result.guarantees and result.guarantees.isolation is Isolation.KERNEL
    # In WASI the clock of the process is the one on the wall; gVisor's runs on while the host makes it wait.
    if bench.lacks("posix") or counted:
        used = present(result.cpu_ms, "cpu_ms, the only witness of this limit,") / 1000
    expect(used > 0.1, f"only {used:.2f} s were used: the guest was not busy, or the figure is wrong")
    expect(used < 1.2, f"{used:.2f} s of 1.5 s were used under a limit of half a cpu")


# --- what may be asked for ---


@check("caps", "asking for more than the cap is denied, and nothing runs")
async def _over_cap(bench: Bench) -> None:
    caps = bench.engine.settings.caps
    engine = bench.engine_with(caps=caps.model_copy(update={"timeout": 60, "memory": 1 << 30}))
    await refused(PolicyDenied, bench.run(_SHORT, timeout=61, engine=engine))
    await refused(PolicyDenied, bench.run(_SHORT, memory="2G", engine=engine))
    printed(await bench.run(_SHORT, timeout=60, engine=engine), "in time\n")


@check("caps", "a command in a sandbox cannot pass the cap either")
async def _over_cap_inside(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await refused(PolicyDenied, box.run(_SHORT, timeout=bench.engine.settings.caps.timeout + 1))


@check("caps", "a limit that makes no sense is an invalid request")
async def _nonsense(bench: Bench) -> None:
    for nonsense in ({"timeout": -1}, {"timeout": float("nan")}, {"memory": "many"}, {"pids": 0}):
        await refused(InvalidRequest, bench.run(_SHORT, **nonsense))
