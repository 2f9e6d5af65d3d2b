"""The functions that we call in wasm: QuickJS's exports, WASI by way of the bridge, and what can go wrong in them."""

from __future__ import annotations

import wasmtime

from ..wasmtime_adapter import FIELDS

# Signatures: i is i32, I is i64, F is f64; what comes after the colon is the result.
WASI = {
    "clock_time_get": "iIi:i", "random_get": "ii:i", "poll_oneoff": "iiii:i", "fd_read": "iiii:i",
    "fd_write": "iiii:i", "fd_close": "i:i",
    "fd_readdir": "iiiIi:i", "fd_filestat_get": "ii:i", "fd_prestat_get": "ii:i", "fd_prestat_dir_name": "iii:i",
    "path_open": "iiiiiIIii:i", "path_filestat_get": "iiiii:i", "path_create_directory": "iii:i",
    "path_remove_directory": "iii:i", "path_unlink_file": "iii:i", "path_rename": "iiiiii:i",
}  # fmt: skip
QUICKJS = {
    "_initialize": ":", "qjs_init": ":i", "qjs_set_max_stack_size": "i:", "qjs_set_module_loader": "i:",
    "qjs_set_promise_rejection_handler": "i:", "wasm_malloc": "i:i", "wasm_free": "i:", "realloc": "ii:i",
    "qjs_eval": "iiii:i", "qjs_call": "iiii:i", "qjs_new_string": "ii:i", "qjs_new_number": "F:i",
    "qjs_new_uint8_array": "ii:i", "qjs_get_undefined": ":i", "qjs_new_object": ":i", "qjs_new_host_function": "iii:i",
    "qjs_get_prop_string": "ii:i", "qjs_set_prop_string": "iii:i", "qjs_get_string_len": "ii:i",
    "qjs_free_cstring": "i:", "qjs_get_float64": "i:F", "qjs_is_string": "i:i", "qjs_is_exception": "i:i",
    "qjs_get_exception": ":i", "qjs_free_value": "i:", "qjs_dup_value": "i:i", "qjs_promise_state": "i:i",
    "qjs_promise_result": "i:i", "qjs_get_typed_array_buffer": "iiii:i", "qjs_get_array_buffer": "ii:i",
    "qjs_is_job_pending": ":i", "qjs_execute_pending_job": ":i",
}  # fmt: skip
OWN = {"drain": ":i", "text": "ii:i"}  # of the bridge
SIGNATURES = {**WASI, **QUICKJS, **OWN}


class OutOfMemory(wasmtime.WasmtimeError):
    """The guest ran into its memory limit and did not recover."""

    def __init__(self, message: str = "the guest is out of memory") -> None:
        super().__init__(message)


class GuestExit(Exception):
    """The guest is done; raised through the engine, so that nothing of it runs any more."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code: int = code & 0xFF


class WasiError(Exception):
    """A file operation failed, with one of WASI's numbers."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# All promises that are ready in one call; and a string's bytes, which are kept until the next one is asked for.
_LOOPS = """
(func (export "drain") (result i32)
  (loop $next
    (if (i32.eqz (call $qjs_is_job_pending)) (then (return (i32.const 0))))
    (br_if $next (i32.ge_s (call $qjs_execute_pending_job) (i32.const 0))))
  i32.const -1)
(global $kept (mut i32) (i32.const 0))
(func (export "text") (param i32 i32) (result i32)
  (if (global.get $kept) (then (call $qjs_free_cstring (global.get $kept))))
  (global.set $kept (call $qjs_get_string_len (local.get 0) (local.get 1)))
  global.get $kept)
"""


def _signature(letters: str) -> str:
    given, _, result = letters.partition(":")
    params = "".join(f" (param {FIELDS[letter]})" for letter in given)
    return params + (f" (result {FIELDS[result]})" if result else "")


def bridge_text() -> str:
    """Returns the bridge's source: WASI called from wasm (wasmtime looks for the caller's memory), and QuickJS's
    exports by name."""
    lines = ["(module"]
    for name, letters in WASI.items():
        lines.append(f'(import "wasi_snapshot_preview1" "{name}" (func $w_{name}{_signature(letters)}))')
    for name, letters in QUICKJS.items():
        lines.append(f'(import "quickjs" "{name}" (func ${name}{_signature(letters)}))')
        lines.append(f'(export "{name}" (func ${name}))')
    lines.append('(import "quickjs" "memory" (memory 1)) (export "memory" (memory 0))')
    for name, letters in WASI.items():
        passed = " ".join(f"local.get {at}" for at in range(letters.index(":")))
        lines.append(f'(func (export "{name}"){_signature(letters)} {passed} call $w_{name})')
    lines.append(_LOOPS)
    return "\n".join([*lines, ")"])
