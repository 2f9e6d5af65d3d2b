"""Copies an idle instance's memory out and in: only the pages that were written to.

The image an instance starts from is a private mapping of the compiled module, so the kernel knows which pages are
the guest's own: those are a checkpoint. Laid over a fresh instance of the same module, they are a fork.

A copy is one file: the pages, then their numbers (32 bits each). Where many pages lie together they are not even
copied in: the file is mapped over the instance's memory, privately, so that a page costs nothing until it is written.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import sys
from typing import TYPE_CHECKING

from .wasmtime_adapter import base_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import wasmtime

    _Part = tuple[int, int, int]  # place in memory, size, place in the file

PAGE = 4096
WASM_PAGE = 65536
_ZEROS = bytes(PAGE)
_PARTS = 512  # of one read or write; the kernel takes up to 1024
_WORTH_MAPPING_PAGES = 3  # that lie together; for fewer, copying is cheaper than a mapping
_READ_WRITE, _PRIVATE_FIXED = 3, 0x12
_MAPS = sys.platform == "linux" and os.sysconf("SC_PAGE_SIZE") == PAGE


class DoesNotFit(Exception):
    """A copy cannot be laid into this instance."""


def view(memory: wasmtime.Memory, store: wasmtime.Store) -> memoryview:
    """Returns all of the linear memory, to be read and written in place."""
    size = memory.data_len(store)
    return memoryview((ctypes.c_ubyte * size).from_address(base_address(memory, store))).cast("B")


def changed(
    memory: wasmtime.Memory, store: wasmtime.Store, pristine: Callable[[], bytes], inherited: Sequence[int] = ()
) -> list[int]:
    """Returns the numbers of the pages that differ from a fresh instance, or may.

    Args:
        memory: the memory of an idle instance.
        store: the store that holds it.
        pristine: makes a fresh instance's memory, where it is needed to compare with.
        inherited: pages that were mapped and perhaps never written.
    """
    now, initial = view(memory, store), memory.type(store).limits.min * WASM_PAGE
    pages: Iterable[int] | None = _written(base_address(memory, store), len(now))
    if pages is None:  # not Linux: compare
        before = bytes(pristine())
        pages = (n for n in range(len(now) // PAGE) if _page(now, n) != _page(before, n))
    elif inherited:
        pages = sorted({*pages, *inherited})
    return [n for n in pages if n * PAGE < initial or _page(now, n) != _ZEROS]


def _page(data: memoryview | bytes, number: int) -> bytes:
    return bytes(data[number * PAGE : number * PAGE + PAGE])


def _written(address: int, size: int) -> list[int] | None:
    """Asks the kernel: pages in memory (bit 63) or swapped out (62) that are no file's any more (61)."""
    unit = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address // unit * 8)
            facts = array.array("Q", file.read(size // unit * 8))
    except OSError:
        return None
    each = unit // PAGE
    return [n * each + part for n, fact in enumerate(facts) if fact >> 61 in (2, 4, 6) for part in range(each)]


def runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields neighbouring pages together, as (first, how many)."""
    for _, group in itertools.groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        together = list(group)
        yield together[0][1], len(together)


def copy_out(memory: wasmtime.Memory, store: wasmtime.Store, pages: Sequence[int], fd: int) -> None:
    """Writes these pages into a file, and their numbers after them."""
    data = view(memory, store)
    parts = [data[first * PAGE : (first + many) * PAGE] for first, many in runs(pages)]
    _transfer(os.pwritev, fd, [*parts, memoryview(array.array("I", pages)).cast("B")], 0)


class MemoryCopy:
    """What `copy_out` wrote, to be laid over fresh instances. It may come from elsewhere, so it is checked."""

    def __init__(self, size: int, count: int, fd: int) -> None:
        pages = array.array("I", os.pread(fd, count * 4, count * PAGE))
        in_order = all(one < two for one, two in zip(pages, pages[1:]))
        if len(pages) != count or not in_order or (count and pages[-1] * PAGE >= size) or size % WASM_PAGE:
            raise DoesNotFit("it is damaged")
        self._size, self._fd = size, fd
        self._copied: list[_Part] = []
        self._mapped: list[_Part] = []
        at = 0
        for first, many in runs(pages):
            kind = self._mapped if _MAPS and many >= _WORTH_MAPPING_PAGES else self._copied
            kind.append((first * PAGE, many * PAGE, at))
            at += many * PAGE
        self.mapped: list[int] = [
            n for place, size, _ in self._mapped for n in range(place // PAGE, (place + size) // PAGE)
        ]

    def lay(self, memory: wasmtime.Memory, store: wasmtime.Store) -> None:
        """Lays the pages over a fresh instance, which is first grown to the size the other had.

        Raises:
            DoesNotFit: the instance may not grow that far, or the file is not whole.
        """
        missing = self._size - memory.data_len(store)
        if missing > 0 and not _grow(memory, store, missing // WASM_PAGE):
            raise DoesNotFit(f"it needs {self._size} bytes of memory, more than the limit")
        base = base_address(memory, store)
        for place, size, at in self._mapped:
            if _mmap(base + place, size, _READ_WRITE, _PRIVATE_FIXED, self._fd, at) != base + place:
                raise DoesNotFit("it cannot be mapped")
        data = view(memory, store)
        for neighbours in _neighbours(self._copied):
            parts = [data[place : place + size] for place, size, _ in neighbours]
            _transfer(os.preadv, self._fd, parts, neighbours[0][2])


def _neighbours(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Yields parts that follow each other in the file, together: they are one read."""
    together: list[_Part] = []
    for part in parts:
        if together and together[-1][2] + together[-1][1] != part[2]:
            yield together
            together = []
        together.append(part)
    if together:
        yield together


if _MAPS:
    _mmap = ctypes.CDLL(None).mmap
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _grow(memory: wasmtime.Memory, store: wasmtime.Store, by: int) -> bool:
    try:
        memory.grow(store, by)
    except Exception:  # wasmtime-py has more than one, by version
        return False
    return True


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, parts: Iterable[memoryview], offset: int
) -> None:
    """Moves all parts from or to consecutive places of the file."""
    waiting = list(reversed([part for part in parts if len(part)]))
    while waiting:
        batch = [waiting.pop() for _ in range(min(_PARTS, len(waiting)))]
        done = call(fd, batch, offset)
        if done <= 0:
            raise DoesNotFit("it ends too early")
        offset += done
        for part in reversed(batch):
            done -= len(part)
        # `done` is now minus what is still to do: put back the parts, or the piece of one, that were not moved
        left = -done
        for part in reversed(batch):
            if left <= 0:
                break
            piece = min(left, len(part))
            waiting.append(part[len(part) - piece :])
            left -= piece
