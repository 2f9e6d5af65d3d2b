"""Runs guests as WebAssembly, one after the other, each in an instance of its own that is thrown away.

Started inside the native jail with `wasmtime` and the compiled interpreter in reach, and nothing else. One
request for each line of JSON on stdin:

    in   {"run": 1, "root": "/tmp/bj-1", "main": "/workspace/main.py", "env": {...}, "memory": 536870912, ...}
    out  {"stream": "stdout", "data": "<base64>"}        as the guest writes it
    out  {"done": 1, "exit_code": 0, "trap": "", "memory": 41943040}

The guest never talks to this program: its only calls are those of WASI, answered by wasmtime.
"""

import base64
import json
import math
import os
import sys
import threading
import time

import wasmtime

# What `python3 main.py` does, in an interpreter that has already started. Frames of this text are not shown.
START = """
import os, sys
os.chdir({cwd!r})
sys.argv[:] = [{main!r}]
sys.path.insert(0, os.path.dirname({main!r}))
def _start():
    with open({main!r}, "rb") as file:
        code = file.read()
    scope = {{"__name__": "__main__", "__file__": {main!r}}}
    sys.modules["__main__"].__dict__.update(scope)
    try:
        exec(compile(code, {main!r}, "exec"), scope)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        trace = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None
_start()
"""


class Worker:
    def __init__(self, module, library):
        config = wasmtime.Config()
        config.epoch_interruption = True
        self._engine = wasmtime.Engine(config)
        self._module = wasmtime.Module.deserialize_file(self._engine, module)
        self._library = library
        self._linker = wasmtime.Linker(self._engine)
        self._linker.define_wasi()
        i32 = wasmtime.ValType.i32()
        self._linker.define_func("host", "call", wasmtime.FuncType([i32] * 4, [i32]), lambda *_: -1)
        self._bell = threading.Condition()
        self._deadline = math.inf
        threading.Thread(target=self._ring, daemon=True).start()

    def _ring(self):
        """Interrupts the guest that is running when its deadline has passed."""
        with self._bell:
            while True:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._deadline = math.inf
                    self._engine.increment_epoch()
                else:
                    self._bell.wait(None if left == math.inf else left)

    def _set_bell(self, deadline):
        with self._bell:
            self._deadline = deadline
            self._bell.notify()

    def send(self, **frame):
        view = memoryview(json.dumps(frame).encode() + b"\n")
        while view:
            view = view[os.write(1, view) :]

    def run(self, request):
        store = wasmtime.Store(self._engine)
        try:
            return self._drive(store, request)
        finally:
            self._set_bell(math.inf)
            store.close()

    def _drive(self, store, request):
        store.set_limits(memory_size=request["memory"], tables=64, instances=1, memories=1)
        store.set_epoch_deadline(1)
        self._set_bell(time.monotonic() + request["timeout"])
        store.set_wasi(self._wasi(request))
        exit_code, trap, memory = None, "", 0
        try:
            exports = self._linker.instantiate(store, self._module).exports(store)
            code = START.format(cwd=request["cwd"], main=request["main"]).encode()
            place = exports["host_alloc"](store, len(code)) & 0xFFFFFFFF
            exports["memory"].write(store, code, place)
            exit_code = exports["turn"](store, place, len(code)) & 0xFF
            memory = exports["memory"].data_len(store)
        except wasmtime.ExitTrap as end:
            exit_code = end.code
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            trap = str(error)[:2000]
        return {"exit_code": exit_code, "trap": trap, "memory": memory}

    def _wasi(self, request):
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python3"]
        wasi.env = sorted(request["env"].items())
        wasi.preopen_dir(self._library, "/usr/local/lib", False)
        for folder in ("workspace", "tmp"):
            wasi.preopen_dir(f"{request['root']}/{folder}", f"/{folder}", True)
        wasi.stdin_file = request["stdin"]
        wasi.stdout_custom = self._stream("stdout")
        wasi.stderr_custom = self._stream("stderr")
        return wasi

    def _stream(self, name):
        def write(data):
            self.send(stream=name, data=base64.b64encode(bytes(data)).decode())
            return len(data)

        return write


def main():
    worker = Worker(sys.argv[1], sys.argv[2])
    worker.send(ready=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        worker.send(done=request["run"], **worker.run(request))


if __name__ == "__main__":
    main()
