"""Deterministic mode: fixed clock and seed, for runs that must be repeated bit for bit.

WASI's clock, randomness, sleep and file facts are answered here. Time starts where it is told and moves only when the
guest looks at it or sleeps, so a sleep costs nothing. Random bytes are a stream of SHA-256 blocks of the seed. Inode
numbers count from 1 as they are first seen, and every file is as old as the start.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

import wasmtime

from .listing import FolderListing
from .wasmtime_adapter import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WASI = "wasi_snapshot_preview1"
_WIDE = {"clock_time_get": 1}  # which argument has 64 bits
_ARGUMENTS = {
    "clock_time_get": 3, "random_get": 2, "poll_oneoff": 4, "fd_filestat_get": 2, "path_filestat_get": 5,
}  # fmt: skip
_TICK_NANOSECONDS = 1_000  # that pass between one look at the clock and the next
_SUBSCRIPTION_BYTES, _EVENT_BYTES = 48, 32
_CLOCK = 0  # a kind of event
_FOLDER = 3  # a kind of file
_ABSOLUTE = 1  # a flag of a clock's subscription
_EFAULT = 21
_U32 = 0xFFFFFFFF


# An instance whose memory is the guest's, and whose functions are WASI's own.
_FORWARDING = """
(module
  (import "wasi_snapshot_preview1" "fd_filestat_get" (func $fd (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_filestat_get" (func $path (param i32 i32 i32 i32 i32) (result i32)))
  (import "guest" "memory" (memory 0))
  (export "memory" (memory 0))
  (func (export "fd_filestat_get") (param i32 i32) (result i32)
    (call $fd (local.get 0) (local.get 1)))
  (func (export "path_filestat_get") (param i32 i32 i32 i32 i32) (result i32)
    (call $path (local.get 0) (local.get 1) (local.get 2) (local.get 3) (local.get 4))))
"""


class DeterministicState:
    """The clock, the random numbers and the inode numbers of one run."""

    def __init__(self, seed: int, start: float) -> None:
        self._key = hashlib.sha256(f"belljar:{seed}".encode()).digest()
        self._blocks = 0
        self._pool = b""
        self.start: int = int(start * 1e9)
        self.now: int = self.start
        self._inodes: dict[int, int] = {}
        self.own: Mapping[str, Any] | None = None  # WASI's own functions, once they are needed

    def tick(self) -> int:
        """Returns the time (nanoseconds), which moves on by that."""
        self.now += _TICK_NANOSECONDS
        return self.now

    def random_bytes(self, size: int) -> bytes:
        """Returns the next bytes of the seed's stream."""
        last = self._blocks + max(0, size - len(self._pool) + 31) // 32
        more = (hashlib.sha256(self._key + n.to_bytes(8, "little")).digest() for n in range(self._blocks, last))
        pool, self._blocks = b"".join((self._pool, *more)), last
        self._pool = pool[size:]
        return pool[:size]

    def inode(self, real: int) -> int:
        """Returns the number that stands for an inode in this run."""
        return self._inodes.setdefault(real, len(self._inodes) + 1)


class DeterministicWasi:
    """Puts host functions before WASI's own in a linker. `state` is that of the run under way."""

    def __init__(self, engine: wasmtime.Engine, linker: wasmtime.Linker) -> None:
        self.state: DeterministicState = DeterministicState(0, 0)
        self.linker = linker
        self._engine = engine
        self._forwarding = wasmtime.Module(engine, _FORWARDING)
        linker.allow_shadowing = True
        functions: dict[str, Callable[..., int]] = {
            "clock_time_get": self._clock_time_get, "random_get": self._random_get, "poll_oneoff": self._poll_oneoff,
            "fd_filestat_get": self._patched("fd_filestat_get", self._patch_stat),
            "path_filestat_get": self._patched("path_filestat_get", self._patch_stat),
        }  # fmt: skip
        for name, function in functions.items():
            linker.define_func(_WASI, name, _function_type(name), function, access_caller=True)
        FolderListing(engine, self._inode).join(linker)

    def _inode(self, real: int) -> int:
        return self.state.inode(real)

    def _patched(self, name: str, patch: Callable[..., None]) -> Callable[..., int]:
        """Returns WASI's own function with what it wrote made the same in every run."""

        def call(caller: wasmtime.Caller, *args: int) -> int:
            error: int = self._own(caller)[name](caller, *args)
            if error == 0:
                patch(caller, *args)
            return error

        return call

    def _own(self, caller: wasmtime.Caller) -> Mapping[str, Any]:
        """Returns WASI's functions; they write into their caller's memory, so an instance that has the guest's calls
        them."""
        if self.state.own is None:
            linker = wasmtime.Linker(self._engine)
            linker.define_wasi()
            linker.define(caller, "guest", "memory", memory_of(caller))
            self.state.own = linker.instantiate(caller, self._forwarding).exports(caller)
        return self.state.own

    def _clock_time_get(self, caller: wasmtime.Caller, clock: int, precision: int, place: int) -> int:
        return _write(caller, place, struct.pack("<Q", self.state.tick()))

    def _random_get(self, caller: wasmtime.Caller, place: int, size: int) -> int:
        return _write(caller, place, self.state.random_bytes(size & _U32))

    def _poll_oneoff(self, caller: wasmtime.Caller, subscriptions: int, events: int, count: int, place: int) -> int:
        """Answers that the clock which is due first is due now. What has no clock is ready at once."""
        first: tuple[int, int] | None = None  # (when, whose)
        ready: list[tuple[int, int]] = []
        for n in range(count & 0xFFFF):
            at = (subscriptions & _U32) + n * _SUBSCRIPTION_BYTES
            user, kind, length, flags = struct.unpack("<QB15xQ8xH", _read(caller, at, 42))
            if kind != _CLOCK:
                ready.append((user, kind))
                continue
            due = length if flags & _ABSOLUTE else self.state.now + length
            if first is None or due < first[0]:
                first = (due, user)
        if first and not ready:
            self.state.now = max(self.state.now, first[0])
            ready = [(first[1], _CLOCK)]
        answers = b"".join(struct.pack("<QHB", user, 0, kind).ljust(_EVENT_BYTES, b"\0") for user, kind in ready)
        _write(caller, events, answers)
        return _write(caller, place, struct.pack("<I", len(ready)))

    def _patch_stat(self, caller: wasmtime.Caller, *args: int) -> None:
        """A filestat is device, inode, type, links, size, then three times."""
        at = args[-1] & _U32
        inode, kind, size = struct.unpack("<QB15xQ", _read(caller, at + 8, 32))
        _write(caller, at, struct.pack("<QQ", 1, self.state.inode(inode)))
        size = 0 if kind == _FOLDER else size  # a folder's size and links depend on the file system
        _write(caller, at + 24, struct.pack("<QQQQQ", 1, size, *[self.state.start] * 3))


def _function_type(name: str) -> wasmtime.FuncType:
    """Returns a WASI function's type: all arguments and the answer are 32 bits wide, but for one."""
    i32, i64 = wasmtime.ValType.i32, wasmtime.ValType.i64
    given = [i64() if _WIDE.get(name) == n else i32() for n in range(_ARGUMENTS[name])]
    return wasmtime.FuncType(given, [i32()])


def _read(caller: wasmtime.Caller, at: int, size: int) -> bytes:
    return bytes(memory_of(caller).read(caller, at, at + size))


def _write(caller: wasmtime.Caller, place: int, data: bytes) -> int:
    place &= _U32
    memory = memory_of(caller)
    if place + len(data) > memory.data_len(caller):
        return _EFAULT
    memory.write(caller, data, place)
    return 0
