"""When it is whose turn: how many at once, who waits, who is refused, and that every place comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from belljar.core import errors
from belljar.core.settings import ServiceSettings, Settings
from belljar.core.values import GIB, MIB
from belljar.protocol.records import Caller
from belljar.service.admission import queue as module
from belljar.service.admission.memory import free_memory
from belljar.service.admission.queue import Admission
from belljar.service.admission.rates import Rate, Rates

pytestmark = pytest.mark.anyio


def admission(most: int = 2, *, memory: Callable[[], int | None] = lambda: None, **service: Any) -> Admission:
    service = {"rate": "1000000/second", "cpu_overcommit": 1e6} | service
    return Admission(Settings(max_containers=most, service=ServiceSettings(**service)), memory=memory)


def caller(name: str = "ada", **quotas: Any) -> Caller:
    return Caller(name=name, **quotas)


class Runs:
    """Runs that go on until they are told to end, and what became of them."""

    def __init__(self, admission: Admission, group: anyio.abc.TaskGroup) -> None:
        self.admission, self.group = admission, group
        self.started: list[str] = []
        self.refused: dict[str, errors.Busy] = {}
        self.positions: dict[str, list[int]] = {}
        self._ends: dict[str, anyio.Event] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}

    async def ask(self, id: str, who: Caller | None = None, cpus: float = 1, memory: int = MIB) -> None:
        """The name of a run begins with its caller's, if nobody else is named."""
        self._ends[id], self._scopes[id], self.positions[id] = anyio.Event(), anyio.CancelScope(), []
        self.group.start_soon(self._run, id, who or caller(id[0]), cpus, memory)
        await settle()

    async def _run(self, id: str, who: Caller, cpus: float, memory: int) -> None:
        with self._scopes[id]:
            try:
                place = self.admission.place(who, cpus=cpus, memory=memory, on_position=self.positions[id].append)
                async with place:
                    self.started.append(id)
                    await self._ends[id].wait()
            except errors.Busy as busy:
                self.refused[id] = busy

    async def end(self, *ids: str) -> None:
        for id in ids:
            self._ends[id].set()
            await settle()

    def places(self) -> dict[str, int]:
        """Of those that wait: what they were told last."""
        gone = {*self.started, *self.refused, *(id for id, scope in self._scopes.items() if scope.cancel_called)}
        return {id: told[-1] for id, told in self.positions.items() if id not in gone}

    async def cancel(self, id: str) -> None:
        self._scopes[id].cancel()
        await settle()

    async def all_end(self) -> None:
        for _ in range(len(self._ends)):
            await self.end(*self.started)
        assert (self.admission.running, self.admission.waiting) == (0, 0)


async def settle() -> None:
    for _ in range(12):
        await checkpoint()


async def test_no_more_than_the_most_run_and_the_others_follow_in_their_order() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(2), group)
        for id in ("a1", "a2", "a3", "a4"):
            await runs.ask(id)
        assert (runs.started, runs.admission.running, runs.admission.waiting) == (["a1", "a2"], 2, 2)
        assert runs.places() == {"a3": 1, "a4": 2}
        await runs.end("a2")
        assert runs.started == ["a1", "a2", "a3"]
        assert runs.positions == {"a1": [], "a2": [], "a3": [1], "a4": [2, 1]}
        await runs.all_end()
        assert runs.started == ["a1", "a2", "a3", "a4"]


async def test_callers_take_turns_so_a_hundred_of_one_are_one_step_for_another() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1), group)
        for number in range(6):
            await runs.ask(f"a{number}")
        await runs.ask("b0")
        await runs.ask("c0")
        await runs.ask("b1")
        assert sorted(runs.places(), key=runs.places().__getitem__)[:5] == ["a1", "b0", "c0", "a2", "b1"]
        await runs.all_end()
        assert runs.started == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]


async def test_in_a_long_queue_everybody_is_told_at_once_and_exactly_before_long() -> None:
    many = 3 * module.FEW
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1, queue=many), group)
        for number in range(many + 1):
            await runs.ask(f"a{number}")
            assert number == 0 or 1 <= runs.positions[f"a{number}"][0] <= number
        await runs.end("a0", "a1")
        exact = {f"a{number}": number - 2 for number in range(3, many + 1)}
        with anyio.fail_after(10):
            while runs.places() != exact:
                await anyio.sleep(module.LOOK)
        await runs.all_end()


async def test_who_has_all_its_places_waits_and_holds_up_nobody() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(3, concurrency=2), group)
        for id in ("a1", "a2", "a3", "b1"):
            await runs.ask(id)
        assert runs.started == ["a1", "a2", "b1"]
        await runs.end("b1")
        assert runs.started == ["a1", "a2", "b1"]
        await runs.end("a1")
        assert runs.started[-1] == "a3"
        await runs.all_end()


