"""The fuel that a guest has used, known also where it is interrupted in the middle of a loop.

Compiled code counts its fuel in a register, and writes the count down at its next call. An interpreter that turns round
in a loop makes none, so for as long as the loop runs nobody knows. CPython looks at the bits of its `eval_breaker` at
every jump backwards, though, and calls a function when one is set. So when the time is up one is set from outside, and
the guest is interrupted as soon as its count has moved. QuickJS calls out every few thousand jumps by itself.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from typing import TYPE_CHECKING

from .wasmtime_adapter import base_address

if TYPE_CHECKING:
    import wasmtime

_FUEL_PER_MS = 4_000_000  # that CPython uses, about: for what is never written down
# Where `_PyRuntime` lies in the interpreter that we were verified with, and what it begins with (PEP 768).
_RUNTIME = 26_151_952
_COOKIE = b"xdebugpy" + struct.pack("<Q", 0x030F00F0)
# The offsets that follow, by their number: in the runtime, in an interpreter, and in the debugger's part of a thread.
_INTERPRETERS_HEAD, _THREADS_HEAD, _EVAL_BREAKER = 3, 7, 103
_HEAD = struct.Struct(f"<{len(_COOKIE)}s104Q")
# Bits that do no harm: the interpreter's loop looks for an exception from outside, which is not there; functions in C
# that look whether a signal has come collect garbage, too.
ASYNC_EXCEPTION, COLLECT_GARBAGE = 1 << 3, 1 << 4


def find_breaker(memory: wasmtime.Memory, store: wasmtime.Store) -> int:
    """Returns the address of the `eval_breaker` of CPython's only thread; 0 where it is not as we know it.

    Args:
        memory: of an interpreter that has never seen a guest.
        store: the store that holds it.
    """
    base, size = base_address(memory, store), memory.data_len(store)

    if _RUNTIME + _HEAD.size > size or ctypes.string_at(base + _RUNTIME, len(_COOKIE)) != _COOKIE:
        return 0
    offsets = _HEAD.unpack(ctypes.string_at(base + _RUNTIME, _HEAD.size))[1:]

    def follow(address: int) -> int:
        """Returns the pointer there; 0 outside the memory."""
        return int.from_bytes(ctypes.string_at(base + address, 4), "little") if address + 4 <= size else 0

    interpreter = follow(_RUNTIME + offsets[_INTERPRETERS_HEAD])
    thread = follow(interpreter + offsets[_THREADS_HEAD])
    breaker = thread + offsets[_EVAL_BREAKER]
    return breaker if interpreter and thread and breaker < size else 0


class FuelCount:
    """What one running guest has written down, looked at from another thread than the one that calls it.

    Its memory is reserved whole and never moves, and its size never shrinks, so the address of the bits stays good.
    What the guest does to them meanwhile is its own affair: it cannot know less of itself by it than an estimate says.
    """

    def __init__(self, store: wasmtime.Store, given: int, breaker: ctypes.c_ubyte | None = None) -> None:
        self._store = store
        self._given = self._left = given
        self._breaker = breaker
        self._clock = _clock_of_this_thread()
        self._moved_ms = self._cpu_ms()

    def moves(self) -> bool:
        """Looks whether more has been written down since the last look."""
        left = self._store.get_fuel()
        if left == self._left:
            return False
        self._left, self._moved_ms = left, self._cpu_ms()
        return True

    def ask(self, bit: int) -> None:
        """Has CPython call a function soon."""
        if self._breaker is not None:  # a byte of zero is false
            self._breaker.value |= bit

    def used(self, interrupted: bool = False) -> int:
        """Returns the fuel used.

        Args:
            interrupted: the guest was stopped in the middle, so what came after it last wrote its count down is added
                by its CPU time, about; that is next to nothing, unless it was in one long loop of a function in C.
        """
        known = self._given - self._store.get_fuel()
        since_ms = 0.0 if self.moves() or not interrupted else self._cpu_ms() - self._moved_ms
        return min(self._given, known + int(since_ms * _FUEL_PER_MS))

    def _cpu_ms(self) -> float:
        """Returns the CPU time of the guest's thread."""
        return time.clock_gettime(self._clock) * 1000


def _clock_of_this_thread() -> int:
    """Returns a clock that other threads can read; that of the process where threads have none."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.pthread_getcpuclockid(threading.get_ident())
    return time.CLOCK_PROCESS_CPUTIME_ID
