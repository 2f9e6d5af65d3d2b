"""CPython as a wasm instance: started, warmed, given a program or a session's turns.

The compiled module is an interpreter that has already started; its export `turn` takes Python source. A *spare* is an
instance in which `WARM` has run, made while nobody waits; nothing of any guest has been in it.
"""

import contextlib
import json
import os
import struct
import tempfile

import wasmtime

from . import memory as pages

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
    sys.argv[:] = [main]
    sys.path[:0] = [os.path.dirname(main), *filter(None, place["env"].get("PYTHONPATH", "").split(":"))]
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
"""
# A session: the agent's source becomes a module, and every turn asks the host for its request through the door.
SESSION = """
import sys, types
_belljar_place({place!r})
sys.path.insert(0, {place!r}["cwd"])
_belljar = types.ModuleType("_belljar_session")
exec(compile({agent!r}, "session_agent.py", "exec"), _belljar.__dict__)
"""
TURN = "_belljar.take_turn()"
INLINE = 1 << 16  # code up to this size is handed over, longer code is read from its file


class Instance:
    """One interpreter and the store that holds it."""

    def __init__(self, store, exports):
        self.store = store
        self._exports = exports
        self.memory = exports["memory"]
        self.inherited = ()

    def turn(self, source):
        """Its exit status; a trap is raised."""
        code = source.encode()
        place = self._exports["host_alloc"](self.store, len(code)) & 0xFFFFFFFF
        self.memory.write(self.store, code, place)
        return self._exports["turn"](self.store, place, len(code)) & 0xFF

    def size(self):
        return self.memory.data_len(self.store)

    def close(self):
        self.store.close()


class Python:
    def __init__(self, engine, module, facts):
        self._engine = engine
        self._module = module
        self._facts = facts
        self._image = None  # what `WARM` wrote
        self.linker = self._linker()
        self._shadows = None
        self.door = None  # answers what the session's agent asks; without it, nobody is there

    def _linker(self):
        linker = wasmtime.Linker(self._engine)
        linker.define_wasi()
        i32 = wasmtime.ValType.i32()
        linker.define_func("host", "call", wasmtime.FuncType([i32] * 4, [i32]), self._call, access_caller=True)
        return linker

    def _call(self, caller, place, length, out_place, out_length):
        """The guest's `_host.call(frame) -> bytes`: 0, or -1 if nobody is there, -2 if it cannot be."""
        if self.door is None:
            return -1
        memory = caller.get("memory")
        place, length = place & 0xFFFFFFFF, length & 0xFFFFFFFF
        if place + length > memory.data_len(caller):
            return -2
        answer = self.door(bytes(memory.read(caller, place, place + length)))
        at = caller.get("host_alloc")(caller, len(answer)) & 0xFFFFFFFF
        if not at:
            return -2
        memory.write(caller, answer, at)
        for where, number in ((out_place, at), (out_length, len(answer))):
            memory.write(caller, struct.pack("<I", number), where & 0xFFFFFFFF)
        return 0

    def fixed(self, seed, start):
        """The linker of a run without chance; the shadows are made when the first one comes."""
        from .deterministic import Fixed, Shadows

        if self._shadows is None:
            self._shadows = Shadows(self._engine, self._linker())
        self._shadows.world = Fixed(seed, start)
        return self._shadows.linker

    def fresh(self, store, linker=None):
        """An instance in which `WARM` has run: a copy of the first one's memory, which is ten times as fast."""
        if self._image is None:
            self._image = self._warm()
        return self.copied(store, self._image, linker)

    def warmed(self, store, world, linker=None):
        """An instance in which `WARM` is run now: it then knows these folders, and no others."""
        instance = Instance(store, (linker or self.linker).instantiate(store, self._module).exports(store))
        self.place(store, world, (len, len))
        if instance.turn(WARM.format(env=self._facts["env"])):
            raise RuntimeError("the interpreter does not start")
        return instance

    def _warm(self):
        """Runs `WARM` once, and keeps what it wrote. The folders are those of every guest, and empty."""
        empty = f"{self._facts['private']}/.empty"
        os.makedirs(empty, exist_ok=True)
        world = {"env": self._facts["env"], "folders": [(empty, "/workspace", False), (empty, "/tmp", False)]}
        with contextlib.closing(wasmtime.Store(self._engine)) as store:
            store.set_epoch_deadline(1)
            store.set_fuel(2**62)
            instance = self.warmed(store, world | {"stdin": os.devnull})
            written = pages.changed(instance.memory, store, self.pristine)
            fd = _unnamed()
            pages.copy_out(instance.memory, store, written, fd)
            return pages.Copy(instance.size(), len(written), fd)

    def copied(self, store, copy, linker=None):
        """An instance that goes on from a copy of another's memory."""
        instance = Instance(store, (linker or self.linker).instantiate(store, self._module).exports(store))
        copy.lay(instance.memory, store)
        instance.inherited = copy.mapped
        return instance

    def pristine(self):
        """A fresh instance's memory, for systems that cannot tell which pages were written."""
        store = wasmtime.Store(self._engine)
        exports = self.linker.instantiate(store, self._module).exports(store)
        return bytes(pages.view(exports["memory"], store))

    def place(self, store, request, streams):
        """The guest's world: its folders, its streams, and nothing else. The order is that of every copy."""
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python3"]
        wasi.env = sorted(request["env"].items())
        wasi.preopen_dir(self._facts["library"], "/usr/local/lib", False)
        wasi.preopen_dir(self._facts["fonts"], MPL_DATA, False)
        for folder, place, write in request["folders"]:
            wasi.preopen_dir(folder, place, write)
        wasi.stdin_file = request["stdin"]
        wasi.stdout_custom, wasi.stderr_custom = streams
        store.set_wasi(wasi)

    def start(self, instance, request):
        place = self._place(request) | {"main": request["main"]}
        code = request.get("code")
        return instance.turn(f"_belljar_start({place!r}, {code if code is None or len(code) <= INLINE else None!r})")

    def open(self, instance, request):
        return instance.turn(SESSION.format(place=self._place(request), agent=request["agent"]))

    def imported(self, instance, request):
        return instance.turn(f"import {', '.join(request['modules'])}")

    def _place(self, request):
        """What differs from the world of `WARM`; setting a variable costs a guest as much as a print."""
        usual, env = self._facts["env"], request["env"]
        changed = {name: value for name, value in env.items() if usual.get(name) != value}
        return {"env": changed, "unset": [name for name in usual if name not in env], "cwd": request["cwd"]}

    def take_turn(self, instance, request, hear):
        """One turn of a session: the agent asks for it, and then tells what it displayed and how it went."""

        def door(frame):
            if frame == b"turn?":
                return json.dumps(request).encode()
            hear(frame)
            return b"ok"

        self.door = door
        try:
            return instance.turn(TURN)
        finally:
            self.door = None


def _unnamed():
    """A file that has no name, so that nothing stays behind, and takes none of the guest's disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("belljar-image")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
