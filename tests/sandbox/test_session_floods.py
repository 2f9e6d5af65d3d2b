"""What a session's guest says to its host, when it says too much: nobody else waits for it."""

from __future__ import annotations

import json

import anyio
import pytest

import belljar
from belljar.backends.agent_frames import MAX_DEPTH, MAX_VALUES, read_frame
from belljar.engine.engine import Engine
from belljar.testing.stalls import Stalls

pytestmark = pytest.mark.anyio
STALL_SECONDS = 0.5  # of CPU, without a look at anything else: what the slowest of machines needs for one large frame
BACKENDS = ("native", "wasm")
# A frame of 15 MB that takes seconds to parse, into each pipe that is open, as the agent's is.
FLOOD = """
import os, threading, time
line = b'{"display": {"application/json": [' + b'[],' * 5_000_000 + b'[]]}}\\n'
def flood(fd, pause):
    view = memoryview(line)
    time.sleep(pause)
    while True:
        sent = 0
        while sent < len(view):
            try: sent += os.write(fd, view[sent:])
            except BlockingIOError: time.sleep(0.001)
def pipe(fd):
    try: return "pipe:" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError: return False
def flood_all(pause=0):
    for fd in range(3, 20):
        if pipe(fd):
            try: os.write(fd, b"\\n")
            except OSError: continue
            threading.Thread(target=flood, args=(fd, pause), daemon=True).start()
"""
NESTED = "x = []\nfor _ in range(%d): x = [x]\nx"


async def test_a_thread_that_floods_the_pipe_between_turns_stops_nobody(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native") as session:
        await session.run(FLOOD)
        async with Stalls() as stalls:
            turn = await session.run("flood_all(pause=0.3)")
            assert turn.ok
            await anyio.sleep(1.3)
        assert stalls.longest < STALL_SECONDS
        assert stalls.cpu < 0.7, "what nobody asked for is not even read at full speed"


async def test_a_thread_that_floods_the_pipe_in_a_turn_costs_its_session_and_stops_nobody(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native", output="64K") as session:
        await session.run(FLOOD)
        async with Stalls() as stalls:
            turn = await session.run("flood_all(); time.sleep(20)", timeout=30)
        assert turn.status == "output_limit"
        assert stalls.longest < STALL_SECONDS
        with pytest.raises(belljar.SessionEnded):
            await session.run("1")


async def test_a_guest_that_floods_the_door_of_wasm_costs_its_session_and_stops_nobody(engine: Engine) -> None:
    code = FLOOD.replace("5_000_000", "4_000_000") + "import _host\nwhile True: _host.call(line[:-1])"
    async with belljar.AsyncSession(engine=engine, backend="wasm", output="64K") as session:
        async with Stalls() as stalls:
            turn = await session.run(code, timeout=30)
        assert turn.status == "output_limit"
        assert stalls.longest < STALL_SECONDS


@pytest.mark.parametrize("language", ["python", "javascript"])
async def test_one_huge_write_on_wasm_stops_nobody(engine: Engine, language: str) -> None:
    codes = {"python": "print('x' * 20_000_000)", "javascript": "console.log('x'.repeat(20_000_000))"}
    async with Stalls() as stalls:
        result = await belljar.arun(
            codes[language], language=language, engine=engine, backend="wasm", output="2M", timeout=30
        )
    assert (result.status, result.truncated) == ("output_limit", True)
    assert stalls.longest < STALL_SECONDS


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_deep_value_is_shown_as_text_and_its_result_can_be_written_down(engine: Engine, backend: str) -> None:
    async with belljar.AsyncSession(engine=engine, backend=backend) as session:
        for depth in (10, 300):
            turn = await session.run(NESTED % depth)
            assert turn.ok and turn.results[0]["text/plain"].startswith("[[[[")
            assert ("application/json" in turn.results[0]) == (depth < MAX_DEPTH)
            assert "[[[[" in turn.model_dump_json()


async def test_structure_is_bounded_before_it_is_parsed() -> None:
    quoted = r'"[[[[{{\"[,\\"'
    assert await read_frame(f'{{"a": {quoted}, "b": [{quoted}]}}') == {"a": '[[[[{{"[,\\', "b": ['[[[[{{"[,\\']}
    assert await read_frame("not json") == await read_frame("[1]") == await read_frame('{"a": 1') is None
    for hostile in (
        '{"a": ' + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}",
        '{"a": [' + "1," * MAX_VALUES + "1]}",
        '{"a": ["' + '","' * MAX_VALUES + '"]}',
        '{"a": ' + "1" * 4_000_000 + "}",
        "[" * 100_000,
    ):
        with pytest.raises(OverflowError):
            await read_frame(hostile)
    text = "\\" * 1000 + '"[{' * 300_000
    assert await read_frame('{"a": ' + json.dumps(text) + "}") == {"a": text}
