"""The life of one QuickJS instance: booted once for its image, or restored from it and run to its end."""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, NoReturn

import wasmtime

from .callbacks import Callbacks
from .calls import GuestExit, OutOfMemory
from .files import FileOperations
from .operations import BasicOperations
from .quickjs import SCRATCH_BYTES, QuickJs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..messages import Request
    from .image import Image
    from .operations import Write

_ENTRIES = ("start", "turn", "settled", "normalize", "source")  # that our prelude defines
# QuickJS counts its stack in linear memory, wasmtime limits the native one to 512 KiB: with more than this,
# plain recursion would end in a trap and not in a RangeError.
_STACK_BYTES = 160 * 1024
_NAP_SECONDS = 0.02  # between two looks at the deadline while the guest only waits
_MONOTONIC = 1  # a clock of WASI


class QuickJsInstance:
    """One instance with everything that answers it. `write` takes its output; without it, it is one of our own."""

    def __init__(self, store: wasmtime.Store, linker: wasmtime.Linker, write: Write | None = None) -> None:
        self.js: QuickJs = QuickJs(store, linker)
        self._write = write
        basic = BasicOperations(self.js, write or _refuse_output)
        self._operations = {**basic.table(), **FileOperations(self.js).table()}
        self.callbacks: Callbacks = Callbacks(self.js, self._operations, self._must)

    def boot(self, sources: Iterable[tuple[str, bytes]]) -> None:
        """Starts the engine and evaluates our own files."""
        js = self.js
        js.call("_initialize")
        if js.call("qjs_init"):
            raise wasmtime.WasmtimeError("QuickJS did not start")
        js.scratch = js.allocate(SCRATCH_BYTES)
        for name in ("qjs_set_module_loader", "qjs_set_promise_rejection_handler"):
            js.call(name, 1)
        js.call("qjs_set_max_stack_size", _STACK_BYTES)
        entry = {"nothing": js.new_undefined()}
        js.entry = entry
        host, core = js.call("qjs_new_object"), js.call("qjs_new_object")
        self._define_operations(host)
        for file, code in sources:
            self._must(js.apply(self._must(js.evaluate(code, f"belljar:{file}".encode())), host, core))
        for name in _ENTRIES:
            entry[name] = js.call("qjs_get_prop_string", core, js.place(name.encode()))

    def _define_operations(self, host: int) -> None:
        for name in self._operations:
            label = self.js.place(name)
            function = self.js.call("qjs_new_host_function", label, len(name), 0)
            self.js.call("qjs_set_prop_string", host, label, function)

    def memory(self) -> bytes:
        """Returns a copy of all of its memory."""
        return self.js.read(0, self.js.size())

    def step_random(self) -> None:
        """Makes `Math.random` take one step."""
        self._must(self.js.evaluate(b"Math.random()", b"belljar:seed"))

    def restore(self, image: Image) -> None:
        """Makes this fresh instance what the booted one was, with a new seed."""
        js = self.js
        missing = image.size - js.size()
        if missing > 0:
            js.grow(missing >> 16)
        base = js.base()
        for start, data in image.parts:
            ctypes.memmove(base + start, data, len(data))
        js.scratch, js.entry = image.scratch, image.entry
        js.call("random_get", image.seed, 8)
        if not js.word(image.seed, 8):
            js.write(image.seed, b"\1")  # the generator would only ever say zero

    def run(self, request: Request) -> NoReturn:
        """Runs a program and its event loop; the prelude's `exit` ends it.

        Raises:
            GuestExit: it is done.
            OutOfMemory: it ran into its memory limit.
            wasmtime.WasmtimeError, wasmtime.Trap: it was stopped.
        """
        js = self.js
        facts = {name: request.get(name, ()) for name in ("main", "args", "cwd", "env")}
        self._must(js.apply(js.entry["start"], js.new_string(json.dumps(facts).encode())))
        while True:
            if js.call("drain"):
                self._give_up()
            wait = js.call("qjs_get_float64", self._must(js.apply(js.entry["turn"])))
            if wait > 0:
                self._sleep(wait / 1000)

    def _sleep(self, seconds: float) -> None:
        """Sleeps by WASI, so that whoever replaces its clock replaces this too; in naps, after each of which wasm looks
        at its deadline."""
        scratch = self.js.scratch
        while seconds > 0:
            nap = min(seconds, _NAP_SECONDS)
            clock = _MONOTONIC.to_bytes(8, "little") + int(nap * 1e9).to_bytes(8, "little")
            self.js.write(scratch, bytes(16) + clock + bytes(16))
            self.js.call("poll_oneoff", scratch, scratch + 64, 1, scratch + 128)
            seconds -= nap

    def _must(self, box: int) -> int:
        """Returns the box, unless it is an exception: then the guest is beyond help."""
        if self.js.is_exception(box):
            self._give_up()
        return box

    def _give_up(self) -> NoReturn:
        error = self.js.call("qjs_get_exception")
        message = self.js.text(error).decode(errors="replace")
        if "out of memory" in message or self._is_exhausted():
            raise OutOfMemory
        if self._write:
            self._write("stderr", f"Uncaught {message}\n\nNode.js v22.0.0 (QuickJS)\n".encode())
            raise GuestExit(1)
        raise wasmtime.WasmtimeError(f"the prelude failed: {message}")

    def _is_exhausted(self) -> bool:
        """Says whether the guest's memory cannot grow any more: our prelude, which handles every error of the guest,
        then fails with whatever error a missing byte happens to cause."""
        try:
            self.js.grow(1)
        except wasmtime.WasmtimeError:
            return True
        return False


def _refuse_output(stream: str, data: bytes) -> None:
    raise wasmtime.WasmtimeError("the prelude printed something while it was booted")
