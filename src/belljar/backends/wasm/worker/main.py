"""Runs guests as WebAssembly, one after the other, each in an instance of its own that is thrown away.

Started inside the native jail with `wasmtime` and the compiled modules in reach, and nothing else. stdin is a socket:
one request for each line of JSON, with file descriptors where a copy of a memory goes out or in.

    in   {"run": 1, "do": "run", "main": "/workspace/main.py", "env": {...}, "memory": 536870912, ...}
    out  {"stream": "stdout", "data": "<base64>"}        as the guest writes it
    out  {"done": 1, "exit_code": 0, "trap": "", "memory": 41943040, "fuel": 1370386, "cpu_ms": 3.1}

    do: run       a program, in a fresh instance
        open      a session: an instance that stays; then `turn` after `turn`
        measure   which pages of the session's memory were written: {"pages": 263, "size": 41943040}
        import    the same for a profile: only imports
        copy_out  those pages into the descriptor;   copy_in  a session from such a copy;   drop  the session

The guest never talks to this program: its only calls are those of WASI, answered by wasmtime, and a session's agent
through its one door.
"""

import base64
import codecs
import contextlib
import json
import math
import os
import select
import shutil
import socket
import sys
import threading
import time

import wasmtime

from . import memory as pages
from .python import Python

FOREVER = 2**63 - 1  # of fuel
FOLDERS = 2  # of a guest that was granted none
TICK = 0.01  # seconds that output waits for more, at most
CHUNK = 1 << 15
WORDS = 16 << 20  # the longest frame of a session's agent


class Bell:
    """Interrupts the guest that is running when its deadline has passed, and lets waiting output go."""

    def __init__(self, engine, flush):
        self._engine = engine
        self._flush = flush
        self._change = threading.Condition()
        self._deadline = self._output = math.inf
        threading.Thread(target=self._ring, daemon=True).start()

    def _ring(self):
        while True:
            with self._change:
                now = time.monotonic()
                due, output = self._deadline <= now, self._output <= now
                if not due and not output:
                    left = min(self._deadline, self._output) - now
                    self._change.wait(None if left == math.inf else min(left, TICK))
                    continue
                self._deadline = math.inf if due else self._deadline
                self._output = math.inf if output else self._output
            if output:
                self._flush()
            if due:
                self._engine.increment_epoch()

    def set(self, deadline=math.inf):
        with self._change:
            sooner, self._deadline = deadline < self._deadline, deadline
            if sooner:
                self._change.notify()

    def output(self):
        """Without waking anybody: most guests have ended by the next tick, and their output goes with their end."""
        self._output = time.monotonic()


class Voice:
    """Words to the host, one line of JSON each. What a guest writes waits a moment for more: a frame for every word
    of a `print` would cost more than the print."""

    def __init__(self):
        self._lock = threading.Lock()
        self._waiting = []  # (how to say it, bytes)
        self._size = 0
        self.soon = lambda: None  # asks for a flush

    def say(self, **frame):
        with self._lock:
            self._write(*self._taken(), frame)

    def hear(self, wrap, data):
        with self._lock:
            first = not self._waiting
            if not first and self._waiting[-1][0] is wrap:
                self._waiting[-1][1].append(data)
            else:
                self._waiting.append((wrap, [data]))
            self._size += len(data)
            if self._size > CHUNK:
                self._write(*self._taken())
                return
        if first:
            self.soon()

    def flush(self):
        with self._lock:
            self._write(*self._taken())

    def _taken(self):
        waiting, self._waiting, self._size = self._waiting, [], 0
        return [frame for wrap, parts in waiting if (frame := wrap(b"".join(parts)))]

    def _write(self, *frames):
        view = memoryview(b"".join(json.dumps(frame).encode() + b"\n" for frame in frames))
        while view:
            view = view[os.write(1, view) :]


def plain(name):
    return lambda data: {"stream": name, "data": base64.b64encode(data).decode()}


def turn_by_turn(name):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def wrap(data):
        text = decoder.decode(data)
        return {"words": json.dumps({"stream": name, "text": text})} if text else None

    return wrap


