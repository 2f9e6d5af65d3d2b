"""Promises of the wasm backend for programs, histories and accidents nobody thought of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import belljar
from belljar.backends.wasm import store as wasm_store
from belljar.backends.wasm.backend import Wasm
from belljar.core import errors
from belljar.core.plan import Plan
from belljar.engine.backends import Backends
from belljar.settings import load
from lanes import examples
from witness import Traces, descendants, eventually

pytestmark = pytest.mark.anyio
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def wasm() -> Iterator[Wasm]:
    options = load()
    store = wasm_store.CompiledStore.of(options.cache_dir)
    try:
        store.check()
    except errors.NotAvailable as error:
        pytest.skip(f"{error}: run `belljar setup wasm`, as `make test` does")
    backend = Wasm(Backends(options).native(), store)
    yield backend
    backend.close()


async def value(session: belljar.Session, code: str) -> str:
    """What an expression is in a session, as text."""
    turn = await session.run(code)
    assert turn.ok, (turn.status, turn.stderr)
    return str(turn.results[0]["text/plain"])


# --- (a) a program in deterministic mode ---

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
values = st.one_of(st.integers(-(10**6), 10**6), texts, st.floats(allow_nan=False), st.binary(max_size=4))
STATEMENTS = (
    st.builds("print(random.random(), random.sample(range(100), {}))".format, st.integers(1, 9)),
    st.builds("print(os.urandom({}).hex())".format, st.integers(0, 300)),
    st.builds("print(uuid.uuid4(), secrets.token_hex({}))".format, st.integers(1, 9)),
    st.just("print(time.time_ns(), time.monotonic_ns(), time.perf_counter_ns(), time.process_time_ns())"),
    st.builds("time.sleep({}); print(datetime.datetime.now())".format, st.integers(0, 90)),
    st.builds("print({!r})".format, st.dictionaries(texts, values, max_size=5)),
    st.builds("print(set({!r}), hash({!r}))".format, st.lists(values, max_size=6), texts),
    st.builds("print(object(), {{object() for _ in range({})}})".format, st.integers(1, 5)),
    st.builds("open('{}', 'w').write({!r})".format, st.sampled_from(NAMES), texts.map(ascii)),
    st.builds("os.makedirs('{}/{}', exist_ok=True)".format, st.sampled_from("de"), st.sampled_from(NAMES)),
    st.builds("os.path.exists('{0}') and os.remove('{0}')".format, st.sampled_from(NAMES)),
    st.just("print(os.listdir('.'), [(e.name, e.inode(), e.stat()) for e in os.scandir('.')])"),
    st.just("print(tempfile.mkdtemp(), os.listdir('/tmp'), os.stat('/tmp'))"),
    st.builds("print({!r}, file=sys.stderr)".format, texts.map(ascii)),
    st.builds("[n ** 2 for n in range({})]".format, st.integers(0, 1000)),
    st.builds("{!r} / {!r}".format, values, st.integers(0, 3)),
)
IMPORTS = "import datetime, os, random, secrets, sys, tempfile, time, uuid\n"
programs = st.lists(st.one_of(STATEMENTS), min_size=1, max_size=8).map(lambda lines: IMPORTS + "\n".join(lines))


def _seen(result: belljar.Result) -> tuple[object, ...]:
    return result.status, result.exit_code, result.stdout, result.stderr, result.fuel_consumed


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs, seed=st.integers(0, 2**64), start=st.integers(0, 2**32))
def test_a_program_run_twice_in_deterministic_mode_is_equal(wasm: Wasm, program: str, seed: int, start: int) -> None:
    world = {"seed": seed, "start": start}
    first, second = (belljar.run(program, backend=wasm, deterministic=world) for _ in range(2))
    note(first.stdout)
    assert first.status in ("success", "error")
    assert _seen(first) == _seen(second)


@settings(max_examples=examples(10), deadline=None)
@given(seeds=st.lists(st.integers(), min_size=2, max_size=2, unique=True))
def test_another_seed_gives_other_numbers(wasm: Wasm, seeds: list[int]) -> None:
    code = "import os, random; print(random.random(), os.urandom(8))"
    one, other = (belljar.run(code, backend=wasm, deterministic={"seed": seed}).stdout.split() for seed in seeds)
    assert one[0] != other[0] and one[1:] != other[1:]


async def test_a_run_that_is_out_of_fuel_says_so_and_a_run_burns_the_same_each_time(wasm: Wasm) -> None:
    starved = await belljar.arun("while True: pass", backend=wasm, fuel=50_000_000, timeout=20)
    assert (starved.status, starved.error and starved.error.error_type) == ("fuel_exhausted", "FUEL_EXHAUSTED")
    code = "print(sum(n * n for n in range(1000)))"
    runs = [await belljar.arun(code, backend=wasm, deterministic=True) for _ in range(3)]
    assert len({run.fuel_consumed for run in runs}) == 1
    enough = runs[0].fuel_consumed
    assert enough is not None and enough > 10_000
    assert (await belljar.arun(code, backend=wasm, deterministic=True, fuel=enough + 1)).ok
    assert (await belljar.arun(code, backend=wasm, deterministic=True, fuel=enough // 2)).status == "fuel_exhausted"
    assert (await belljar.arun(code, backend=wasm, fuel=1)).status == "fuel_exhausted"


async def test_deterministic_mode_is_the_same_in_every_worker(wasm: Wasm) -> None:
    code = "import os, random, time\nprint(os.urandom(4).hex(), random.random(), time.time(), os.stat('.').st_ino)"
    seen = []
    for _ in range(2):
        seen.append(await belljar.arun(code, backend=wasm, deterministic=True))
        wasm.close()  # the next one starts a worker of its own
    assert seen[0].ok, seen[0].stderr
    assert len({(run.stdout, run.fuel_consumed) for run in seen}) == 1
    other = await belljar.arun(code, backend=wasm, deterministic={"seed": 1})
    assert other.stdout != seen[0].stdout
    assert (await belljar.arun(code, backend=wasm)).stdout != seen[0].stdout


async def test_a_deterministic_sandbox_or_session_keeps_its_word_or_is_refused(wasm: Wasm) -> None:
    draws = []
    for kind in (belljar.Sandbox, belljar.Session):
        drawn = set()
        for _ in range(2):
            try:
                async with kind(backend=wasm, deterministic=True) as box:
                    drawn.add((await box.run("import random; print(random.random())")).stdout)
            except (errors.InvalidRequest, errors.PolicyDenied):
                drawn.add("refused")
        draws.append(len(drawn))
    assert draws == [1, 1], "randomness came in, and nobody said so"


# --- (b) branches ---

LOOK = (
    "print({n: globals()[n] for n in ('a', 'b', 'c') if n in globals()},"
    " {n: open(n).read() for n in sorted(__import__('os').listdir('.'))})"
)
World = tuple[dict[str, int], dict[str, str]]
steps = st.one_of(
    st.tuples(st.just("assign"), st.sampled_from(NAMES), st.integers(0, 99)),
    st.tuples(st.just("write"), st.sampled_from(NAMES), st.integers(0, 99)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("fork"), st.just(""), st.just(0)),
    st.tuples(st.just("checkpoint"), st.just(""), st.just(0)),
    st.tuples(st.just("rollback"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("fork old"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("crash"), st.just(""), st.integers(0, 9)),
)
MOST_BRANCHES = 4


class Tree:
    """Branches of one session, each with a model of what it must see."""

    def __init__(self, wasm: Wasm, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.branches: list[tuple[Any, World]] = [(stack.enter_context(belljar.Session(backend=wasm)), ({}, {}))]
        self._copies: list[tuple[Any, World]] = []
        self._keep(0)

    def _keep(self, at: int) -> None:
        session, world = self.branches[at]
        self._copies.append((session.checkpoint(), _copied(world)))

    def _grow(self, fork: Any, world: World) -> None:
        if len(self.branches) < MOST_BRANCHES:
            self.branches.append((self._stack.enter_context(fork), _copied(world)))

    def step(self, at: int, what: str, name: str, number: int) -> None:
        at %= len(self.branches)
        session, (memory, files) = self.branches[at]
        copy, then = self._copies[number % len(self._copies)]
        match what:
            case "assign":
                memory[name] = number
                assert session.run(f"{name} = {number}").ok
            case "write":
                files[name] = str(number)
                assert session.run(f"_ = open({name!r}, 'w').write('{number}')").ok
            case "remove":
                assert session.run(f"import os; os.remove({name!r})").ok == (files.pop(name, None) is not None)
            case "fork":
                self._grow(session.fork(), (memory, files))
            case "fork old":
                self._grow(session.fork(copy), then)
            case "checkpoint":
                self._keep(at)
            case "rollback" | "crash":
                if what == "crash":
                    assert session.run("a = b = c = -1\nwhile True: pass", timeout=0.05).status == "timeout"
                session.rollback(copy)
                self.branches[at] = (session, _copied(then))


def _copied(world: World) -> World:
    return dict(world[0]), dict(world[1])


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(st.tuples(st.integers(0, MOST_BRANCHES - 1), steps), max_size=12))
def test_every_branch_sees_its_own_history_and_no_other(
    wasm: Wasm, history: list[tuple[int, tuple[str, str, int]]]
) -> None:
    with contextlib.ExitStack() as stack:
        tree = Tree(wasm, stack)
        for at, (what, name, number) in history:
            tree.step(at, what, name, number)
            for session, (memory, files) in tree.branches:
                seen = session.run(LOOK)
                expected = {n: memory[n] for n in NAMES if n in memory}, {n: files[n] for n in sorted(files)}
                assert seen.stdout == f"{expected[0]} {expected[1]}\n", seen.stderr


async def test_a_hundred_branches_of_one_checkpoint(wasm: Wasm) -> None:
    right = []
    async with belljar.Session(backend=wasm) as session:
        await session.run("import numpy as np; x = np.arange(10)")
        trunk = await session.checkpoint()

        async def grow(number: int) -> None:
            async with session.fork(trunk) as branch:
                right.append(await value(branch, f"x[0] = {number}; int(x.sum())") == str(45 + number))

        for number in range(92):
            await grow(number)
        async with anyio.create_task_group() as tasks:
            for number in range(92, 100):
                tasks.start_soon(grow, number)
        assert await value(session, "int(x.sum())") == "45"
    assert right == [True] * 100


async def test_a_session_that_wrote_all_its_memory_is_copied_whole(wasm: Wasm) -> None:
    async with belljar.Session(backend=wasm, memory="160M") as session:
        await session.run("x = bytearray(range(256)) * (100 << 12); import zlib")
        total = await value(session, "zlib.crc32(x)")
        async with session.fork() as branch:
            await branch.run("x[5000] = 7")
            changed = await value(branch, "zlib.crc32(x)")
            async with branch.fork() as twig:
                assert await value(twig, "zlib.crc32(x)") == changed != total
                await twig.run("x[:] = bytes(len(x))")
            assert await value(branch, "zlib.crc32(x)") == changed
        assert await value(session, "zlib.crc32(x)") == total


async def test_an_idle_worker_does_not_keep_the_memory_of_the_session_it_served(wasm: Wasm) -> None:
    async with belljar.Session(backend=wasm) as session:
        assert (await session.run("x = bytearray(b'1') * (100 << 20); secret = 'tell' + 'nobody'")).ok
    async with wasm.open(Plan(keep_files=True)) as box:
        with pytest.raises(errors.ExecutionFailed):  # a box that has no session has nothing to copy
            await box.snapshot()


# --- accidents ---


async def test_a_fork_cancelled_halfway_leaves_nothing_and_the_parent_as_it_was(wasm: Wasm, traces: Traces) -> None:
    async with belljar.Session(backend=wasm) as session:
        await session.run("x = bytearray(b'1') * (50 << 20)")
        for milliseconds in (0, 5, 20, 60):
            with anyio.move_on_after(milliseconds / 1000):
                async with session.fork() as branch:
                    await branch.run("x = None")
                    await anyio.sleep(10)
        assert await value(session, "len(x)") == str(50 << 20)
    wasm.close()
    assert eventually(lambda: not traces.all()), traces.all()


async def test_a_worker_killed_during_a_copy_costs_the_session_and_not_the_checkpoint(wasm: Wasm) -> None:
    async with belljar.Session(backend=wasm) as session:
        await session.run("x = bytearray(b'1') * (50 << 20)")
        before = await session.checkpoint()
        worker = session._lease.box.worker  # type: ignore[attr-defined]
        async with anyio.create_task_group() as tasks:

            async def strike() -> None:
                while not worker._busy:
                    await anyio.lowlevel.checkpoint()
                worker.kill()

            tasks.start_soon(strike)
            with pytest.raises(errors.ExecutionFailed):
                await session.checkpoint()
        with anyio.fail_after(10):
            assert not await _lives(session)
            await session.rollback(before)
            assert await value(session, "len(x)") == str(50 << 20)


async def _lives(session: belljar.Session) -> bool:
    try:
        return (await session.run("1")).ok
    except errors.BelljarError:
        return False


HOST = """
import sys
import belljar
from belljar.backends.wasm.backend import Wasm
from belljar.backends.wasm.store import CompiledStore
from belljar.core.capabilities import Capabilities
from belljar.engine.backends import Backends
from belljar.engine.engine import Engine

