"""Floods take turns in the event loop: many of them take no more of it than one."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from belljar.backends.outcome import Outcome
from belljar.core.request import Limits
from belljar.core.values import KIB, MIB

ROUNDS = 100


@pytest.mark.parametrize("floods", [1, 20])
async def test_of_all_streams_that_flood_one_is_read_in_several_rounds_of_the_loop(floods: int) -> None:
    taken = 0

    async def emit(kind: str, text: str) -> None:
        await anyio.lowlevel.checkpoint()

    async def flood() -> None:
        nonlocal taken
        outcome = Outcome("box", Limits(output=MIB), emit)  # type: ignore[arg-type]
        await outcome.begin()
        while True:
            await outcome.take("stdout", b"x" * 64 * KIB)
            taken += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(floods):
            tasks.start_soon(flood)
        for _ in range(ROUNDS):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert 0 < taken <= ROUNDS / 4 + 1
