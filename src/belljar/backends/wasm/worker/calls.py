"""The calls from Python into wasm: QuickJS's exports, WASI by way of the bridge, and how one is made quickly."""

import ctypes

import wasmtime
from wasmtime import _bindings as raw
from wasmtime._func import maybe_raise_last_exn

# i: i32, I: i64, F: f64; what comes after the colon is the result.
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

OWN = {"drain": ":i", "text": "ii:i"}
FIELDS = {"i": "i32", "I": "i64", "F": "f64"}
KINDS = {"i": 0, "I": 1, "F": 3}
SIGNATURES = WASI | QUICKJS | OWN


class OutOfMemory(wasmtime.WasmtimeError):
    """The guest ran into its memory limit and did not recover."""


class Exit(Exception):
    """The guest is done; raised through the engine, so that nothing of it runs any more."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code & 0xFF


class Refused(Exception):
    """A file operation failed, with one of WASI's numbers."""

    def __init__(self, number):
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


def _signature(text):
    given, _, result = text.partition(":")
    params = "".join(f" (param {FIELDS[letter]})" for letter in given)
    return params + (f" (result {FIELDS[result]})" if result else "")


def bridge_text():
    """The bridge: WASI called from wasm (wasmtime looks for the caller's memory), and QuickJS's exports by name."""
    lines = ["(module"]
    for name, types in WASI.items():
        lines.append(f'(import "wasi_snapshot_preview1" "{name}" (func $w_{name}{_signature(types)}))')
    for name, types in QUICKJS.items():
        lines.append(f'(import "quickjs" "{name}" (func ${name}{_signature(types)}))')
        lines.append(f'(export "{name}" (func ${name}))')
    lines.append('(import "quickjs" "memory" (memory 1)) (export "memory" (memory 0))')
    for name, types in WASI.items():
        passed = " ".join(f"local.get {at}" for at in range(types.index(":")))
        lines.append(f'(func (export "{name}"){_signature(types)} {passed} call $w_{name})')
    lines.append(_LOOPS)
    return "\n".join([*lines, ")"])


class Call:
    """One exported function with its arguments laid out once: the package's own way asks for all types at each call."""

    def __init__(self, store, func, types):
        given, _, result = types.partition(":")
        self._store = store
        self._func = func._func
        self._args = (raw.wasmtime_val_t * len(given))()
        self._results = (raw.wasmtime_val_t * len(result))()
        self._fields = tuple((arg.of, FIELDS[letter]) for arg, letter in zip(self._args, given, strict=True))
        for arg, letter in zip(self._args, given, strict=True):
            arg.kind = KINDS[letter]
        self._result = FIELDS[result] if result else None

    def __call__(self, *args):
        for (place, field), value in zip(self._fields, args, strict=True):
            setattr(place, field, value)
        trap = ctypes.POINTER(raw.wasm_trap_t)()
        error = raw.wasmtime_func_call(
            self._store._context(), ctypes.byref(self._func), self._args, len(self._args),
            self._results, len(self._results), ctypes.byref(trap),
        )  # fmt: skip
        if error or trap:
            problem = wasmtime.WasmtimeError._from_ptr(error) if error else wasmtime.Trap._from_ptr(trap)
            maybe_raise_last_exn()  # what one of our own callbacks raised comes first
            raise problem
        if self._result is None:
            return None
        value = getattr(self._results[0].of, self._result)
        return value & 0xFFFFFFFF if self._result == "i32" else value
