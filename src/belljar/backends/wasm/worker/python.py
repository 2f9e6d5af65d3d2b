"""CPython as a wasm instance: how it is started, and given a program or a session's turns.

The compiled module is an interpreter that has already started; its export `turn` takes Python source. Every guest gets
an instance in which `WARM` has run, and nothing of any other guest has been in it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Any

import wasmtime

from . import memory as pages
from .wasmtime_adapter import function_of, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .deterministic import DeterministicWasi
    from .messages import ClockAndSeed, Facts, Request, Surroundings

    Output = Callable[[bytes], int]

MPL_DATA = "/usr/local/lib/python315.zip/matplotlib/mpl-data"  # the path that matplotlib computes for itself

# Defines what `python3 main.py` does in an interpreter that has already started. Frames of this text are not shown.
WARM = """
import io, os, sys
def stream(fd, errors, io=io):  # as with `python3 -u`: what was printed is not lost when time is up
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", errors, "\\n", write_through=True)
sys.stdout = sys.__stdout__ = stream(1, "strict")
sys.stderr = sys.__stderr__ = stream(2, "backslashreplace")
del stream, io
os.environ.clear()
os.environ.update({env!r})
os.chdir("/workspace")
def _belljar_place(place):
    for name in place["unset"]:
        os.environ.pop(name, None)
    os.environ.update(place["env"])
    if place["cwd"] != "/workspace":
        os.chdir(place["cwd"])
    for name in ("random", "numpy.random"):  # imported by a profile: its numbers would be the same in every run
        if name in sys.modules:
            sys.modules[name].seed()
def _belljar_start(place, code):
    import os, sys
    main = place["main"]
    _belljar_place(place)
    sys.argv[:] = [main, *place["args"]]
    sys.path[:0] = [os.path.dirname(main), *filter(None, place["env"].get("PYTHONPATH", "").split(":"))]
    figures = None
    if "BELLJAR_FIGURES" in os.environ:
        import sitecustomize as figures  # the host's, for code that draws
    usual = {{name: None for name in ("__doc__", "__package__", "__loader__", "__spec__")}}
    usual |= {{"__name__": "__main__", "__file__": main, "__builtins__": __builtins__}}
    scope = sys.modules["__main__"].__dict__
    scope.clear()
    scope.update(usual)
    try:
        if code is None:
            with open(main, "rb") as file:
                code = file.read()
        exec(compile(code, main, "exec"), scope)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        trace = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None
    finally:
        if figures:
            figures.keep_last()
