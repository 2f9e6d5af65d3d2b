"""A world without chance, for runs that must be repeated bit for bit: WASI's clock, randomness, sleep and file facts.

Time starts where it is told and moves only when the guest looks at it or sleeps, so a sleep costs nothing. Random
bytes are a stream of SHA-256 blocks of the seed. Inode numbers count from 1 as they are first seen, and every file is
as old as the start.
"""

import hashlib
import struct

import wasmtime

_WASI = "wasi_snapshot_preview1"
_WIDE = {"clock_time_get": 1, "fd_readdir": 3}  # which argument has 64 bits
_ARGUMENTS = {
    "clock_time_get": 3, "random_get": 2, "poll_oneoff": 4, "fd_filestat_get": 2, "path_filestat_get": 5,
    "fd_readdir": 5,
}  # fmt: skip
_TICK = 1_000  # nanoseconds that pass between one look at the clock and the next
_SUBSCRIPTION, _EVENT, _DIRENT = 48, 32, 24
_CLOCK = 0
_FOLDER = 3
_ABSOLUTE = 1


# An instance whose memory is the guest's, and whose functions are WASI's own.
BETWEEN = """
(module
  (import "wasi_snapshot_preview1" "fd_filestat_get" (func $fd (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_filestat_get" (func $path (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_readdir" (func $list (param i32 i32 i32 i64 i32) (result i32)))
  (import "guest" "memory" (memory 0))
  (export "memory" (memory 0))
  (func (export "fd_filestat_get") (param i32 i32) (result i32)
    (call $fd (local.get 0) (local.get 1)))
  (func (export "path_filestat_get") (param i32 i32 i32 i32 i32) (result i32)
    (call $path (local.get 0) (local.get 1) (local.get 2) (local.get 3) (local.get 4)))
  (func (export "fd_readdir") (param i32 i32 i32 i64 i32) (result i32)
    (call $list (local.get 0) (local.get 1) (local.get 2) (local.get 3) (local.get 4))))
"""


class Fixed:
    """One run's clock and chance."""

    def __init__(self, seed, start):
        self._key = hashlib.sha256(f"belljar:{seed}".encode()).digest()
        self._blocks = 0
        self._pool = b""
        self.start = int(start * 1e9)
        self.now = self.start
        self._inodes = {}
        self.own = None

    def look(self):
        self.now += _TICK
        return self.now

    def chance(self, size):
        last = self._blocks + max(0, size - len(self._pool) + 31) // 32
        more = (hashlib.sha256(self._key + n.to_bytes(8, "little")).digest() for n in range(self._blocks, last))
        pool, self._blocks = b"".join((self._pool, *more)), last
        self._pool = pool[size:]
        return pool[:size]

    def inode(self, real):
        return self._inodes.setdefault(real, len(self._inodes) + 1)


class Shadows:
    """Host functions that stand before WASI's own. `world` is the run that is under way."""

    def __init__(self, engine, linker):
        self.world = None
        self.linker = linker
        self._engine = engine
        self._between = wasmtime.Module(engine, BETWEEN)
        linker.allow_shadowing = True
        for name, function in {
            "clock_time_get": self._clock_time_get, "random_get": self._random_get, "poll_oneoff": self._poll_oneoff,
            "fd_filestat_get": self._patched("fd_filestat_get", self._patch_stat),
            "path_filestat_get": self._patched("path_filestat_get", self._patch_stat),
            "fd_readdir": self._patched("fd_readdir", self._patch_entries),
        }.items():  # fmt: skip
            linker.define_func(_WASI, name, _kind(name), function, access_caller=True)

    def _patched(self, name, patch):
        """WASI's own function, and then what it wrote, made the same in every run."""

        def call(caller, *args):
            error = self._own(caller)[name](caller, *args)
            if error == 0:
                patch(caller, caller.get("memory"), *args)
            return error

        return call

    def _own(self, caller):
        """WASI writes into the memory of the instance that calls it, so it is called by one that has the guest's."""
        if self.world.own is None:
            linker = wasmtime.Linker(self._engine)
            linker.define_wasi()
            linker.define(caller, "guest", "memory", caller.get("memory"))
            self.world.own = linker.instantiate(caller, self._between).exports(caller)
        return self.world.own

    def _clock_time_get(self, caller, clock, precision, place):
        return _write(caller, place, struct.pack("<Q", self.world.look()))

    def _random_get(self, caller, place, size):
        return _write(caller, place, self.world.chance(size & 0xFFFFFFFF))

    def _poll_oneoff(self, caller, subscriptions, events, count, place):
        """The clock that rings first has rung: its time is now. What has no clock is ready at once."""
        memory, rung, ready = caller.get("memory"), None, []
        for n in range(count & 0xFFFF):
            at = (subscriptions & 0xFFFFFFFF) + n * _SUBSCRIPTION
            user, kind, length, flags = struct.unpack("<QB15xQ8xH", _read(caller, memory, at, 42))
            if kind != _CLOCK:
                ready.append((user, kind))
                continue
            due = length if flags & _ABSOLUTE else self.world.now + length
            if rung is None or due < rung[0]:
                rung = (due, user)
        if rung and not ready:
            self.world.now = max(self.world.now, rung[0])
            ready = [(rung[1], _CLOCK)]
        said = b"".join(struct.pack("<QHB", user, 0, kind).ljust(_EVENT, b"\0") for user, kind in ready)
        _write(caller, events, said)
        return _write(caller, place, struct.pack("<I", len(ready)))

    def _patch_stat(self, caller, memory, *args):
        """filestat: device, inode, type, links, size, then three times."""
        at = args[-1] & 0xFFFFFFFF
        inode, kind, size = struct.unpack("<QB15xQ", _read(caller, memory, at + 8, 32))
        _write(caller, at, struct.pack("<QQ", 1, self.world.inode(inode)))
        size = 0 if kind == _FOLDER else size  # a folder's size and links are the file system's affair
        _write(caller, at + 24, struct.pack("<QQQQQ", 1, size, *[self.world.start] * 3))

    def _patch_entries(self, caller, memory, fd, at, size, cookie, used):
        """dirent: the next one's cookie, inode, length of the name, type; then the name."""
        at &= 0xFFFFFFFF
        (used,) = struct.unpack("<I", _read(caller, memory, used & 0xFFFFFFFF, 4))
        end = at + min(used, size & 0xFFFFFFFF)
        while at + _DIRENT <= end:
            inode, length = struct.unpack("<8xQI", _read(caller, memory, at, 20))
            _write(caller, at + 8, struct.pack("<Q", self.world.inode(inode)))
            at += _DIRENT + length


def _kind(name):
    """A WASI function's type: all arguments and the answer are 32 bits wide, but for one."""
    i32, i64 = wasmtime.ValType.i32, wasmtime.ValType.i64
    given = [i64() if _WIDE.get(name) == n else i32() for n in range(_ARGUMENTS[name])]
    return wasmtime.FuncType(given, [i32()])


def _read(caller, memory, at, size):
    return bytes(memory.read(caller, at, at + size))


def _write(caller, place, data):
    place &= 0xFFFFFFFF
    memory = caller.get("memory")
    if place + len(data) > memory.data_len(caller):
        return 21  # EFAULT
    memory.write(caller, data, place)
    return 0
