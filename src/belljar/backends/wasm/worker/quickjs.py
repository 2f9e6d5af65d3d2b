"""One QuickJS instance as its host sees it: its memory, its values, and the operations our JavaScript asks for."""

import ctypes
import json

import wasmtime

from .calls import SIGNATURES, Call, Exit, OutOfMemory, Refused

ENTRIES = ("start", "turn", "settled", "normalize", "source")
MODULE = 1  # JS_EVAL_TYPE_MODULE
# QuickJS counts its stack in linear memory, wasmtime limits the native one to 512 KiB: with more than this,
# plain recursion would end in a trap and not in a RangeError.
STACK = 160 * 1024
SCRATCH = 16384  # bytes in the guest's memory for paths and small answers
PATH_MAX = 4096
PIECE = 1 << 18  # bytes of output at once
NAP = 0.02  # seconds between two looks at the deadline while the guest only waits

# WASI's error numbers that we ourselves give.
ACCES, BADF, ISDIR, NAMETOOLONG, NOENT = 2, 8, 31, 37, 44
MONOTONIC = 1  # a clock
FOLDER = 3  # a type of file
O_DIRECTORY = 2
FD_READ, FD_WRITE, FD_READDIR = 1 << 1, 1 << 6, 1 << 14


def _entries(data, cookie):
    """The whole entries in an answer of `fd_readdir`, and where to go on."""
    found, at = [], 0
    while at + 24 <= len(data):
        size = int.from_bytes(data[at + 16 : at + 20], "little")
        name = data[at + 24 : at + 24 + size]
        if len(name) < size:
            break
        if name not in (b".", b".."):
            found.append((name.decode(errors="replace"), data[at + 20]))
        cookie = int.from_bytes(data[at : at + 8], "little")
        at += 24 + size
    return found, cookie


