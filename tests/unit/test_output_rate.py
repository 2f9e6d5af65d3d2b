"""What runs print passes at a bounded rate, so that one that floods holds nobody up."""

from __future__ import annotations

import anyio

from belljar.core.values import MIB
from belljar.service.pace import OutputPace


async def _seconds_for(pace: OutputPace, pieces: int) -> float:
    begun = anyio.current_time()
    for number in range(pieces):
        await pace.passed(MIB // 4, (number + 1) * MIB // 4)
    return anyio.current_time() - begun


async def test_the_first_megabyte_of_each_run_never_waits() -> None:
    pace = OutputPace()
    await _seconds_for(pace, 8)
    assert pace._free_at > 0  # a flood came before
    free = pace._free_at
    await _seconds_for(pace, 4)
    assert pace._free_at == free


async def test_what_runs_print_beyond_that_passes_at_one_rate_for_all_of_them() -> None:
    pace = OutputPace()
    begun = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(_seconds_for, pace, 8)  # two megabytes, of which one is free
    assert anyio.current_time() - begun >= 3 * MIB / (16 * MIB) - 0.02
