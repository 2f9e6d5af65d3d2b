"""One QuickJS instance as its host sees it: its exports, its memory and its values.

A value of the engine is known by the address of its box in the guest's memory. Every address comes from the guest, so
it is checked against the memory's size before it is used.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import wasmtime

from ..wasmtime_adapter import ExportCall, base_address
from .calls import SIGNATURES, GuestExit, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRATCH_BYTES = 16384  # in the guest's memory, for paths and small answers
PATH_MAX_BYTES = 4096
MAX_ALLOCATION_BYTES = 1 << 31
_U32_BYTES = 4


class QuickJs:
    """The exports of one instance, with what is needed to pass values in and out."""

    def __init__(self, store: wasmtime.Store, linker: wasmtime.Linker) -> None:
        self._store = store
        self._linker = linker
        self._found: dict[str, ExportCall] = {}
        memory = linker.get(store, "bridge", "memory")
        assert isinstance(memory, wasmtime.Memory)
        self.memory = memory
        self.scratch = 0
        self.entry: Mapping[str, int] = {}  # functions of our prelude, by name; `nothing` is undefined

    def call(self, name: str, *args: float) -> Any:
        """Calls an export by its name."""
        call = self._found.get(name)
        if call is None:  # only those a run needs: looking all of them up would cost more than the run
            function = self._linker.get(self._store, "bridge", name)
            assert isinstance(function, wasmtime.Func)
            call = self._found[name] = ExportCall(self._store, function, SIGNATURES[name])
        return call(*args)

    # --- memory ---

    def size(self) -> int:
        return self.memory.data_len(self._store)

    def grow(self, pages: int) -> None:
        self.memory.grow(self._store, pages)

    def base(self) -> int:
        """Returns where the guest's memory lies in this process."""
        return base_address(self.memory, self._store)

    def read(self, address: int, size: int) -> bytes:
        if address + size > self.size():
            raise wasmtime.WasmtimeError("an address of the guest lies outside its memory")
        return ctypes.string_at(self.base() + address, size)

    def write(self, address: int, data: bytes) -> None:
        if address + len(data) > self.size():
            raise wasmtime.WasmtimeError("an address of the guest lies outside its memory")
        ctypes.memmove(self.base() + address, data, len(data))

    def word(self, address: int, size: int = _U32_BYTES) -> int:
        """Reads an unsigned number of this many bytes."""
        return int.from_bytes(self.read(address, size), "little")

    def allocate(self, size: int) -> int:
        """Allocates memory of the guest, which whoever asks frees.

        Raises:
            OutOfMemory: the guest has no such room.
        """
        address: int = self.call("wasm_malloc", size) if size < MAX_ALLOCATION_BYTES else 0
        if not address:
            raise OutOfMemory
        return address

    def free(self, address: int) -> None:
        self.call("wasm_free", address)

    def place(self, data: bytes) -> int:
        """Copies data into the guest's memory, with a zero at its end. Whoever asks frees it."""
        address = self.allocate(len(data) + 1)
        self.write(address, data + b"\0")
        return address

    def c_string(self, address: int) -> bytes:
        """Reads bytes up to a zero."""
        chunk = self.read(address, min(PATH_MAX_BYTES * 4, self.size() - address))
        return chunk.partition(b"\0")[0]

    # --- values ---

    def characters(self, box: int) -> tuple[int, int]:
        """Returns where a string's bytes (UTF-8) lie and how many; they are freed with `qjs_free_cstring`."""
        chars: int = self.call("qjs_get_string_len", box, self.scratch)
        if not chars:
            raise OutOfMemory
        return chars, self.word(self.scratch)

    def text_at(self, box: int) -> tuple[int, int]:
        """Returns where a string's bytes lie and how many; they stay until the next string is asked for."""
        chars: int = self.call("text", box, self.scratch)
        if not chars:
            raise OutOfMemory
        return chars, self.word(self.scratch)

    def text(self, box: int) -> bytes:
        """Returns a string's bytes (UTF-8)."""
        return self.read(*self.text_at(box))

    def number(self, box: int) -> int:
        """Returns a number without its fraction; 0 if it is no safe integer."""
        value = self.call("qjs_get_float64", box)
        return int(value) if abs(value) < 1 << 53 else 0

    def bytes_at(self, box: int) -> tuple[int, int]:
        """Returns where the bytes of a Uint8Array lie, and how many."""
        at = self.scratch
        buffer = self.call("qjs_get_typed_array_buffer", box, at, at + 4, at + 8)
        if self.call("qjs_is_exception", buffer):
            raise GuestExit(1)  # only a guest that has rewritten our own functions can come here
        offset, size = self.word(at), self.word(at + 4)
        start: int = self.call("qjs_get_array_buffer", buffer, at)
        self.call("qjs_free_value", buffer)
        return start + offset, size

    def new_undefined(self) -> int:
        box: int = self.call("qjs_get_undefined")
        return box

    def new_number(self, number: float) -> int:
        box: int = self.call("qjs_new_number", float(number))
        return box

    def new_string(self, data: bytes) -> int:
        address = self.place(data)
        box: int = self.call("qjs_new_string", address, len(data))
        self.free(address)
        return box

    # --- code ---

    def apply(self, function: int, *args: int) -> int:
        """Calls a function of the engine; returns the box of its result, which may be an exception."""
        at = 0
        if args:
            at = self.place(b"".join(arg.to_bytes(_U32_BYTES, "little") for arg in args))
        result: int = self.call("qjs_call", function, self.entry["nothing"], len(args), at)
        if at:
            self.free(at)
        return result

    def evaluate(self, code: bytes, name: bytes, flags: int = 0) -> int:
        """Evaluates source; returns the box of its value, which may be an exception."""
        text, file = self.place(code), self.place(name)
        result: int = self.call("qjs_eval", text, len(code), file, flags)
        self.free(text)
        self.free(file)
        return result

    def is_exception(self, box: int) -> bool:
        return bool(self.call("qjs_is_exception", box))
