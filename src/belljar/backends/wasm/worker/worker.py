"""Runs guests as WebAssembly, one after the other, each in an instance of its own that is thrown away.

The guest never talks to this program: its only calls are those of WASI, answered by wasmtime, and `_host.call` of a
session's agent.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

import wasmtime

from . import memory as pages
from .frames import FrameWriter
from .fuel import FuelCount, find_breaker
from .listing import FolderListing
from .python import Python, PythonInstance
from .stdout_pipe import StdoutPipe
from .wasmtime_adapter import base_address
from .watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from .deterministic import DeterministicWasi
    from .frames import Received
    from .javascript.driver import JavaScript
    from .messages import Facts, Request

    Answer = dict[str, Any]

_UNLIMITED_FUEL = 2**63 - 1
_USUAL_FOLDERS = 2  # of a guest that was granted none
_MAX_PAYLOAD_BYTES = 16 << 20  # of what a session's agent says at once


class _Python(Python):
    """CPython whose guests list large folders in little time. (Its profiles are the same with and without.)"""

    def _new_linker(self) -> wasmtime.Linker:
        linker = super()._new_linker()
        FolderListing(self._engine).join(linker)
        return linker


class Worker:
    """One engine with its interpreters, and the session that is open in it, if there is one."""

    def __init__(self, facts: Facts) -> None:
        config = wasmtime.Config()
        config.epoch_interruption = True
        config.consume_fuel = True
        self._engine = wasmtime.Engine(config)
        self.frames: FrameWriter = FrameWriter()
        self._stdout = StdoutPipe(facts["private"], lambda data: self.frames.print("stdout", data))
        self._watchdog = Watchdog(self._engine, self._flush, lambda fuel: self.frames.send(fuel=fuel))
        module = wasmtime.Module.deserialize_file(self._engine, facts["python"])
        self._python = _Python(self._engine, module, facts)
        self._facts = facts
        self.private: str = facts["private"]
        self.plain: bool = facts["plain"]
        self._scripts: dict[bool, tuple[JavaScript, DeterministicWasi | None]] = {}
        self._spare: PythonInstance | None = None
        self._session: PythonInstance | None = None
        self._breaker = 0  # where CPython is asked from outside to call a function, if that is known
        self._profiles: dict[str, pages.MemoryCopy] = {}  # which came with their first use
        self._written: list[int] = []
        self._unclean = ""  # why no other guest may come here
        self._leftovers: list[Callable[[], object]] = []  # what removes things that nobody has to wait for

    def answer(self, received: Received) -> Answer:
        """Does what a request asks for, and returns the rest of the frame that says so."""
        if self._unclean:
            return {"unclean": self._unclean}
        do: Callable[[Received], Answer] = getattr(self, f"_do_{received.request['do']}")
        return do(received)

    def rest(self) -> None:
        """Clears away the last guest and prepares the interpreter of the next, while nobody waits."""
        while self._leftovers:
            try:
                self._leftovers.pop()()
            except (OSError, RecursionError) as error:  # a tree too deep to remove: the next guest goes elsewhere
                self._unclean = repr(error)
        if self._spare is None and self._session is None:
            with contextlib.suppress(wasmtime.WasmtimeError):  # too little memory: whoever runs here will be told
                self._spare = self._python.fresh(self._store(self._facts["memory"]))
                self._breaker = self._breaker or find_breaker(self._spare.memory, self._spare.store)

    # --- instances ---

    def _store(self, memory: int) -> wasmtime.Store:
        store = wasmtime.Store(self._engine)
        self._limit(store, memory, _UNLIMITED_FUEL)
        return store

    def _limit(self, store: wasmtime.Store, memory: int, fuel: int) -> None:
        """Four instances: the guest's, the bridge of JavaScript's files, deterministic mode's, and that of listings,
        which has a memory of its own."""
        store.set_limits(memory_size=memory, tables=64, instances=4, memories=2)
        store.set_epoch_deadline(1)
        store.set_fuel(fuel)

    def _instance(self, request: Request, fds: list[int]) -> PythonInstance:
        """Returns a fresh interpreter: the spare, a copy of a profile, or one in deterministic mode."""
        mode, profile = request.get("deterministic"), request.get("profile")
        granted = len(request["folders"]) > _USUAL_FOLDERS
        if not mode and not profile and not granted and self._spare:
            spare, self._spare = self._spare, None
            return spare
        store = self._store(request["memory"])
        linker = self._python.deterministic_linker(mode) if mode else None
        if granted:
            return self._python.warmed(store, request, linker)
        if profile and not mode:
            for fd in fds:
                self._profiles[profile["name"]] = pages.MemoryCopy(profile["size"], profile["pages"], fd)
            return self._python.copied(store, self._profiles[profile["name"]])
        return self._python.fresh(store, linker)

    def _surround(self, store: wasmtime.Store, request: Request) -> None:
        self._python.surround(store, request, self._stdout.path, self._write_error)

    def _write_error(self, data: bytes) -> int:
        """Takes what a guest wrote to stderr, after what it wrote to stdout before."""
        self._stdout.drain()
        self.frames.print("stderr", data)
        return len(data)

    def _flush(self) -> None:
        """Sends what the guest has printed so far."""
        self._stdout.drain()
        self.frames.flush()

    def _end_session(self) -> None:
        if self._session:
            self._session.close()
            self._session = None

    # --- programs ---

    def _do_run(self, received: Received) -> Answer:
        request = received.request
        self._end_session()
        self._make_folder(request)
        if request["language"] != "python":
            return self._run_script(request)
        instance = self._instance(request, received.fds)
        self._leftovers.append(instance.close)
        self._surround(instance.store, request)
        return self._watched(instance.store, request, lambda: self._python.start(instance, request), instance)

    def _run_script(self, request: Request) -> Answer:
        store = self._store(request["memory"])
        self._leftovers.append(store.close)
        self._surround(store, request)
        driver = self._script_driver(request)
        return self._watched(store, request, lambda: driver.run(store, request, self.frames.print))

    def _script_driver(self, request: Request) -> JavaScript:
        """Returns the driver of JavaScript, loaded when first needed: one for deterministic mode, one for all else."""
        from .deterministic import DeterministicState, DeterministicWasi
        from .javascript.driver import JavaScript

        mode = request["deterministic"]
        if bool(mode) not in self._scripts:
            module = wasmtime.Module.deserialize_file(self._engine, self._facts["javascript"])
            linker = wasmtime.Linker(self._engine)
            linker.define_wasi()
            wasi = DeterministicWasi(self._engine, linker) if mode else None
            if not mode:
                FolderListing(self._engine).join(linker)
            self._scripts[bool(mode)] = JavaScript(self._engine, module, self._facts["scripts"], linker), wasi
        driver, wasi = self._scripts[bool(mode)]
        if mode and wasi:
            wasi.state = DeterministicState(0, 0)  # for the driver's own start
            driver.warm(request["language"])
            wasi.state = DeterministicState(**mode)
        return driver

    def _make_folder(self, request: Request) -> None:
        """Makes the folder of a box that is used once; it is removed before anything else is done."""
        if not (box := request.get("make")):
            return
        root = f"{self.private}/{box['name']}"
        self._leftovers.append(lambda: _remove(root))
        for folder in ("workspace", "tmp", request["cwd"].lstrip("/")):
            os.makedirs(f"{root}/{folder}", exist_ok=True)
        for name, data in box["files"].items():
            path, content = f"{root}/{name}", base64.b64decode(data)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "wb", buffering=0) as file:
                file.write(content)
            if name == box["main"]:
                request["code"] = content

    # --- sessions ---

    def _do_open(self, received: Received) -> Answer:
        self._end_session()
        request = received.request
        self._session = instance = self._instance(request, received.fds)
        self._surround(instance.store, request)
        return self._in_session(instance, request, lambda: self._python.open_session(instance, request))

    def _do_import(self, received: Received) -> Answer:
        self._end_session()
        request = received.request
        self._session = instance = self._python.fresh(self._store(request["memory"]))
        self._surround(instance.store, request)
        return self._in_session(instance, request, lambda: self._python.import_modules(instance, request["modules"]))

    def _do_turn(self, received: Received) -> Answer:
        if (instance := self._session) is None:
            return {"exit_code": None, "trap": "there is no session"}
        turn = received.payload
        return self._in_session(
            instance, received.request, lambda: self._python.take_turn(instance, turn, self._hear_agent)
        )

    def _hear_agent(self, said: bytes) -> None:
        self._stdout.drain()
        if len(said) <= _MAX_PAYLOAD_BYTES:
            self.frames.send_payload(said)
        else:
            self.frames.send(dropped=len(said))

    def _in_session(self, instance: PythonInstance, request: Request, go: Callable[[], int]) -> Answer:
        """An instance that trapped, or left by `os._exit`, is in the middle of something, for good."""
        answer = self._watched(instance.store, request, go, instance)
        if answer["ended"]:
            self._leftovers.append(instance.close)
            self._session = None
        return answer

    def _do_drop(self, received: Received) -> Answer:
        self._end_session()
        return {}

    # --- copies of a session's memory ---

    def _do_measure(self, received: Received) -> Answer:
        session = self._open_session()
        self._written = pages.changed(session.memory, session.store, self._python.pristine, session.inherited)
        return {"pages": len(self._written), "size": session.size()}

    def _do_copy_out(self, received: Received) -> Answer:
        session = self._open_session()
        pages.copy_out(session.memory, session.store, self._written, received.fds[0])
        os.close(received.fds[0])
        return {}

    def _open_session(self) -> PythonInstance:
        if self._session is None:
            raise RuntimeError("there is no session")
        return self._session

    def _do_copy_in(self, received: Received) -> Answer:
        """Starts a session from a copy of another's memory."""
        self._end_session()
        request, fd = received.request, received.fds[0]
        store = self._store(request["memory"])
        try:
            self._session = self._python.copied(store, pages.MemoryCopy(request["size"], request["pages"], fd))
        except pages.DoesNotFit as error:
            store.close()
            return {"refused": str(error)}
        finally:
            self._leftovers.append(lambda: os.close(fd))  # what is mapped stays mapped
        self._surround(store, request)
        return {}

    # --- one call into a guest ---

    def _watched(
        self, store: wasmtime.Store, request: Request, go: Callable[[], int], python: PythonInstance | None = None
    ) -> Answer:
        """Calls into a guest under its limits, and says how it ended and what it used."""
        given = _UNLIMITED_FUEL if (limit := request["fuel"]) is None else limit
        self._limit(store, request["memory"], given)
        exit_code, trap, ended, cpu = None, "", False, time.process_time()
        fuel = FuelCount(store, given, self._breaker_of(python))
        self._watchdog.begin(fuel, time.monotonic() + request["timeout"])
        try:
            exit_code = go()
        except wasmtime.ExitTrap as end:
            exit_code, ended = end.code, True
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            trap = str(error)[:2000]
        finally:
            self._watchdog.end()
            self._stdout.drain()
        spent_ms = (time.process_time() - cpu) * 1000
        return {
            "exit_code": exit_code, "trap": trap, "ended": ended or bool(trap),
            "memory": python.size() if python else 0, "fuel": fuel.used("interrupt" in trap),
            "cpu_ms": round(spent_ms, 3),
        }  # fmt: skip

    def _breaker_of(self, python: PythonInstance | None) -> ctypes.c_ubyte | None:
        if python is None or not self._breaker:
            return None
        return ctypes.c_ubyte.from_address(base_address(python.memory, python.store) + self._breaker)


def _remove(folder: str) -> None:
    import shutil  # while nobody waits

    shutil.rmtree(folder)
