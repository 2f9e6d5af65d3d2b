"""Places for sandboxes: the rest wait in line, but not for living sandboxes alone."""

from __future__ import annotations

import threading

import anyio
import pytest

import belljar
import belljar.engine.capacity as capacity_module
from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.engine.capacity import Capacity
from belljar.engine.engine import Engine
from belljar.settings import load

pytestmark = pytest.mark.anyio


async def test_who_finds_no_place_gets_the_next_one() -> None:
    capacity, order = Capacity(1), list[str]()

    async def wait(name: str) -> None:
        async with capacity.place():
            order.append(name)

    async with anyio.create_task_group() as tasks, capacity.place():
        tasks.start_soon(wait, "first")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(wait, "second")
        await anyio.wait_all_tasks_blocked()
        assert capacity.full and order == []
    assert order == ["first", "second"] and not capacity.full


async def test_where_living_sandboxes_have_all_places_nobody_waits() -> None:
    capacity = Capacity(2)
    async with capacity.place(living=True):
        async with capacity.place(living=True):
            for living in (True, False):
                with pytest.raises(errors.Busy, match="2 living sandboxes are open"):
                    async with capacity.place(living=living):
                        pass
        async with capacity.place():
            pass


async def test_who_waits_is_refused_when_the_last_place_goes_to_a_living_sandbox() -> None:
    capacity, refused = Capacity(1), anyio.Event()
    close = anyio.Event()

    async def live() -> None:
        async with capacity.place(living=True):
            await close.wait()

    async def wait() -> None:
        try:
            async with capacity.place():
                pass
        except errors.Busy:
            refused.set()

    async with anyio.create_task_group() as tasks:
        async with capacity.place():
            tasks.start_soon(live)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert not refused.is_set()
        with anyio.fail_after(5):
            await refused.wait()
        close.set()
    assert not capacity.full


async def test_who_gives_up_takes_no_place() -> None:
    capacity = Capacity(1)
    async with capacity.place():
        with anyio.move_on_after(0.01):
            async with capacity.place():
                pass
    async with capacity.place():
        assert capacity.full
    assert not capacity.full


async def test_who_holds_all_places_and_asks_for_one_more_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "_PATIENCE_SECONDS", 0.05)
    capacity = Capacity(2)
    async with capacity.place(), capacity.place():
        for _ in range(2):
            with anyio.fail_after(5), pytest.raises(errors.Busy, match="held open by who waits for one more"):
                async with capacity.place():
                    pass
    async with capacity.place(), capacity.place():
        assert capacity.full
    assert not capacity.full


async def test_two_that_wait_for_each_other_are_told_and_who_waits_for_others_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity_module, "_PATIENCE_SECONDS", 0.05)
    capacity, told = Capacity(2), list[str]()

    async def greedy(name: str) -> None:
        try:
            async with capacity.place():
                await anyio.wait_all_tasks_blocked()
                async with capacity.place():
                    told.append(name)
        except errors.Busy:
            told.append(f"{name} refused")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(greedy, "one")
            tasks.start_soon(greedy, "other")
    assert "refused" in told[0] + told[-1] and len(told) == 2
    waited = anyio.Event()

    async def wait() -> None:
        async with capacity.place():
            waited.set()

    async with anyio.create_task_group() as tasks, capacity.place():
        async with capacity.place():
            tasks.start_soon(wait)
            await anyio.sleep(0.2)  # four times as long as who waits for itself
            assert not waited.is_set()
        with anyio.fail_after(5):
            await waited.wait()


def test_a_thread_that_holds_all_sandboxes_is_told_instead_of_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "_PATIENCE_SECONDS", 0.2)
    engine = Engine(load(max_containers=1), extra=[Fake({"x": lambda guest: guest.out("x")})])
    with belljar.Sandbox(engine=engine, backend="fake"):
        with pytest.raises(errors.Busy, match="held open by who waits"):
            belljar.run("x", engine=engine, backend="fake")
        ran: list[str] = []

        def other() -> None:
            ran.append(belljar.run("x", engine=engine, backend="fake").status)

        waiting = threading.Thread(target=other)
        waiting.start()
        waiting.join(0.6)
        assert waiting.is_alive(), "it waits for another thread, which may close its sandbox"
    waiting.join(5)
    assert ran == ["success"]