"""
# A session: the agent's source becomes a module, and every turn asks the host for its request by `_host.call`.
SESSION = """
import sys, types
_belljar_place({place!r})
sys.path.insert(0, {place!r}["cwd"])
_belljar = types.ModuleType("_belljar_session")
exec(compile({agent!r}, "session_agent.py", "exec"), _belljar.__dict__)
"""
TURN = "_belljar.take_turn()"
INLINE_BYTES = 1 << 16  # of code that is handed over; longer code is read from its file
_U32 = 0xFFFFFFFF


class PythonInstance:
    """One interpreter and the store that holds it."""

    def __init__(self, store: wasmtime.Store, exports: Mapping[str, Any]) -> None:
        self.store = store
        self.memory: wasmtime.Memory = memory_of(exports)
        self.inherited: Sequence[int] = ()  # pages that were mapped from a copy
        self._allocate = function_of(exports, "host_alloc")
        self._turn = function_of(exports, "turn")

    def turn(self, source: str) -> int:
        """Runs Python source, and returns its exit status.

        Raises:
            wasmtime.WasmtimeError, wasmtime.Trap: the guest was stopped.
        """
        code = source.encode()
        place = self._allocate(self.store, len(code)) & _U32
        self.memory.write(self.store, code, place)
        return int(self._turn(self.store, place, len(code))) & 0xFF

    def size(self) -> int:
        """Returns how many bytes of linear memory it has."""
        return self.memory.data_len(self.store)

    def close(self) -> None:
        self.store.close()


class Python:
    """Makes instances of CPython in one engine, and runs guests in them."""

    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module, facts: Facts) -> None:
        self._engine = engine
        self._module = module
        self._facts = facts
        self._image = _kept_image(facts)
        self._linker = self._new_linker()
        self._deterministic: DeterministicWasi | None = None
        self._on_call: Callable[[bytes], bytes] | None = None  # answers the agent of the session whose turn it is

    def _new_linker(self) -> wasmtime.Linker:
        linker = wasmtime.Linker(self._engine)
        linker.define_wasi()
        i32 = wasmtime.ValType.i32()
        linker.define_func("host", "call", wasmtime.FuncType([i32] * 4, [i32]), self._call, access_caller=True)
        return linker

    def _call(self, caller: wasmtime.Caller, place: int, length: int, out_place: int, out_length: int) -> int:
        """Answers the guest's `_host.call(data) -> bytes`: 0, or -1 where there is no session, -2 for an error."""
        if self._on_call is None:
            return -1
        memory = memory_of(caller)
        place, length = place & _U32, length & _U32
        if place + length > memory.data_len(caller):
            return -2
        answer = self._on_call(bytes(memory.read(caller, place, place + length)))
        at = function_of(caller, "host_alloc")(caller, len(answer)) & _U32
        if not at:
            return -2
        memory.write(caller, answer, at)
        for where, number in ((out_place, at), (out_length, len(answer))):
            memory.write(caller, struct.pack("<I", number), where & _U32)
        return 0

    # --- instances ---

    def deterministic_linker(self, mode: ClockAndSeed) -> wasmtime.Linker:
        """Returns the linker of a deterministic run."""
        from .deterministic import DeterministicState, DeterministicWasi

        if self._deterministic is None:
            self._deterministic = DeterministicWasi(self._engine, self._new_linker())
        self._deterministic.state = DeterministicState(**mode)
        return self._deterministic.linker

    def fresh(self, store: wasmtime.Store, linker: wasmtime.Linker | None = None) -> PythonInstance:
        """Returns an instance in which `WARM` has run: a copy of another's memory, which is ten times as fast."""
        if self._image is None:
            self._image = self._warm_image()
        return self.copied(store, self._image, linker)

    def warmed(
        self, store: wasmtime.Store, around: Surroundings, linker: wasmtime.Linker | None = None
    ) -> PythonInstance:
        """Returns an instance in which `WARM` is run now: it then knows these folders, and no others."""
        instance = self._instance(store, linker)
        self.surround(store, around, os.devnull, len)
        if instance.turn(WARM.format(env=self._facts["env"])):
            raise RuntimeError("the interpreter does not start")
        return instance

    def copied(
        self, store: wasmtime.Store, copy: pages.MemoryCopy, linker: wasmtime.Linker | None = None
    ) -> PythonInstance:
        """Returns an instance that goes on from a copy of another's memory."""
        instance = self._instance(store, linker)
        copy.lay(instance.memory, store)
        instance.inherited = copy.mapped
        return instance

    def _instance(self, store: wasmtime.Store, linker: wasmtime.Linker | None) -> PythonInstance:
        return PythonInstance(store, (linker or self._linker).instantiate(store, self._module).exports(store))

    def _warm_image(self) -> pages.MemoryCopy:
        """Runs `WARM` once, and keeps what it wrote. The folders are those of every guest, and empty."""
        empty = f"{self._facts['private']}/.empty"
        os.makedirs(empty, exist_ok=True)
        around: Surroundings = {
            "env": self._facts["env"], "folders": [(empty, "/workspace", False), (empty, "/tmp", False)],
            "stdin": os.devnull,
        }  # fmt: skip
        with contextlib.closing(wasmtime.Store(self._engine)) as store:
            store.set_epoch_deadline(1)
            store.set_fuel(2**62)
            instance = self.warmed(store, around)
            written = pages.changed(instance.memory, store, self.pristine)
            fd = _unnamed_file()
            pages.copy_out(instance.memory, store, written, fd)
            return pages.MemoryCopy(instance.size(), len(written), fd)

    def pristine(self) -> bytes:
        """Returns a fresh instance's memory, for systems that cannot tell which pages were written."""
        store = wasmtime.Store(self._engine)
        return bytes(pages.view(self._instance(store, None).memory, store))

    def surround(self, store: wasmtime.Store, around: Surroundings, stdout: str, stderr: Output) -> None:
        """Gives a guest its folders and streams, and nothing else. The folders' order is that of every copy.

        Args:
            store: of the guest.
            around: its variables, folders and stdin.
            stdout: the file that it is written to.
            stderr: is called with what the guest writes there.
        """
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python3"]
        wasi.env = sorted(around["env"].items())
        wasi.preopen_dir(self._facts["library"], "/usr/local/lib", False)
        wasi.preopen_dir(self._facts["fonts"], MPL_DATA, False)
        for folder, place, write in around["folders"]:
            wasi.preopen_dir(folder, place, write)
        wasi.stdin_file = around["stdin"]
        wasi.stdout_file, wasi.stderr_custom = stdout, stderr
        store.set_wasi(wasi)

    # --- what runs in them ---

    def start(self, instance: PythonInstance, request: Request) -> int:
        """Runs a program, as `python3 main.py` would."""
        place = self._place(request)
        place |= {"main": request["main"], "args": list(request.get("args", ()))}
        code = request.get("code")
        if code is not None and len(code) > INLINE_BYTES:
            code = None
        return instance.turn(f"_belljar_start({place!r}, {code!r})")

    def open_session(self, instance: PythonInstance, request: Request) -> int:
        """Makes the session's agent ready for turns."""
        return instance.turn(SESSION.format(place=self._place(request), agent=request["agent"]))

    def import_modules(self, instance: PythonInstance, modules: Sequence[str]) -> int:
        return instance.turn(f"import {', '.join(modules)}") if modules else 0

    def _place(self, request: Request) -> dict[str, Any]:
        """Returns what differs from what `WARM` set; setting a variable costs a guest as much as a print."""
        usual, env = self._facts["env"], request["env"]
        changed = {name: value for name, value in env.items() if usual.get(name) != value}
        return {"env": changed, "unset": [name for name in usual if name not in env], "cwd": request["cwd"]}

    def take_turn(self, instance: PythonInstance, request: bytes, hear: Callable[[bytes], None]) -> int:
        """Runs one turn of a session: the agent asks for its request, and then tells what it displayed and how it
        ended."""

        def answer(said: bytes) -> bytes:
            if said == b"turn?":
                return request
            hear(said)
            return b"ok"

        self._on_call = answer
        try:
            return instance.turn(TURN)
        finally:
            self._on_call = None


def _kept_image(facts: Facts) -> pages.MemoryCopy | None:
    """Opens the copy of what `WARM` writes that set-up kept. Without one, the worker makes its own when it starts."""
    kept = facts["image"]
    return pages.MemoryCopy(kept["size"], kept["pages"], os.open(kept["path"], os.O_RDONLY)) if kept else None


def _unnamed_file() -> int:
    """Opens a file that has no name, so that nothing stays behind, and takes none of the guest's disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("belljar-image")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
