"""Places for sandboxes: the rest wait in line, but not for living sandboxes alone."""

from __future__ import annotations

import anyio
import pytest

from belljar.core import errors
from belljar.engine.capacity import Capacity

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