async def test_a_callers_own_concurrency_counts_more_than_the_setting() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(5, concurrency=1, queue=0), group)
        wide = caller("wide", concurrency=3)
        for number in range(4):
            await runs.ask(f"w{number}", wide)
        assert len(runs.started) == 3
        assert runs.refused["w3"].http_status == 429
        assert "3 runs of yours" in runs.refused["w3"].message
        await runs.all_end()


async def test_a_full_queue_refuses_with_503_and_says_when_to_come_back() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1, queue=1), group)
        for id in ("a1", "a2", "a3"):
            await runs.ask(id)
        assert (runs.refused["a3"].http_status, runs.refused["a3"].retry_after >= 1) == (503, True)
        assert runs.admission.waiting == 1
        await runs.all_end()


async def test_one_caller_who_fills_the_queue_gives_way_to_another() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1, queue=3), group)
        for id in ("a1", "a2", "a3", "a4", "b1"):
            await runs.ask(id)
        assert list(runs.refused) == ["a4"]
        assert runs.refused["a4"].http_status == 429
        await runs.ask("b2")  # as much as the other has, from here on
        assert runs.refused["b2"].http_status == 503
        await runs.all_end()
        assert runs.started == ["a1", "a2", "b1", "a3"]


async def test_more_than_the_rate_is_refused_with_the_seconds_to_wait_and_only_for_that_caller() -> None:
    gate = admission(5, rate="2/minute")

    async def once(who: Caller) -> None:
        async with gate.place(who, cpus=1, memory=1):
            pass

    await once(caller("ada"))
    await once(caller("ada"))
    with pytest.raises(errors.Busy) as caught:
        await once(caller("ada"))
    assert caught.value.http_status == 429
    assert 1 <= caught.value.retry_after <= 61
    await once(caller("bob"))
    with pytest.raises(errors.Busy):
        await once(caller("nobody", rate="0/day"))
    for _ in range(5):
        await once(caller("eve", rate="5 per hour"))


@pytest.mark.parametrize("amount", [1, 2, 7])
def test_who_asked_too_often_is_let_in_after_the_seconds_that_it_was_told_and_not_before(amount: int) -> None:
    now = [1234.5]
    rates, rate = Rates(lambda: now[0]), Rate.parse(f"{amount} per minute")
    for _ in range(amount):
        assert rates.hit("ada", rate) == 0
    for _ in range(3 * amount):
        wait = rates.hit("ada", rate)
        assert 0 < wait <= 120
        now[0] += wait - 0.01
        assert rates.hit("ada", rate) == pytest.approx(0.01)
        now[0] += 0.02
        assert rates.hit("ada", rate) == 0


@given(st.lists(st.floats(0, 30), max_size=200))
def test_no_minute_has_twice_as_many_requests_as_its_rate_allows(pauses: list[float]) -> None:
    now, taken, rate = [0.0], list[float](), Rate.parse("5/minute")
    rates = Rates(lambda: now[0])
    for pause in pauses:
        now[0] += pause
        if rates.hit("ada", rate) == 0:
            taken.append(now[0])
    for start in taken:
        assert sum(start <= at < start + 60 for at in taken) < 10


def test_callers_who_have_not_asked_for_long_are_forgotten() -> None:
    now = [0.0]
    rates, rate = Rates(lambda: now[0]), Rate.parse("5/second")
    for number in range(5000):
        now[0] += 0.01
        rates.hit(f"caller {number}", rate)
    assert len(rates._counted) <= 1000 + 1


async def test_cpus_are_given_out_only_as_often_as_the_setting_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpus", lambda: 2)
    async with anyio.create_task_group() as group:
        runs = Runs(admission(10, cpu_overcommit=2), group)
        await runs.ask("a1", cpus=3)
        await runs.ask("b1", cpus=2)  # too many together
        await runs.ask("c1", cpus=1)  # would fit, but nobody overtakes: else b1 might wait for ever
        assert runs.started == ["a1"]
        await runs.end("a1")
        assert runs.started == ["a1", "b1", "c1"]
        await runs.end("b1", "c1")
        await runs.ask("d1", cpus=100)
        assert runs.started[-1] == "d1", "alone, anything may run"
        await runs.all_end()


async def test_memory_that_is_not_there_is_waited_for_and_looked_at_again_without_anybody_leaving() -> None:
    left = 300 * MIB
    async with anyio.create_task_group() as group:
        runs = Runs(admission(10, memory=lambda: left, memory_headroom=100 * MIB), group)
        await runs.ask("a1", memory=GIB)  # alone
        await runs.ask("a2", memory=150 * MIB)
        assert (runs.started, runs.admission.waiting) == (["a1"], 1)
        left = 10 * GIB
        with anyio.fail_after(5):
            while "a2" not in runs.started:
                await anyio.sleep(0.01)
        await runs.all_end()


