"""Listing a folder in time that grows with its entries, not with their square.

A guest's C library asks for 4 KiB of a folder at a time, and wasmtime's `fd_readdir` looks at every entry of the folder
for every such piece: 8,000 files took 25 s. So wasmtime is asked for a MiB at a time, by an instance that has a memory
of its own, and the guest gets its pieces out of that. A folder that is listed anew is looked at anew.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import wasmtime

from .wasmtime_adapter import memory_of, store_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DIRENT = struct.Struct("<QQIB3x")  # the next one's cookie, inode, length of the name, type; then the name
_PIECE_BYTES = 1 << 20
_AT = 64  # in the instance's memory, after the number of bytes that were written
_FETCHING = f"""
(module
  (import "wasi_snapshot_preview1" "fd_readdir" (func $list (param i32 i32 i32 i64 i32) (result i32)))
  (memory (export "memory") {(_AT + _PIECE_BYTES >> 16) + 1})
  (func (export "fetch") (param i32 i64) (result i32)
    (call $list (local.get 0) (i32.const {_AT}) (i32.const {_PIECE_BYTES}) (local.get 1) (i32.const 0))))
"""
_EFAULT = 21
_U32, _U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


class FolderListing:
    """Puts a host function before WASI's `fd_readdir` in a linker. Serves one guest at a time."""

    def __init__(self, engine: wasmtime.Engine, inode: Callable[[int], int] | None = None) -> None:
        """`inode`: gives the number that the guest sees for an inode, where that is another."""
        self._engine = engine
        self._module: wasmtime.Module | None = None  # compiled when a folder is first listed
        self._inode = inode
        self._store = -1  # the guest's, whose instance and piece these are
        self._own: Mapping[str, Any] = {}
        self._piece = FolderPiece(-1, 0, b"")

    def join(self, linker: wasmtime.Linker) -> None:
        """Takes the place of WASI's function for all instances that are made from now on."""
        i32, i64 = wasmtime.ValType.i32, wasmtime.ValType.i64
        kind = wasmtime.FuncType([i32(), i32(), i32(), i64(), i32()], [i32()])
        linker.allow_shadowing = True
        linker.define_func("wasi_snapshot_preview1", "fd_readdir", kind, self._fd_readdir, access_caller=True)

    def _fd_readdir(self, caller: wasmtime.Caller, fd: int, at: int, size: int, cookie: int, used_at: int) -> int:
        at, size, cookie, used_at = at & _U32, size & _U32, cookie & _U64, used_at & _U32
        answer = self._piece.take(fd, cookie, size) if store_number(caller) == self._store and cookie else None
        if answer is None:
            if error := self._fetch(caller, fd, cookie):
                return error
            answer = self._piece.take(fd, cookie, size) or b""
        memory = memory_of(caller)
        if max(at + len(answer), used_at + 4) > memory.data_len(caller):
            return _EFAULT
        memory.write(caller, answer, at)
        memory.write(caller, struct.pack("<I", len(answer)), used_at)
        return 0

    def _fetch(self, caller: wasmtime.Caller, fd: int, cookie: int) -> int:
        """Reads a piece of a folder from this entry on; returns WASI's error, or 0."""
        if store_number(caller) != self._store:
            self._module = self._module or wasmtime.Module(self._engine, _FETCHING)
            linker = wasmtime.Linker(self._engine)
            linker.define_wasi()
            self._own = linker.instantiate(caller, self._module).exports(caller)
            self._store = store_number(caller)
        error: int = self._own["fetch"](caller, fd, cookie)
        if error == 0:
            own = memory_of(self._own)
            used = int.from_bytes(own.read(caller, 0, 4), "little")
            data = own.read(caller, _AT, _AT + min(used, _PIECE_BYTES))
            self._piece = FolderPiece(fd, cookie, data, self._inode)
        return error


class FolderPiece:
    """What WASI said of a folder from one entry on."""

    def __init__(
        self, fd: int, cookie: int, data: bytearray | bytes, inode: Callable[[int], int] | None = None
    ) -> None:
        """`data`: entries, the last of which is cut off if they did not fit."""
        self._fd = fd
        self._places = {cookie: 0}  # where the entries begin that follow each cookie
        kept, at = bytearray(data), 0
        while at + DIRENT.size <= len(kept):
            after, number, length, kind = DIRENT.unpack_from(kept, at)
            if at + DIRENT.size + length > len(kept):
                break
            if inode:
                DIRENT.pack_into(kept, at, after, inode(number), length, kind)
            at += DIRENT.size + length
            self._places[after] = at
        self._is_whole = len(kept) < _PIECE_BYTES
        self._data = bytes(kept[:at])

    def take(self, fd: int, cookie: int, size: int) -> bytes | None:
        """Returns so many bytes from this entry on, fewer at the folder's end; None if they are not all here."""
        at = self._places.get(cookie)
        if fd != self._fd or at is None:
            return None
        if at + size > len(self._data):
            if not self._is_whole:
                return None if at else self._data
            self._fd = -1  # whoever asks once more is answered from the folder as it is then
        return self._data[at : at + size]