class Worker:
    def __init__(self, facts):
        config = wasmtime.Config()
        config.epoch_interruption = True
        config.consume_fuel = True
        self._engine = wasmtime.Engine(config)
        self.voice = Voice()
        self._bell = Bell(self._engine, self.voice.flush)
        self.voice.soon = self._bell.output
        module = wasmtime.Module.deserialize_file(self._engine, facts["python"])
        self._python = Python(self._engine, module, facts)
        self._facts = facts
        self.private, self.plain = facts["private"], facts["plain"]
        self._scripts = {}
        self._spare = None
        self._session = None
        self._profiles = {}  # name -> its copy, which came with its first use
        self._written = []
        self.unclean = ""  # why no other guest may come here
        self._leftovers = []  # what a run needs no more, and whose end nobody has to wait for

    def _streams(self, kind=plain):
        def stream(name):
            wrap = kind(name)
            return lambda data: self.voice.hear(wrap, bytes(data)) or len(data)

        return stream("stdout"), stream("stderr")

    # --- instances ---

    def _store(self, memory, fuel=FOREVER):
        store = wasmtime.Store(self._engine)
        self._limit(store, memory, fuel)
        return store

    def _limit(self, store, memory, fuel):
        """Three instances: the guest's, the bridge of JavaScript's files, and one that hides chance."""
        store.set_limits(memory_size=memory, tables=64, instances=3, memories=1)
        store.set_epoch_deadline(1)
        store.set_fuel(fuel)

    def rest(self):
        """While nobody waits: clears away the last guest, and prepares the interpreter of the next."""
        while self._leftovers:
            try:
                self._leftovers.pop()()
            except (OSError, RecursionError) as error:  # a tree too deep to remove: the next guest goes elsewhere
                self.unclean = repr(error)
        if self._spare is None and self._session is None:
            with contextlib.suppress(wasmtime.WasmtimeError):  # too little memory: whoever runs here will be told
                self._spare = self._python.fresh(self._store(self._facts["memory"]))

    def _instance(self, request, fds):
        """A fresh interpreter: the spare, a copy of a profile, or one in a world without chance."""
        fixed, profile = request.get("deterministic"), request.get("profile")
        granted = len(request["folders"]) > FOLDERS
        if not fixed and not profile and not granted and self._spare:
            spare, self._spare = self._spare, None
            return spare
        store = self._store(request["memory"])
        linker = self._python.fixed(**fixed) if fixed else None
        if granted:
            return self._python.warmed(store, request, linker)
        if fixed:
            return self._python.fresh(store, linker)
        if profile:
            for fd in fds:
                self._profiles[profile["name"]] = pages.Copy(profile["size"], profile["pages"], fd)
            return self._python.copied(store, self._profiles[profile["name"]])
        return self._python.fresh(store)

    def _drop(self):
        if self._session:
            self._session.close()
            self._session = None

    # --- what can be asked ---

    def do_run(self, request, fds):
        self._drop()
        self._lay_out(request)
        if request["language"] != "python":
            return self._run_script(request)
        instance = self._instance(request, fds)
        self._leftovers.append(instance.close)
        self._python.place(instance.store, request, self._streams())
        return self._watched(instance.store, request, lambda: self._python.start(instance, request), instance.size)

    def _run_script(self, request):
        store = self._store(request["memory"])
        self._leftovers.append(store.close)
        self._python.place(store, request, self._streams())
        script = self._script(request)
        out = {name: plain(name) for name in ("stdout", "stderr")}

        def speak(name, data):
            self.voice.hear(out[name], data)

        return self._watched(store, request, lambda: script.run(store, request, speak))

    def _script(self, request):
        """The driver of JavaScript, loaded when first needed: one for the world as it is, one without chance."""
        from .deterministic import Fixed, Shadows
        from .javascript import JavaScript

        fixed = request["deterministic"]
        if bool(fixed) not in self._scripts:
            module = wasmtime.Module.deserialize_file(self._engine, self._facts["javascript"])
            linker = wasmtime.Linker(self._engine)
            linker.define_wasi()
            shadows = Shadows(self._engine, linker) if fixed else None
            if fixed:
                shadows.world = Fixed(0, 0)  # for the driver's own start
            self._scripts[bool(fixed)] = JavaScript(self._engine, module, self._facts["scripts"], linker), shadows
        driver, shadows = self._scripts[bool(fixed)]
        if fixed:
            driver.warm(request["language"])
            shadows.world = Fixed(**fixed)
        return driver

    def do_open(self, request, fds):
        self._drop()
        self._session = instance = self._instance(request, fds)
        self._python.place(instance.store, request, self._streams(turn_by_turn))
        return self._in_session(request, lambda: self._python.open(instance, request))

    def do_import(self, request, fds):
        """The beginning of a profile: no session and no guest, only imports."""
        self._drop()
        self._session = instance = self._python.fresh(self._store(request["memory"]))
        self._python.place(instance.store, request, self._streams())
        return self._in_session(request, lambda: self._python.imported(instance, request))

    def do_turn(self, request, fds):
        if self._session is None:
            return {"exit_code": None, "trap": "there is no session"}

        def hear(frame):
            too_long = json.dumps({"dropped": len(frame)})
            self.voice.say(words=frame.decode(errors="replace") if len(frame) <= WORDS else too_long)

        instance = self._session
        return self._in_session(request, lambda: self._python.take_turn(instance, request["turn"], hear))

    def _in_session(self, request, go):
        """An instance that trapped, or left by `os._exit`, is in the middle of something, for good."""
        said = self._watched(self._session.store, request, go, self._session.size)
        if said["ended"]:
            self._leftovers.append(self._session.close)
            self._session = None
        return said

    def do_measure(self, request, fds):
        session = self._session
        self._written = pages.changed(session.memory, session.store, self._python.pristine, session.inherited)
        return {"pages": len(self._written), "size": session.size()}

    def do_copy_out(self, request, fds):
        pages.copy_out(self._session.memory, self._session.store, self._written, fds[0])
        os.close(fds[0])
        return {}

    def do_drop(self, request, fds):
        self._drop()
        return {}

    def do_copy_in(self, request, fds):
        """A session from a copy of another's memory."""
        self._drop()
        store = self._store(request["memory"])
        try:
            copy = pages.Copy(request["size"], request["pages"], fds[0])
            self._session = self._python.copied(store, copy)
        except pages.DoesNotFit as error:
            store.close()
            return {"refused": str(error)}
        finally:
            self._leftovers.append(lambda: os.close(fds[0]))  # what is mapped stays mapped
        self._python.place(store, request, self._streams(turn_by_turn))
        return {}

    # --- one call into a guest ---

    def _watched(self, store, request, go, size=lambda: 0):
        fuel = FOREVER if request["fuel"] is None else request["fuel"]
        self._limit(store, request["memory"], fuel)
        exit_code, trap, ended, cpu = None, "", False, time.process_time()
        self._bell.set(time.monotonic() + request["timeout"])
        try:
            exit_code = go()
        except wasmtime.ExitTrap as end:
            exit_code, ended = end.code, True
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            trap = str(error)[:2000]
        finally:
            self._bell.set()
        return {
            "exit_code": exit_code, "trap": trap, "ended": ended or bool(trap), "memory": size(),
            "fuel": fuel - store.get_fuel(), "cpu_ms": round((time.process_time() - cpu) * 1000, 3),
        }  # fmt: skip

    def _lay_out(self, request):
        """The folder of a box that is used once: made here, and removed before anything else is done."""
        if not (box := request.get("make")):
            return
        root = f"{self._facts['private']}/{box['name']}"
        self._leftovers.append(lambda: shutil.rmtree(root))
        for folder in ("workspace", "tmp", request["cwd"].lstrip("/")):
            os.makedirs(f"{root}/{folder}", exist_ok=True)
        for name, data in box["files"].items():
            path, content = f"{root}/{name}", base64.b64decode(data)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "wb", buffering=0) as file:
                file.write(content)
            if name == box["main"]:
                request["code"] = content


