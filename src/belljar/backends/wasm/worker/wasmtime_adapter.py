"""What the worker needs of wasmtime beyond its public names: fast calls, raw addresses, exports with a type.

All of wasmtime's underscores that we use are in this file.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import wasmtime
from wasmtime import _bindings as raw
from wasmtime._func import maybe_raise_last_exn

if TYPE_CHECKING:
    from collections.abc import Mapping

    Storelike = wasmtime.Store | wasmtime.Caller
    Exports = wasmtime.Caller | Mapping[str, Any]

# The letters of a signature: i is i32, I is i64, F is f64; what comes after the colon is the result.
FIELDS = {"i": "i32", "I": "i64", "F": "f64"}
_KINDS = {"i": 0, "I": 1, "F": 3}


def memory_of(exports: Exports) -> wasmtime.Memory:
    """Returns the linear memory that an instance exports."""
    memory = exports["memory"]
    assert isinstance(memory, wasmtime.Memory)
    return memory


def function_of(exports: Exports, name: str) -> wasmtime.Func:
    """Returns a function that an instance exports."""
    function = exports[name]
    assert isinstance(function, wasmtime.Func)
    return function


def store_number(caller: wasmtime.Caller) -> int:
    """Returns the number of the store that a caller lives in; no other store ever has it."""
    number: int = memory_of(caller)._memory._anon_1.store_id
    return number


def base_address(memory: wasmtime.Memory, store: Storelike) -> int:
    """Returns where a linear memory lies in this process."""
    return ctypes.addressof(memory.data_ptr(store).contents)


class ExportCall:
    """One exported function with its arguments laid out once: the package's own way asks for all types at each call."""

    def __init__(self, store: wasmtime.Store, function: wasmtime.Func, signature: str) -> None:
        given, _, result = signature.partition(":")
        self._store = store
        self._func = function._func
        self._args = (raw.wasmtime_val_t * len(given))()
        self._results = (raw.wasmtime_val_t * len(result))()
        self._fields = tuple((arg.of, FIELDS[letter]) for arg, letter in zip(self._args, given))
        for arg, letter in zip(self._args, given):
            arg.kind = _KINDS[letter]
        self._result = FIELDS[result] if result else None

    def __call__(self, *args: float) -> Any:
        """Returns the result, integers without their sign; None where there is none.

        Raises:
            wasmtime.WasmtimeError, wasmtime.Trap: the guest was stopped.
            Exception: whatever one of our own callbacks raised meanwhile.
        """
        if len(args) != len(self._fields):
            raise TypeError(f"{len(self._fields)} arguments are wanted, not {len(args)}")
        for (place, field), value in zip(self._fields, args):
            setattr(place, field, value)
        trap = ctypes.POINTER(raw.wasm_trap_t)()
        error = raw.wasmtime_func_call(
            self._store._context(), ctypes.byref(self._func), self._args, len(self._args),
            self._results, len(self._results), ctypes.byref(trap),
        )  # fmt: skip
        if error or trap:
            _raise(error, trap)
        if self._result is None:
            return None
        value = getattr(self._results[0].of, self._result)
        return value & 0xFFFFFFFF if self._result == "i32" else value


def _raise(error: Any, trap: Any) -> None:
    problem = wasmtime.WasmtimeError._from_ptr(error) if error else wasmtime.Trap._from_ptr(trap)
    maybe_raise_last_exn()  # what one of our own callbacks raised comes first
    raise problem
