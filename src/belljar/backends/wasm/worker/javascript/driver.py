"""JavaScript, and TypeScript by way of a type stripper, on QuickJS as WebAssembly: a fresh engine for each run.

QuickJS has no files of its own here (`quickjs.wasm` imports no `path_open`), so files are served by our callbacks.
Each one is a call of wasmtime's WASI, made by a second, tiny wasm instance (the bridge) that shares the engine's
memory: path, data and answer stay in the guest's memory, and its limit holds for them.

The prelude (our JavaScript) is evaluated once, in an instance that never sees a guest. What it left in linear memory is
copied into each fresh instance, and `Math.random` gets a new seed there, from WASI's `random_get`. Nothing flows back.

The store must allow two instances (`store.set_limits(..., instances=2)`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import wasmtime

from .callbacks import IMPORTS
from .calls import GuestExit, OutOfMemory, bridge_text
from .image import Image, seed_address
from .instance import QuickJsInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..messages import Request
    from .operations import Write

_PRELUDE = (
    "inspect",
    "web",
    "url",
    "fs",
    "builtins",
    "locale",
    "console",
    "modules",
    "prelude",
)  # each uses the former
_TYPESCRIPT = ("sucrase.js", "typescript.js")
_TYPED = (".ts", ".mts", ".cts", ".tsx")
_OUT_OF_MEMORY = b"FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory\n"
_OVERFLOW = b"RangeError: Maximum call stack size exceeded\n\nNode.js v22.0.0 (QuickJS)\n"
_STACK_OVERFLOW = wasmtime.TrapCode.STACK_OVERFLOW
_U32 = 0xFFFFFFFF


class JavaScript:
    """The engine of one worker. Serves one run after the other, never two at once."""

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, folders: Sequence[str],
        linker: wasmtime.Linker | None = None,
    ) -> None:  # fmt: skip
        """`folders`: where our scripts are; `linker`: one that has WASI, if it is not the usual one."""
        self._engine = engine
        self._module = module
        self._folders = folders
        self._bridge = wasmtime.Module(engine, bridge_text())
        self._linker = linker or wasmtime.Linker(engine)
        if linker is None:
            self._linker.define_wasi()
        self._linker.allow_shadowing = True  # the instances of each run take the place of those before
        self._instance: QuickJsInstance | None = None
        i32 = wasmtime.ValType.i32()
        for name, (given, results) in IMPORTS.items():
            kind = wasmtime.FuncType([i32] * given, [i32] * results)
            self._linker.define_func("env", name, kind, self._forward(name))
        self._images: dict[str, Image] = {}
        self.warm("javascript")

    def _forward(self, name: str) -> Callable[..., Any]:
        def answer(*args: int) -> Any:
            assert self._instance
            return getattr(self._instance.callbacks, name)(*(arg & _U32 for arg in args))

        return answer

    def warm(self, language: str) -> Image:
        """Returns the image of a language; TypeScript's is made when it is first asked for."""
        if language not in self._images:
            names = [f"{name}.js" for name in _PRELUDE]
            names += _TYPESCRIPT if language == "typescript" else ()
            store = wasmtime.Store(self._engine)
            try:
                self._images[language] = self._boot(store, [(name, self._read(name)) for name in names])
            finally:
                store.close()
        return self._images[language]

    def _read(self, name: str) -> bytes:
        for folder in self._folders:
            path = os.path.join(folder, name)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    return file.read()
        raise FileNotFoundError(f"{name} is in none of the folders of scripts")

    def _boot(self, store: wasmtime.Store, sources: Sequence[tuple[str, bytes]]) -> Image:
        store.set_wasi(wasmtime.WasiConfig())
        store.set_epoch_deadline(1 << 62)
        with contextlib.suppress(wasmtime.WasmtimeError):  # an engine that counts none
            store.set_fuel(1 << 62)
        instance = self._open(store)
        blank = instance.memory()
        instance.boot(sources)
        memory = instance.memory()
        instance.step_random()
        js = instance.js
        return Image(memory, blank, seed_address(memory, instance.memory()), js.scratch, js.entry)

    def _open(self, store: wasmtime.Store, write: Write | None = None) -> QuickJsInstance:
        """Returns a fresh instance with its bridge."""
        instance = self._linker.instantiate(store, self._module)
        self._linker.define_instance(store, "quickjs", instance)
        bridge = self._linker.instantiate(store, self._bridge)
        self._linker.define_instance(store, "bridge", bridge)
        self._instance = QuickJsInstance(store, self._linker, write)
        return self._instance

    def run(self, store: wasmtime.Store, request: Request, write: Write) -> int:
        """Runs `request["main"]` to the end of its event loop; returns its exit code.

        Raises:
            OutOfMemory: it ran into its memory limit.
            wasmtime.WasmtimeError, wasmtime.Trap: it was stopped.
        """
        typed = request.get("language") == "typescript" or request["main"].endswith(_TYPED)
        image = self.warm("typescript" if typed else "javascript")
        try:
            instance = self._open(store, write)
            instance.restore(image)
            instance.run(request)
        except GuestExit as end:
            return end.code
        except OutOfMemory:
            write("stderr", _OUT_OF_MEMORY)
            raise
        except (wasmtime.Trap, RecursionError) as error:
            if getattr(error, "trap_code", _STACK_OVERFLOW) is not _STACK_OVERFLOW:
                raise
            write("stderr", _OVERFLOW)
            return 1
        finally:
            self._instance = None