async def test_what_started_a_moment_ago_counts_with_all_it_may_use() -> None:
    now = 1000.0
    limits = Settings(max_containers=10, service=ServiceSettings(memory_headroom=0, cpu_overcommit=1e6))
    gate = Admission(limits, memory=lambda: GIB, clock=lambda: now)
    async with anyio.create_task_group() as group:
        runs = Runs(gate, group)
        for id in ("a1", "a2", "a3"):
            await runs.ask(id, memory=400 * MIB)
        assert runs.started == ["a1", "a2"]
        now += module.YOUNG
        await runs.ask("a4", memory=400 * MIB)  # whoever comes makes it look again; the older ones show what they use
        assert sorted(runs.started) == ["a1", "a2", "a3", "a4"]
        await runs.all_end()


async def test_a_session_is_refused_where_its_memory_is_not_there_and_counts_at_once_where_it_is() -> None:
    now = 1000.0
    limits = Settings(max_containers=10, service=ServiceSettings(memory_headroom=0, cpu_overcommit=1e6))
    gate = Admission(limits, memory=lambda: GIB, clock=lambda: now)
    gate.keep(2 * GIB)  # alone, any
    gate.held = 1
    with pytest.raises(errors.Busy, match="no memory left"):
        gate.keep(400 * MIB)
    now += module.YOUNG
    gate.keep(400 * MIB)
    gate.keep(400 * MIB)
    with pytest.raises(errors.Busy) as busy:
        gate.keep(400 * MIB)
    assert busy.value.http_status == 503
    async with anyio.create_task_group() as group:
        runs = Runs(gate, group)
        await runs.ask("a1")
        await runs.ask("a2", memory=400 * MIB)
        assert runs.started == ["a1"]
        await runs.cancel("a2")
        await runs.all_end()


async def test_who_is_cancelled_while_waiting_leaves_the_queue_and_those_behind_move_up() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1), group)
        for id in ("a1", "a2", "a3"):
            await runs.ask(id)
        await runs.cancel("a2")
        assert (runs.admission.waiting, runs.places()) == (1, {"a3": 1})
        await runs.cancel("a1")
        assert runs.started == ["a1", "a3"]
        await runs.all_end()


async def test_a_place_given_at_the_moment_of_a_cancellation_is_given_back() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1), group)
        for id in ("a1", "a2", "a3"):
            await runs.ask(id)
        runs._ends["a1"].set()  # goes on first, and gives its place to a2
        runs._scopes["a2"].cancel()  # which is told of that and of this at once
        await settle()
        assert runs.started == ["a1", "a3"]
        assert runs.admission.running == 1
        await runs.all_end()


async def test_draining_refuses_those_who_come_and_those_who_wait_and_lets_the_others_end() -> None:
    async with anyio.create_task_group() as group:
        runs = Runs(admission(1), group)
        await runs.ask("a1")
        await runs.ask("a2")
        runs.admission.drain()
        await settle()
        await runs.ask("a3")
        assert {id: busy.http_status for id, busy in runs.refused.items()} == {"a2": 503, "a3": 503}
        assert (runs.admission.running, runs.admission.waiting) == (1, 0)
        await runs.all_end()


