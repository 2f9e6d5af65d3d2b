"""Printing on wasm: unbuffered in the guest, gathered by the worker."""

from __future__ import annotations

from typing import Any

import pytest

import belljar
from belljar.backends.wasm.backend import Wasm

pytestmark = pytest.mark.anyio


async def test_printing_costs_no_call_of_ours_for_each_piece(wasm: Wasm) -> None:
    """By the time the worker itself computes, so that a busy machine does not matter: it was 11 s, and is below 1."""
    result = await belljar.arun("for i in range(100_000): print('line', i)", backend=wasm, timeout=120)
    assert result.ok and result.stdout.splitlines()[-1] == "line 99999"
    assert len(result.stdout.splitlines()) == 100_000
    assert result.cpu_ms is not None and result.cpu_ms < 5000


@pytest.mark.parametrize("limit", [{"timeout": 1}, {"fuel": 200_000_000}])
async def test_what_was_printed_is_there_when_a_limit_ends_the_guest_whole_line_or_not(
    wasm: Wasm, limit: dict[str, Any]
) -> None:
    code = "import sys\nprint('a line')\nsys.stderr.write('error')\nprint('no line', end='')\nwhile True: pass"
    result = await belljar.arun(code, backend=wasm, **limit)
    assert result.status in ("timeout", "fuel_exhausted")
    assert (result.stdout, result.stderr) == ("a line\nno line", "error")


async def test_a_line_without_its_end_is_heard_while_the_guest_computes(wasm: Wasm) -> None:
    heard, stop = list[str](), belljar.Cancel()

    def hear(text: str) -> None:
        heard.append(text)
        stop.cancel()

    result = await belljar.arun("print('so far', end='')\nwhile True: pass", backend=wasm, on_stdout=hear, cancel=stop)
    assert (result.status, heard) == ("aborted", ["so far"]), "neither a flush nor the end of a line was needed"


async def test_stdout_and_stderr_come_in_the_order_in_which_they_were_written(wasm: Wasm) -> None:
    told = list[str]()
    code = "import sys\nfor i in range(20):\n  print('out', i)\n  print('err', i, file=sys.stderr)"
    await belljar.arun(
        code, backend=wasm, on_event=lambda e: told.append(e.text) if e.kind in ("stdout", "stderr") else None
    )
    assert "".join(told) == "".join(f"out {i}\nerr {i}\n" for i in range(20))


async def test_output_of_a_guest_never_reaches_the_next_one(wasm: Wasm) -> None:
    for _ in range(3):
        ended = await belljar.arun("import os\nprint('x' * 200_000, end='')\nos._exit(3)", backend=wasm)
        assert len(ended.stdout) == 200_000
        assert (await belljar.arun("print('mine')", backend=wasm)).stdout == "mine\n"


async def test_a_turn_of_a_session_prints_as_a_program_does(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        turn = await session.run("for i in range(1000): print(i)\n'shown'")
        assert len(turn.stdout.splitlines()) == 1000 and turn.results == ({"text/plain": "'shown'"},)
        ended = await session.run("print('part', end='')\nwhile True: pass", timeout=1)
        assert (ended.status, ended.stdout) == ("timeout", "part")
