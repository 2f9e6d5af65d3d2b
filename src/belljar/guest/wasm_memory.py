"""An idle instance's memory, copied out and in: only the pages that were written to.

The image an instance starts from is a private mapping of the compiled module, so the kernel knows which pages are
the guest's own: those are a checkpoint. Copied into a fresh instance of the same module, they are a fork.

A copy is one file: the page numbers (32 bits each), then the pages.
"""

import array
import ctypes
import itertools
import os

PAGE = 4096
WASM_PAGE = 65536
_NOTHING = bytes(PAGE)
_PARTS = 512  # of one read or write; the kernel takes up to 1024


class DoesNotFit(Exception):
    """A copy that cannot be laid into this instance."""


def view(memory, store):
    """All of the linear memory as bytes that can be read and written in place."""
    size = memory.data_len(store)
    address = ctypes.addressof(memory.data_ptr(store).contents)
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def changed(memory, store, pristine):
    """The numbers of the pages that differ from a fresh instance, or may; `pristine()` is one, where it is needed."""
    now, initial = view(memory, store), memory.type(store).limits.min * WASM_PAGE
    pages = _written(ctypes.addressof(memory.data_ptr(store).contents), len(now))
    if pages is None:  # not Linux: compare
        before = bytes(pristine())
        pages = (n for n in range(len(now) // PAGE) if _page(now, n) != _page(before, n))
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
    index = array.array("I", pages).tobytes()
    parts = [memoryview(index), *(data[first * PAGE : (first + many) * PAGE] for first, many in runs(pages))]
    _transfer(os.pwritev, fd, parts, 0)


class Copy:
    """What `copy_out` wrote, as something to lay over fresh instances. It may come from elsewhere: it is checked."""

    def __init__(self, size, count, fd):
        pages = array.array("I", os.pread(fd, count * 4, 0))
        if len(pages) != count or any(n * PAGE >= size for n in pages) or size % WASM_PAGE:
            raise DoesNotFit("it is damaged")
        self._size, self._fd, self._start = size, fd, count * 4
        self._places = [(first * PAGE, (first + many) * PAGE) for first, many in runs(pages)]

    def lay(self, memory, store):
        """Over a fresh instance, which is first grown to the size the other had."""
        missing = self._size - memory.data_len(store)
        if missing > 0 and not _grow(memory, store, missing // WASM_PAGE):
            raise DoesNotFit(f"it needs {self._size} bytes of memory, more than the limit")
        data = view(memory, store)
        _transfer(os.preadv, self._fd, [data[start:end] for start, end in self._places], self._start)


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
