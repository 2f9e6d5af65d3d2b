"""The memory of a QuickJS engine that has evaluated our own files, kept to start each run from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import wasmtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PAGE_BYTES = 4096
_U64 = 0xFFFFFFFFFFFFFFFF


class Image:
    """A booted memory, as the parts that a fresh instance does not have."""

    def __init__(self, memory: bytes, blank: bytes, seed: int, scratch: int, entry: Mapping[str, int]) -> None:
        """`seed`: where `Math.random` keeps its state; `scratch` and `entry` are those of the booted instance."""
        self.size: int = len(memory)
        self.seed: int = seed
        self.scratch: int = scratch
        self.entry: Mapping[str, int] = entry
        self.parts: list[tuple[int, bytes]] = list(_differences(memory, blank.ljust(len(memory), b"\0")))


def _differences(memory: bytes, blank: bytes) -> Iterator[tuple[int, bytes]]:
    start = None
    for at in range(0, len(memory) + 1, _PAGE_BYTES):
        differs = memory[at : at + _PAGE_BYTES] != blank[at : at + _PAGE_BYTES]
        if differs and start is None:
            start = at
        elif not differs and start is not None:
            yield start, memory[start:at]
            start = None


def seed_address(before: bytes, after: bytes) -> int:
    """Finds where QuickJS keeps the state of `Math.random`: the one word that one call turned as its generator does."""
    found = []
    for at in range(0, len(before), 8):
        old = before[at : at + 8]
        if old != after[at : at + 8] and int.from_bytes(after[at : at + 8], "little") == _next_state(old):
            found.append(at)
    if len(found) != 1:
        raise wasmtime.WasmtimeError("this QuickJS keeps the state of Math.random in an unknown way")
    return found[0]


def _next_state(word: bytes) -> int:
    """xorshift64, with the shifts that QuickJS uses."""
    state = int.from_bytes(word, "little")
    state ^= state >> 12
    state ^= (state << 25) & _U64
    return state ^ (state >> 27)