class Guest:
    """One instance: what QuickJS asks of us, and what we ask of it. Values of the engine are addresses of boxes."""

    def __init__(self, store, linker):
        self._store = store
        self._linker = linker
        self._found = {}
        self.memory = linker.get(store, "bridge", "memory")
        self._folders = None
        self.write = None
        self.entry = {}
        self.scratch = 0

    def _call(self, name, *args):
        call = self._found.get(name)
        if call is None:  # only those a run needs: looking all of them up would cost more than the run
            func = self._linker.get(self._store, "bridge", name)
            call = self._found[name] = Call(self._store, func, SIGNATURES[name])
        return call(*args)

    # --- memory ---

    def _base(self):
        return ctypes.addressof(self.memory.data_ptr(self._store).contents)

    def _peek(self, address, size):
        if address + size > self.memory.data_len(self._store):
            raise wasmtime.WasmtimeError("an address of the guest lies outside its memory")
        return ctypes.string_at(self._base() + address, size)

    def _poke(self, address, data):
        if address + len(data) > self.memory.data_len(self._store):
            raise wasmtime.WasmtimeError("an address of the guest lies outside its memory")
        ctypes.memmove(self._base() + address, data, len(data))

    def _word(self, address, size=4):
        return int.from_bytes(self._peek(address, size), "little")

    def _place(self, data):
        """A copy in the guest's memory, with a zero at its end. Whoever asks frees it."""
        address = self._call("wasm_malloc", len(data) + 1)
        if not address:
            raise OutOfMemory("the guest is out of memory")
        self._poke(address, data + b"\0")
        return address

    def _chars(self, address):
        """A C string."""
        limit = self.memory.data_len(self._store)
        chunk = self._peek(address, min(PATH_MAX * 4, limit - address))
        return chunk.partition(b"\0")[0]

    # --- values ---

    def _text(self, box):
        """A string's bytes (UTF-8)."""
        chars = self._call("text", box, self.scratch)
        if not chars:
            raise OutOfMemory("the guest is out of memory")
        return self._peek(chars, self._word(self.scratch))

    def _number(self, box):
        value = self._call("qjs_get_float64", box)
        return int(value) if abs(value) < 1 << 53 else 0

    def _string(self, data):
        address = self._place(data)
        box = self._call("qjs_new_string", address, len(data))
        self._call("wasm_free", address)
        return box

    def _bytes_at(self, box):
        """Where the bytes of a Uint8Array lie, and how many."""
        at = self.scratch
        buffer = self._call("qjs_get_typed_array_buffer", box, at, at + 4, at + 8)
        if self._call("qjs_is_exception", buffer):
            raise Exit(1)  # only a guest that has rewritten our own functions can come here
        offset, size = self._word(at), self._word(at + 4)
        start = self._call("qjs_get_array_buffer", buffer, at)
        self._call("qjs_free_value", buffer)
        return start + offset, size

    def _apply(self, func, *args):
        """Calls a function of the engine; returns the box of its result, which may be an exception."""
        at = 0
        if args:
            at = self._place(b"".join(arg.to_bytes(4, "little") for arg in args))
        result = self._call("qjs_call", func, self.entry["nothing"], len(args), at)
        if at:
            self._call("wasm_free", at)
        return result

    def _evaluate(self, code, name, flags):
        text, file = self._place(code), self._place(name)
        result = self._call("qjs_eval", text, len(code), file, flags)
        self._call("wasm_free", text)
        self._call("wasm_free", file)
        return result

    def _must(self, box):
        """The box, unless it is an exception: then the guest is beyond help."""
        if self._call("qjs_is_exception", box):
            self._give_up()
        return box

    def _give_up(self):
        error = self._call("qjs_get_exception")
        said = self._text(error).decode(errors="replace")
        if "out of memory" in said:
            raise OutOfMemory("the guest is out of memory")
        if self.write:
            self.write("stderr", f"Uncaught {said}\n\nNode.js v22.0.0 (QuickJS)\n".encode())
            raise Exit(1)
        raise wasmtime.WasmtimeError(f"the prelude failed: {said}")

    # --- the life of an instance ---

    def boot(self, sources):
        """Starts the engine and evaluates our own files."""
        self._call("_initialize")
        if self._call("qjs_init"):
            raise wasmtime.WasmtimeError("QuickJS did not start")
        self.scratch = self._call("wasm_malloc", SCRATCH)
        for name in ("qjs_set_module_loader", "qjs_set_promise_rejection_handler"):
            self._call(name, 1)
        self._call("qjs_set_max_stack_size", STACK)
        self.entry["nothing"] = self._call("qjs_get_undefined")
        host, core = self._call("qjs_new_object"), self._call("qjs_new_object")
        for name in OPERATIONS:
            label = self._place(name)
            func = self._call("qjs_new_host_function", label, len(name), 0)
            self._call("qjs_set_prop_string", host, label, func)
        for name, code in sources:
            file = f"belljar:{name}".encode()
            self._must(self._apply(self._must(self._evaluate(code, file, 0)), host, core))
        for name in ENTRIES:
            self.entry[name] = self._call("qjs_get_prop_string", core, self._place(name.encode()))

    def copy(self):
        return self._peek(0, self.memory.data_len(self._store))

    def draw(self):
        """Makes `Math.random` take one step."""
        self._must(self._evaluate(b"Math.random()", b"belljar:seed", 0))

    def restore(self, image):
        missing = image.size - self.memory.data_len(self._store)
        if missing > 0:
            self.memory.grow(self._store, missing >> 16)
        base = self._base()
        for start, data in image.parts:
            ctypes.memmove(base + start, data, len(data))
        self.scratch, self.entry = image.scratch, image.entry
        self._call("random_get", image.seed, 8)
        if not self._word(image.seed, 8):
            self._poke(image.seed, b"\1")  # the generator would only ever say zero

    def live(self, request):
        facts = {name: request[name] for name in ("main", "cwd", "env")}
        self._must(self._apply(self.entry["start"], self._string(json.dumps(facts).encode())))
        while True:
            if self._call("drain"):
                self._give_up()
            wait = self._call("qjs_get_float64", self._must(self._apply(self.entry["turn"])))
            if wait > 0:
                self._sleep(wait / 1000)

    def _sleep(self, seconds):
        """By WASI, so that whoever replaces its clock replaces this too; in naps, after each of which wasm looks at its
        deadline."""
        while seconds > 0:
            nap = min(seconds, NAP)
            clock = MONOTONIC.to_bytes(8, "little") + int(nap * 1e9).to_bytes(8, "little")
            self._poke(self.scratch, bytes(16) + clock + bytes(16))
            self._call("poll_oneoff", self.scratch, self.scratch + 64, 1, self.scratch + 128)
            seconds -= nap

    # --- what QuickJS asks of its host ---

    def host_get_timezone_offset(self, _high, _low):
        return 0

    def host_interrupt(self):
        return 0

    def host_promise_rejection(self, promise, reason, handled):
        flag = self._call("qjs_new_number", float(handled))
        self._must(self._apply(self.entry["settled"], promise, reason, flag))
        for box in (promise, reason, flag):
            self._call("qjs_free_value", box)

    def host_module_normalize(self, base, name):
        return self._ask("normalize", self._chars(base), self._chars(name))[0]

    def host_module_load(self, name, size_at):
        address, size = self._ask("source", self._chars(name))
        if address:
            self._poke(size_at, size.to_bytes(4, "little"))
        return address

    def _ask(self, entry, *words):
        """The prelude's answer as a C string that QuickJS will free; null, with the exception pending, if it threw."""
        boxes = [self._string(word) for word in words]
        result = self._apply(self.entry[entry], *boxes)
        for box in boxes:
            self._call("qjs_free_value", box)
        if self._call("qjs_is_exception", result):
            return 0, 0
        data = self._text(result)
        self._call("qjs_free_value", result)
        return self._place(data), len(data)

    def host_call(self, name, size, _this, count, at):
        work = OPERATIONS[self._peek(name, size)]
        if count != work.__code__.co_argcount - 1:
            raise Exit(1)  # only a guest that has got hold of our own functions can come here
        try:
            return work(self, *memoryview(self._peek(at, 4 * count)).cast("I"))
        except Refused as refused:
            return self._answer(-refused.number)

    # --- what the prelude asks of us: each returns the box of its answer ---

    def _nothing(self):
        return self._call("qjs_get_undefined")

    def _answer(self, number):
        return self._call("qjs_new_number", float(number))

    def print_out(self, text):
        return self._print("stdout", text)

    def print_error(self, text):
        return self._print("stderr", text)

    def _print(self, stream, text):
        """In pieces: a string may be as large as the guest's memory, and this process has little beside that."""
        start = self._call("text", text, self.scratch)
        if not start:
            raise OutOfMemory("the guest is out of memory")
        end = start + self._word(self.scratch)
        for at in range(start, end, PIECE):
            self.write(stream, self._peek(at, min(PIECE, end - at)))
        return self._nothing()

    def exit(self, code):
        raise Exit(self._number(code))

    def out_of_memory(self):
        raise OutOfMemory("the guest is out of memory")

    def encode(self, text):
        chars = self._call("qjs_get_string_len", text, self.scratch)
        if not chars:
            raise OutOfMemory("the guest is out of memory")
        box = self._call("qjs_new_uint8_array", chars, self._word(self.scratch))
        self._call("qjs_free_cstring", chars)
        return box

    def decode(self, data, strict):
        """Undefined for what is not UTF-8, if asked to be strict."""
        start, size = self._bytes_at(data)
        text = self._peek(start, size)
        try:
            text.decode()
        except UnicodeDecodeError:
            if self._number(strict):
                return self._nothing()
            return self._string(text.decode(errors="replace").encode())
        return self._call("qjs_new_string", start, size)

    def clock(self, which):
        self._call("clock_time_get", self._number(which), 1, self.scratch)
        return self._answer(self._word(self.scratch, 8) / 1e6)

    def random(self, size):
        count = self._number(size)
        address = self._call("wasm_malloc", count) if count < 1 << 31 else 0
        if not address:
            raise OutOfMemory("the guest is out of memory")
        self._call("random_get", address, count)
        box = self._call("qjs_new_uint8_array", address, count)
        self._call("wasm_free", address)
        return box

    def promise_state(self, promise):
        return self._answer(self._call("qjs_promise_state", promise))

    def promise_result(self, promise):
        return self._call("qjs_promise_result", promise)

    def compile(self, code, name):
        return self._run_text(code, name, 0)

    def evaluate(self, code, name):
        return self._run_text(code, name, MODULE)

    def _run_text(self, code, name, flags):
        file = self._place(self._text(name))
        chars = self._call("qjs_get_string_len", code, self.scratch)
        if not chars:
            raise OutOfMemory("the guest is out of memory")
        result = self._call("qjs_eval", chars, self._word(self.scratch), file, flags)
        self._call("qjs_free_cstring", chars)
        self._call("wasm_free", file)
        return 0 if self._call("qjs_is_exception", result) else result  # the exception itself stays pending

    # --- files: the guest's path, WASI's answer, negative if it is an error ---

    def _preopened(self):
        if self._folders is None:
            self._folders, fd, at = {}, 3, self.scratch
            while not self._call("fd_prestat_get", fd, at):
                size = self._word(at + 4)
                self._call("fd_prestat_dir_name", fd, at, size)
                self._folders[self._peek(at, size).rstrip(b"/")] = fd
                fd += 1
        return self._folders

    def _locate(self, box, slot=0):
        """A path as WASI wants it: the preopened folder, then where the rest of the path lies and how long it is."""
        path = self._text(box)
        if len(path) > PATH_MAX:
            raise Refused(NAMETOOLONG)
        for folder, fd in self._preopened().items():
            if path == folder or path.startswith(folder + b"/"):
                rest = path[len(folder) + 1 :] or b"."
                at = self.scratch + 64 + slot * (PATH_MAX + 8)
                self._poke(at, rest)
                return fd, at, len(rest)
        raise Refused(NOENT)

    def _wasi(self, name, *args):
        if number := self._call(name, *args):
            raise Refused(number)

    def _open(self, place, flags, rights, append=0):
        fd, at, size = place
        self._wasi("path_open", fd, 1, at, size, flags, rights, rights, append, self.scratch)
        return self._word(self.scratch)

    def read_file(self, path, as_text):
        place = self._locate(path)
        fd = self._open(place, 0, FD_READ)
        try:
            self._wasi("fd_filestat_get", fd, self.scratch)
            if self._word(self.scratch + 16, 1) == FOLDER:
                raise Refused(ISDIR)
            return self._read_all(fd, self._word(self.scratch + 32, 8), self._number(as_text))
        finally:
            self._call("fd_close", fd)

    def read_input(self, fd, as_text):
        if self._number(fd):
            raise Refused(BADF)
        return self._read_all(0, 0, self._number(as_text))

    def _read_all(self, fd, expected, as_text):
        room, filled = max(expected + 1, 4096), 0
        buffer = self._call("wasm_malloc", room) if room < 1 << 31 else 0
        while buffer:
            if filled == room:
                room *= 2
                buffer = self._call("realloc", buffer, room) if room < 1 << 31 else 0
                continue
            self._vector(buffer + filled, room - filled)
            self._wasi("fd_read", fd, self.scratch, 1, self.scratch + 8)
            count = self._word(self.scratch + 8)
            filled += count
            if not count:
                box = self._call("qjs_new_string" if as_text else "qjs_new_uint8_array", buffer, filled)
                self._call("wasm_free", buffer)
                return box
        raise OutOfMemory("the file is larger than the guest's memory")

    def _vector(self, start, size):
        self._poke(self.scratch, start.to_bytes(4, "little") + size.to_bytes(4, "little"))

    def write_file(self, path, data, flags, append):
        try:
            place = self._locate(path)
        except Refused as refused:
            raise Refused(ACCES if refused.number == NOENT else refused.number) from None
        chars = 0
        if self._call("qjs_is_string", data):
            chars = start = self._call("qjs_get_string_len", data, self.scratch)
            size = self._word(self.scratch)
        else:
            start, size = self._bytes_at(data)
        fd = self._open(place, self._number(flags), FD_WRITE, self._number(append))
        try:
            while size:
                self._vector(start, size)
                self._wasi("fd_write", fd, self.scratch, 1, self.scratch + 8)
                count = self._word(self.scratch + 8)
                start, size = start + count, size - count
        finally:
            self._call("fd_close", fd)
            if chars:
                self._call("qjs_free_cstring", chars)
        return self._answer(0)

    def stat(self, path, follow):
        fd, at, size = self._locate(path)
        self._wasi("path_filestat_get", fd, self._number(follow), at, size, self.scratch)
        facts = self._peek(self.scratch, 64)
        inode, links, length, *times = (int.from_bytes(facts[n : n + 8], "little") for n in (8, 24, 32, 40, 48, 56))
        return self._string(json.dumps([facts[16], length, links, inode, *(ns / 1e6 for ns in times)]).encode())

    def read_folder(self, path):
        fd = self._open(self._locate(path), O_DIRECTORY, FD_READDIR)
        names, cookie, at, room = [], 0, self.scratch + 64, SCRATCH - 64
        try:
            while True:
                self._wasi("fd_readdir", fd, at, room, cookie, self.scratch)
                data = self._peek(at, self._word(self.scratch))
                found, cookie = _entries(data, cookie)
                names += found
                if len(data) < room or not found:
                    return self._string(json.dumps(names).encode())
        finally:
            self._call("fd_close", fd)

    def make_folder(self, path):
        self._wasi("path_create_directory", *self._locate(path))
        return self._answer(0)

    def remove_folder(self, path):
        self._wasi("path_remove_directory", *self._locate(path))
        return self._answer(0)

    def remove_file(self, path):
        self._wasi("path_unlink_file", *self._locate(path))
        return self._answer(0)

    def rename(self, old, new):
        self._wasi("path_rename", *self._locate(old), *self._locate(new, slot=1))
        return self._answer(0)


OPERATIONS = {
    b"printOut": Guest.print_out, b"printError": Guest.print_error, b"exit": Guest.exit,
    b"outOfMemory": Guest.out_of_memory, b"encode": Guest.encode,
    b"decode": Guest.decode, b"clock": Guest.clock, b"random": Guest.random, b"promiseState": Guest.promise_state,
    b"promiseResult": Guest.promise_result, b"compile": Guest.compile, b"evaluate": Guest.evaluate,
    b"readFile": Guest.read_file, b"readInput": Guest.read_input, b"writeFile": Guest.write_file, b"stat": Guest.stat,
    b"readFolder": Guest.read_folder, b"makeFolder": Guest.make_folder, b"removeFolder": Guest.remove_folder,
    b"removeFile": Guest.remove_file, b"rename": Guest.rename,
}  # fmt: skip
