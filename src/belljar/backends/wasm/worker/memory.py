"""An idle instance's memory, copied out and in: only the pages that were written to.

The image an instance starts from is a private mapping of the compiled module, so the kernel knows which pages are
the guest's own: those are a checkpoint. Laid over a fresh instance of the same module, they are a fork.

A copy is one file: the pages, then their numbers (32 bits each). Where many pages lie together they are not even
copied in: the file is mapped over the instance's memory, privately, so that a page costs nothing until it is written.
"""

import array
import ctypes
import itertools
import os
import sys

PAGE = 4096
WASM_PAGE = 65536
_NOTHING = bytes(PAGE)
_PARTS = 512  # of one read or write; the kernel takes up to 1024
_WORTH_MAPPING = 3  # pages that lie together; for fewer, copying is cheaper than a mapping
_READ_WRITE, _PRIVATE_FIXED = 3, 0x12
_MAPS = sys.platform == "linux" and os.sysconf("SC_PAGE_SIZE") == PAGE


class DoesNotFit(Exception):
    """A copy that cannot be laid into this instance."""


def view(memory, store):
    """All of the linear memory as bytes that can be read and written in place."""
    size = memory.data_len(store)
    address = ctypes.addressof(memory.data_ptr(store).contents)
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def changed(memory, store, pristine, inherited=()):
    """The numbers of the pages that differ from a fresh instance, or may.

    `inherited` are those that were mapped and perhaps never written; `pristine()` is a fresh instance, where it is
    needed to compare with."""
    now, initial = view(memory, store), memory.type(store).limits.min * WASM_PAGE
    pages = _written(ctypes.addressof(memory.data_ptr(store).contents), len(now))
    if pages is None:  # not Linux: compare
        before = bytes(pristine())
        pages = (n for n in range(len(now) // PAGE) if _page(now, n) != _page(before, n))
    elif inherited:
        pages = sorted({*pages, *inherited})
    return [n for n in pages if n * PAGE < initial or _page(now, n) != _NOTHING]


def _page(data, number):
    return bytes(data[number * PAGE : number * PAGE + PAGE])


def _written(address, size):
    """By the kernel's own account: pages in memory (bit 63) or swapped out (62) that are no file's any more (61)."""
    unit = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address // unit * 8)
            facts = array.array("Q", file.read(size // unit * 8))
    except OSError:
        return None
    each = unit // PAGE
    return [n * each + part for n, fact in enumerate(facts) if fact >> 61 in (2, 4, 6) for part in range(each)]


def runs(pages):
    """Neighbouring pages together, as (first, how many)."""
    for _, group in itertools.groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        together = list(group)
        yield together[0][1], len(together)


def copy_out(memory, store, pages, fd):
    data = view(memory, store)
    parts = [data[first * PAGE : (first + many) * PAGE] for first, many in runs(pages)]
    _transfer(os.pwritev, fd, [*parts, memoryview(array.array("I", pages)).cast("B")], 0)


class Copy:
    """What `copy_out` wrote, as something to lay over fresh instances. It may come from elsewhere: it is checked."""

    def __init__(self, size, count, fd):
        pages = array.array("I", os.pread(fd, count * 4, count * PAGE))
        in_order = all(one < two for one, two in itertools.pairwise(pages))
        if len(pages) != count or not in_order or (count and pages[-1] * PAGE >= size) or size % WASM_PAGE:
            raise DoesNotFit("it is damaged")
        self._size, self._fd = size, fd
        self._copied, self._mapped = [], []  # (place in memory, size, place in the file)
        at = 0
        for first, many in runs(pages):
            kind = self._mapped if _MAPS and many >= _WORTH_MAPPING else self._copied
            kind.append((first * PAGE, many * PAGE, at))
            at += many * PAGE
        self.mapped = [n for place, size, _ in self._mapped for n in range(place // PAGE, (place + size) // PAGE)]

    def lay(self, memory, store):
        """Over a fresh instance, which is first grown to the size the other had."""
        missing = self._size - memory.data_len(store)
        if missing > 0 and not _grow(memory, store, missing // WASM_PAGE):
            raise DoesNotFit(f"it needs {self._size} bytes of memory, more than the limit")
        base = ctypes.addressof(memory.data_ptr(store).contents)
        for place, size, at in self._mapped:
            if _mmap(base + place, size, _READ_WRITE, _PRIVATE_FIXED, self._fd, at) != base + place:
                raise DoesNotFit("it cannot be mapped")
        data = view(memory, store)
        for neighbours in _neighbours(self._copied):
            parts = [data[place : place + size] for place, size, _ in neighbours]
            _transfer(os.preadv, self._fd, parts, neighbours[0][2])


def _neighbours(parts):
    """Parts that follow each other in the file, together: they are one read."""
    together = []
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


def _grow(memory, store, by):
    try:
        memory.grow(store, by)
    except Exception:  # wasmtime-py has more than one, by version
        return False
    return True


def _transfer(call, fd, parts, offset):
    """All parts, from or to consecutive places of the file."""
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
