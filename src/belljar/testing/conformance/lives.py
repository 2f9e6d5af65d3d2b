"""Lives of runs: cancelled, many at once, one after the other. None leaves anything to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from belljar.backends.fake import FakeProcess
from belljar.control.callbacks import Cancel
from belljar.core.result import Event, Result
from belljar.sandbox import AsyncSandbox, astream
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, says
from belljar.testing.conformance.sandboxes import BEAT_ON, expect_silence

T = TypeVar("T")

# --- cancel ---


async def _play_wait(p: FakeProcess) -> None:
    await p.out("waiting\n")
    await p.sleep(60)


# One write: `print` without a buffer makes two, and the run may be aborted between them.
_WAIT = guest("import os, time\nos.write(1, b'waiting\\n')\ntime.sleep(60)", _play_wait)
_AFTER = guest("print('after')", says("after\n"))
_KEPT = guest("print(open('kept.txt').read())", lambda p: p.out(p.read("kept.txt").decode() + "\n"))


@check("cancel", "a cancelled run is aborted at once, with its partial output")
async def _cancelled(bench: Bench) -> None:
    cancel = Cancel()
    result = await bench.run(_WAIT, cancel=cancel, timeout=40, on_stdout=lambda text: cancel.cancel())
    equal((result.status, result.stdout), ("aborted", "waiting\n"), "(status, stdout)")
    expect(result.duration_ms < 20_000, f"it took {result.duration_ms:.0f} ms")


@check("cancel", "a run cancelled before it began is aborted and prints nothing more")
async def _beforehand(bench: Bench) -> None:
    cancel = Cancel()
    cancel.cancel()
    began = time.monotonic()
    result = await bench.run(_WAIT, cancel=cancel, timeout=40)
    equal(result.status, "aborted", "status")
    expect(time.monotonic() - began < 20, "the guest was waited for")


@check("cancel", "a run can be cancelled from another thread")
async def _from_a_thread(bench: Bench) -> None:
    cancel = Cancel()
    thread = threading.Timer(0.3, cancel.cancel)  # late enough for the loop to be asleep: the thread must wake it
    result = await bench.run(_WAIT, cancel=cancel, timeout=12, on_stdout=lambda text: thread.start())
    equal((result.status, result.stdout), ("aborted", "waiting\n"), "(status, stdout)")
    expect(result.duration_ms < 10_000, f"it went on for {result.duration_ms:.0f} ms")


@check("cancel", "a cancelled stream ends with finished and status aborted")
async def _stream(bench: Bench) -> None:
    kinds = []
    async with astream(_WAIT, backend=bench.backend, engine=bench.engine, timeout=40) as run:
        async for event in run:
            kinds.append(event.kind)
            if event.kind == "stdout":
                run.cancel()
    equal(kinds[-1:], ["finished"], "the last event")
    equal(run.result.status if run.result else None, "aborted", "status")


@check("cancel", "leaving a stream early ends the guest")
async def _left(bench: Bench) -> None:
    began = time.monotonic()
    async with astream(_WAIT, backend=bench.backend, engine=bench.engine, timeout=60) as run:
        async for event in run:
            if event.kind == "stdout":
                break
    expect(time.monotonic() - began < 30, "the guest was waited for")
    equal(run.result, None, "the result of a run that was left")


async def _play_go_on(p: FakeProcess) -> None:
    p.write("beat", b"x")
    await p.out("going on\n")
    await p.sleep(60)


_GO_ON = guest(
    "import os, time\n"
    "for i in range(1200):\n"
    "    with open('beat', 'a') as file:\n"
    "        file.write('x')\n"
    "    if i == 0:\n"
    "        os.write(1, b'going on\\n')\n"
    "    time.sleep(0.05)",
    _play_go_on,
)


async def _heard_until_cancelled(box: AsyncSandbox, code: str) -> str:
    """What a run says whose scope is cancelled as soon as it says anything."""
    heard: list[str] = []
    with anyio.CancelScope() as scope:

        def hear(event: Event) -> None:
            if event.kind == "stdout":
                heard.append(event.text)
                scope.cancel()

        await box.run(code, on_event=hear, timeout=40)
    expect(scope.cancelled_caught, "the run was not cancelled")
    return "".join(heard)


@check("cancel", "a cancelled scope ends the run, and the sandbox lives on with its files")
async def _scope(bench: Bench) -> None:
    began = time.monotonic()
    async with bench.sandbox() as box:
        await box.write("kept.txt", "kept")
        equal(await _heard_until_cancelled(box, _GO_ON), "going on\n", "stdout")
        expect(time.monotonic() - began < 30, "the guest was waited for")
        before = len(await box.read("beat"))
        await anyio.sleep(0.5)
        equal(len(await box.read("beat")) - before, 0, "what the guest wrote after the cancel")
        printed(await box.run(_KEPT), "kept\n")
    printed(await bench.run(_AFTER), "after\n")


async def _play_murmur(p: FakeProcess) -> None:
    for _ in range(100):
        await p.out("of the first\n")
        await p.sleep(0.05)


_MURMUR = guest(
    "import os, time\nfor _ in range(100):\n    os.write(1, b'of the first\\n')\n    time.sleep(0.05)", _play_murmur
)


@check("cancel", "the run after a cancelled one hears nothing of it, and does not wait for it", alone=True)
async def _unheard(bench: Bench) -> None:
    """For a backend that keeps interpreters warm: one that is still busy must not serve the next caller."""
    with anyio.CancelScope() as scope:
        await bench.run(_MURMUR, timeout=40, on_stdout=lambda text: scope.cancel())
    expect(scope.cancelled_caught, "the run was not cancelled")
    result, events = await bench.watch(_AFTER)
    printed(result, "after\n")
    equal("".join(event.text for event in events if event.kind == "stdout"), "after\n", "the stdout events")
    expect(result.duration_ms < 4000, f"it took {result.duration_ms:.0f} ms")


@check("cancel", "a cancelled scope ends the run's children too", "processes")
async def _scope_of_children(bench: Bench) -> None:
    async with bench.sandbox() as box:
        said = await _heard_until_cancelled(box, BEAT_ON)
        await expect_silence(box, Result(status="aborted", stdout=said))


# --- many at once ---


async def _together(count: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    answers: dict[int, T] = {}

    async def one(i: int) -> None:
        answers[i] = await work(i)

    async with anyio.create_task_group() as tasks:
        for i in range(count):
            tasks.start_soon(one, i)
    return [answers[i] for i in range(count)]


async def _play_token(p: FakeProcess) -> int:
    for _ in range(20):
        await p.out(p.env["TOKEN"] + "\n")
        await p.sleep(0.01)
    await p.out(p.read("same.txt"))
    return int(p.env.get("CODE", "0"))


_TOKEN = guest(
    "import os, sys, time\n"
    "for _ in range(20):\n"
    "    print(os.environ['TOKEN'])\n"
    "    time.sleep(0.01)\n"
    "print(open('same.txt').read(), end='')\n"
    "sys.exit(int(os.environ.get('CODE', '0')))",
    _play_token,
)


def _ran_as(i: int, result: Result, code: int = 0) -> None:
    equal(result.stdout, f"token-{i}\n" * 20 + f"file of {i}", f"stdout of run {i}")
    equal(result.exit_code, code, f"exit code of run {i}")


def _options(i: int, **env: str) -> dict[str, Any]:
    return {"env": {"TOKEN": f"token-{i}", **env}, "files": {"same.txt": f"file of {i}"}, "timeout": 60}


@check("concurrency", "eight runs at once mix neither output nor files of the same name", alone=True)
async def _eight(bench: Bench) -> None:
    for i, result in enumerate(await _together(8, lambda i: bench.run(_TOKEN, **_options(i)))):
        _ran_as(i, result)


@check("concurrency", "a run that fails does not disturb those beside it", alone=True)
async def _one_fails(bench: Bench) -> None:
    results = await _together(4, lambda i: bench.run(_TOKEN, **_options(i, CODE="7" if i == 2 else "0")))
    for i, result in enumerate(results):
        _ran_as(i, result, code=7 if i == 2 else 0)
    equal([str(result.status) for result in results], ["success", "success", "error", "success"], "the statuses")


@check("concurrency", "one run cancelled does not disturb those beside it", alone=True)
async def _one_cancelled(bench: Bench) -> None:
    cancel = Cancel()

    async def work(i: int) -> Result:
        if i:
            return await bench.run(_TOKEN, **_options(i))
        return await bench.run(_WAIT, timeout=40, cancel=cancel, on_stdout=lambda text: cancel.cancel())

    cancelled, *others = await _together(4, work)
    equal(cancelled.status, "aborted", "status of the cancelled run")
    for i, result in enumerate(others, 1):
        _ran_as(i, result)


@check("concurrency", "runs over max_containers wait for their turn, and all finish", alone=True)
async def _queue(bench: Bench) -> None:
    engine = bench.engine_with(max_containers=10)
    running, most = 0, 0

    def hear(event: Event) -> None:
        nonlocal running, most
        running += {"started": 1, "finished": -1}.get(event.kind, 0)
        most = max(most, running)

    results = await _together(12, lambda i: bench.run(_TOKEN, engine=engine, on_event=hear, **_options(i)))
    for i, result in enumerate(results):
        _ran_as(i, result)
    expect(0 < most <= 10, f"{most} sandboxes ran at once under max_containers=10")


# --- one after the other ---


def _play_mark(p: FakeProcess) -> Any:
    left = []
    for path in ("/workspace/mark", "/tmp/mark"):
        try:
            p.read(path)
            left.append(path)
        except FileNotFoundError:
            p.write(path, b"left")
    return p.out(f"{left}\n")


_MARK = guest(
    "import os\n"
    "left = [path for path in ('/workspace/mark', '/tmp/mark', '/dev/shm/mark') if os.path.exists(path)]\n"
    "for path in ('/workspace/mark', '/tmp/mark', '/dev/shm/mark'):\n"
    "    if os.path.isdir(os.path.dirname(path)):\n"
    "        open(path, 'w').write('left')\n"
    "print(left)",
    _play_mark,
)


@check("state", "nothing is left in /workspace, /tmp or /dev/shm from one run to the next")
async def _fresh(bench: Bench) -> None:
    for _ in range(3):
        printed(await bench.run(_MARK), "[]\n")


@check("state", "nothing is left from one sandbox to the next")
async def _fresh_sandbox(bench: Bench) -> None:
    for _ in range(2):
        async with bench.sandbox() as box:
            printed(await box.run(_MARK), "[]\n")


@check("state", "every sandbox has an id of its own, and its runs tell it")
async def _ids(bench: Bench) -> None:
    results = [await bench.run(_AFTER) for _ in range(3)]
    expect(all(result.container_id for result in results), "a result has no container_id")
    equal(len({result.container_id for result in results}), 3, "the number of different ids")