async def test_a_run_that_fails_gives_its_place_back() -> None:
    gate = admission(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with gate.place(caller(), cpus=1, memory=1):
                raise ZeroDivisionError
    assert gate.running == 0


async def test_a_listener_that_fails_fails_its_own_run_and_no_other() -> None:
    gate = admission(1)

    def broken(position: int) -> None:
        raise LookupError

    async with gate.place(caller("a"), cpus=1, memory=1):
        with pytest.raises(LookupError):
            async with gate.place(caller("b"), cpus=1, memory=1, on_position=broken):
                raise AssertionError("it ran")
        assert (gate.running, gate.waiting) == (1, 0)


# --- whatever happens ----------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(1, 4)),
        st.tuples(st.sampled_from(("end", "cancel")), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@budget(max_examples=60, deadline=None)
@given(steps=STEPS, most=st.integers(1, 3), concurrency=st.integers(0, 2), queue=st.integers(0, 8))
def test_never_too_many_nobody_starves_and_every_place_comes_back(
    steps: list[tuple[str, Any, int]], most: int, concurrency: int, queue: int
) -> None:
    async def history() -> None:
        gate = admission(most, concurrency=concurrency, queue=queue)
        async with anyio.create_task_group() as group:
            runs, asked, gone = Runs(gate, group), [], set()
            for number, (what, which, cpus) in enumerate(steps):
                if what == "ask":
                    asked.append(f"{which}{number}")
                    await runs.ask(asked[-1], cpus=cpus)
                elif asked and (id := asked[which % len(asked)]) and (what == "cancel" or id in runs.started):
                    gone.add(id)
                    await (runs.cancel(id) if what == "cancel" else runs.end(id))
                _hold(gate, runs, gone, most, concurrency, queue)
            await runs.all_end()
            assert set(asked) == set(runs.started) | set(runs.refused) | gone
            assert not set(runs.started) & set(runs.refused)
            assert not gate._lines
            assert not gate._running

    anyio.run(history)


def _hold(gate: Admission, runs: Runs, gone: set[str], most: int, concurrency: int, queue: int) -> None:
    """What is true at any moment. Nobody waits for a place that they could have."""
    here = [id for id in runs.started if id not in gone]
    assert len(here) == gate.running <= most
    assert gate.waiting <= queue
    mine = {name: sum(id[0] == name for id in here) for name in "abc"}
    assert not concurrency or max(mine.values()) <= concurrency
    waiting = runs.places()
    assert sorted(waiting.values()) == list(range(1, gate.waiting + 1))
    if gate.running < most:
        assert all(concurrency and mine[id[0]] >= concurrency for id in waiting)


@budget(max_examples=30, deadline=None)
@given(crowd=st.integers(1, 6), callers=st.integers(1, 4), most=st.integers(1, 3))
def test_a_newcomer_waits_for_one_run_of_each_other_caller_at_most(crowd: int, callers: int, most: int) -> None:
    async def history() -> None:
        gate = admission(most, queue=1000)
        async with anyio.create_task_group() as group:
            runs = Runs(gate, group)
            for number in range(crowd + most):
                for name in "abcd"[:callers]:
                    await runs.ask(f"{name}{number}")
            before = len(runs.started)
            await runs.ask("z")
            while "z" not in runs.started:
                await runs.end(next(id for id in runs.started if not runs._ends[id].is_set()))
            assert runs.started.index("z") - before <= callers
            await runs.all_end()

    anyio.run(history)


# --- memory --------------------------------------------------------------------------------------


def kernel(folder: Path, version: int, available: int | None, group: str = "/app/web", **figures: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    if available is not None:
        (folder / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {available} kB\n")
    word = "0::" if version == 2 else "4:cpu,memory:"
    (folder / "proc/self/cgroup").write_text(f"7:pids:/elsewhere\n{word}{group}\n")
    base = folder / "groups" if version == 2 else folder / "groups/memory"
    base.mkdir(parents=True)
    if version == 2:
        (base / "cgroup.controllers").write_text("memory\n")
    for name, content in figures.items():
        *path, last = name.split("__")
        file = base.joinpath(*path, last.replace("_", ".", 1))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return folder


def left(folder: Path) -> int | None:
    return free_memory(folder / "proc", folder / "groups")


def test_memory_is_what_the_host_has_left_where_no_group_is_limited(tmp_path: Path) -> None:
    assert left(kernel(tmp_path, 2, 1000, app__web__memory_max="max", app__web__memory_current="5")) == 1000 * 1024


def test_the_tightest_group_above_us_counts_and_cache_is_not_usage(tmp_path: Path) -> None:
    figures = {
        "app__web__memory_max": "90000", "app__web__memory_current": "1000",
        "app__memory_max": "50000", "app__memory_current": "30000", "app__memory_stat": "anon 5\ninactive_file 7000",
    }  # fmt: skip
    assert left(kernel(tmp_path, 2, 1000, **figures)) == 27_000


def test_version_1_is_read_too_also_in_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    figures = {"memory_limit_in_bytes": "40000", "memory_usage_in_bytes": "10000"}
    assert left(kernel(tmp_path, 1, 1000, group="/docker/0123", **figures)) == 30_000


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert left(kernel(tmp_path, 2, 10, group="/", memory_max="5", memory_current="9")) == 0


def test_a_kernel_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert left(tmp_path) is None
    assert left(kernel(tmp_path, 2, None, group="/../../etc")) is None


async def test_a_caller_with_a_key_leaves_a_quarter_of_the_places_to_others() -> None:
    admission = Admission(Settings(max_containers=4), memory=lambda: None)
    flooder, neighbour = (Caller(name=name, key=name, scopes=frozenset(("run",))) for name in ("flooder", "neighbour"))
    async with AsyncExitStack() as stack:
        for _ in range(3):
            with anyio.fail_after(5):
                await stack.enter_async_context(admission.place(flooder, cpus=0.1, memory=0))
        with anyio.move_on_after(0.2) as late:
            await stack.enter_async_context(admission.place(flooder, cpus=0.1, memory=0))
        assert late.cancelled_caught, "it has all places"
        with anyio.fail_after(5):
            await stack.enter_async_context(admission.place(neighbour, cpus=0.1, memory=0))