def requests(door):
    """Each line of the socket, with the descriptors that came with it."""
    pending, fds = b"", []
    while True:
        line, newline, rest = pending.partition(b"\n")
        if newline:
            yield json.loads(line), fds
            pending, fds = rest, []
            continue
        data, more, _, _ = socket.recv_fds(door, 1 << 18, 4)
        if not data:
            return
        pending, fds = pending + data, fds + more


def leave_with_the_host(private):
    """For a worker without a jail, which nobody would end: when the other end of the socket is gone, so are we."""
    hangup = select.poll()
    hangup.register(0, getattr(select, "POLLRDHUP", select.POLLHUP))
    hangup.poll()
    shutil.rmtree(private, ignore_errors=True)
    os._exit(1)


def main():
    worker = Worker(json.loads(sys.argv[1]))
    watch = threading.Thread(target=leave_with_the_host, args=(worker.private,), daemon=True)
    if worker.plain:
        watch.start()
    worker.rest()
    worker.voice.say(ready=True)
    for request, fds in requests(socket.socket(fileno=0)):
        if worker.unclean:
            worker.voice.say(done=request["run"], unclean=worker.unclean)
            continue
        worker.voice.say(done=request["run"], **getattr(worker, f"do_{request['do']}")(request, fds))
        worker.rest()
    if worker.plain:
        watch.join()  # it removes our folder