async def probe():
    return Capabilities(backend="native", available=False, why_not="no jail")

engine = Engine()
native = Backends(engine.settings).native()
native.probe = probe
backend = Wasm(native, CompiledStore.of(engine.settings.cache_dir))
code = "print('in', flush=True)\\nwhile True: pass" if sys.argv[1] == "busy" else "print('in')"
tell = lambda text: print(text, end="", flush=True)
belljar.run(code, backend=backend, timeout=300, on_stdout=tell)
sys.stdin.read()
"""


@pytest.mark.parametrize("worker", ["idle", "busy"])
def test_a_plain_worker_ends_by_itself_when_its_host_is_killed(wasm: Wasm, open_folder: Path, worker: str) -> None:
    env = {**os.environ, "TMPDIR": str(open_folder), "BELLJAR_STATE_DIR": str(open_folder / "state")}
    line = [sys.executable, "-c", HOST, worker]
    host = subprocess.Popen(line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    workers: set[int] = set()
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"in\n"
        workers = descendants(host.pid)
        assert workers
        host.send_signal(signal.SIGKILL)
        host.wait(10)
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 5), "they live on"
        assert eventually(lambda: os.listdir(open_folder) in ([], ["state"]), 2), os.listdir(open_folder)
    finally:
        host.kill()
        host.communicate()
        for pid in workers:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


SAVER = """
import sys, belljar
with belljar.Session(backend="wasm") as session:
    session.run("x = bytearray(range(256)) * 40_000")
    print("in", flush=True)
    while True:
        session.save(sys.argv[1])
"""


def test_a_save_that_is_killed_leaves_the_last_whole_file_and_no_other(wasm: Wasm, open_folder: Path) -> None:
    folder = open_folder / "saves"
    folder.mkdir()
    env = {**os.environ, "BELLJAR_STATE_DIR": str(open_folder / "state")}
    line = [sys.executable, "-c", SAVER, str(folder / "session")]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE) as saver:
        assert saver.stdout is not None
        assert saver.stdout.readline() == b"in\n"
        assert eventually(lambda: os.listdir(folder) == ["session"])
        saver.send_signal(signal.SIGKILL)
    assert os.listdir(folder) == ["session"]
    with belljar.Session.load(folder / "session") as session:
        assert session.run("print(len(x))").stdout == "10240000\n"
