"""JavaScript, and TypeScript by way of a type stripper, on QuickJS as WebAssembly: a fresh engine for each run.

QuickJS has no files of its own here (`quickjs.wasm` imports no `path_open`), so files are served by our callbacks.
They never touch a path with this process's own system calls. Each one is a call of wasmtime's WASI, made by a second,
tiny wasm instance (the bridge) that shares the engine's memory: path, data and answer stay in the guest's memory, and
wasmtime resolves every path beneath the preopened /workspace and /tmp, links and `..` included. A path that lies
elsewhere has no preopened folder and is refused before that. Contents lie in the guest's memory too: its limit holds.

The prelude (our JavaScript) is evaluated once, in an instance that never sees a guest. What it left in linear memory is
copied into each fresh instance, and `Math.random` gets a new seed there, from WASI's `random_get`. Nothing flows back.

The store must allow two instances (`store.set_limits(..., instances=2)`).
"""

import contextlib
import os

import wasmtime

from .calls import Exit, OutOfMemory, bridge_text
from .quickjs import Guest

# In this order: each uses those before it.
PRELUDE = ("inspect", "web", "url", "fs", "builtins", "locale", "console", "modules", "prelude")
TYPESCRIPT = ("sucrase.js", "typescript.js")
TYPED = (".ts", ".mts", ".cts", ".tsx")
FATAL = b"FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory\n"
OVERFLOWN = wasmtime.TrapCode.STACK_OVERFLOW
OVERFLOW = b"RangeError: Maximum call stack size exceeded\n\nNode.js v22.0.0 (QuickJS)\n"

ENV = {
    "host_get_timezone_offset": (2, 1), "host_interrupt": (0, 1), "host_promise_rejection": (3, 0),
    "host_module_normalize": (2, 1), "host_module_load": (2, 1), "host_call": (5, 1),
}  # fmt: skip


class Image:
    """The memory of an engine that is ready to start, as the parts that a fresh instance does not have."""

    def __init__(self, memory, blank, seed, scratch, entry):
        self.size, self.seed, self.scratch, self.entry = len(memory), seed, scratch, entry
        self.parts = list(_differences(memory, blank.ljust(len(memory), b"\0")))


def _differences(memory, blank, page=4096):
    start = None
    for at in range(0, len(memory) + 1, page):
        differs = memory[at : at + page] != blank[at : at + page]
        if differs and start is None:
            start = at
        elif not differs and start is not None:
            yield start, memory[start:at]
            start = None


class JavaScript:
    """The engine of one worker. Serves one run after the other, never two at once."""

    def __init__(self, engine, module, folders, linker=None):
        self._engine = engine
        self._module = module
        self._folders = folders
        self._bridge = wasmtime.Module(engine, bridge_text())
        self._linker = linker or wasmtime.Linker(engine)
        if linker is None:
            self._linker.define_wasi()
        self._linker.allow_shadowing = True  # the instances of each run take the place of those before
        self._guest = None
        i32 = wasmtime.ValType.i32()
        for name, (given, results) in ENV.items():
            kind = wasmtime.FuncType([i32] * given, [i32] * results)
            self._linker.define_func("env", name, kind, self._forward(name))
        self._images = {}
        self._image("javascript")

    def _forward(self, name):
        def answer(*args):
            return getattr(self._guest, name)(*(arg & 0xFFFFFFFF for arg in args))

        return answer

    def warm(self, language):
        """Makes ready what the first run of a language would otherwise wait for."""
        self._image(language)

    def _image(self, language):
        """The memory of an engine that has evaluated our own files; TypeScript's is made when it is first asked for."""
        if language not in self._images:
            names = [f"{name}.js" for name in PRELUDE]
            names += TYPESCRIPT if language == "typescript" else ()
            store = wasmtime.Store(self._engine)
            try:
                self._images[language] = self._boot(store, [self._read(name) for name in names])
            finally:
                store.close()
        return self._images[language]

    def _read(self, name):
        for folder in self._folders:
            path = os.path.join(folder, name)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    return name, file.read()
        raise FileNotFoundError(f"{name} is in none of the folders of scripts")

    def _boot(self, store, sources):
        store.set_wasi(wasmtime.WasiConfig())
        store.set_epoch_deadline(1 << 62)
        with contextlib.suppress(wasmtime.WasmtimeError):  # an engine that counts none
            store.set_fuel(1 << 62)
        guest = self._open(store)
        blank = guest.copy()
        guest.boot(sources)
        memory = guest.copy()
        guest.draw()
        return Image(memory, blank, seed_address(memory, guest.copy()), guest.scratch, guest.entry)

    def _open(self, store):
        """A fresh instance and its bridge."""
        instance = self._linker.instantiate(store, self._module)
        self._linker.define_instance(store, "quickjs", instance)
        bridge = self._linker.instantiate(store, self._bridge)
        self._linker.define_instance(store, "bridge", bridge)
        self._guest = Guest(store, self._linker)
        return self._guest

    def run(self, store, request, write):
        """Runs `request["main"]` to the end of its event loop; returns its exit code."""
        typed = request.get("language") == "typescript" or request["main"].endswith(TYPED)
        image = self._image("typescript" if typed else "javascript")
        try:
            guest = self._open(store)
            guest.restore(image)
            guest.write = write
            return guest.live(request)
        except Exit as end:
            return end.code
        except OutOfMemory:
            write("stderr", FATAL)
            raise
        except (wasmtime.Trap, RecursionError) as error:
            if getattr(error, "trap_code", OVERFLOWN) is not OVERFLOWN:
                raise
            write("stderr", OVERFLOW)
            return 1
        finally:
            self._guest = None


def seed_address(before, after):
    """Where QuickJS keeps the state of `Math.random`: the one word that one call turned as its generator does."""
    found = []
    for at in range(0, len(before), 8):
        old = before[at : at + 8]
        if old != after[at : at + 8] and int.from_bytes(after[at : at + 8], "little") == _next_state(old):
            found.append(at)
    if len(found) != 1:
        raise wasmtime.WasmtimeError("this QuickJS keeps the state of Math.random in an unknown way")
    return found[0]


def _next_state(word):
    """xorshift64, with the shifts that QuickJS uses."""
    state = int.from_bytes(word, "little")
    state ^= state >> 12
    state ^= (state << 25) & 0xFFFFFFFFFFFFFFFF
    return state ^ (state >> 27)
