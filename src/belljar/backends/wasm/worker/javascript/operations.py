"""What our JavaScript prelude asks of its host, but for files: output, text, clock, randomness, promises, code.

Each operation takes the boxes of its arguments and returns the box of its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .calls import GuestExit, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from .quickjs import QuickJs

    Write = Callable[[str, bytes], object]
    Operations = dict[bytes, "tuple[int, Callable[..., int]]"]  # name -> how many arguments, and what to call

_PIECE_BYTES = 1 << 18  # of output at once
_SCRIPT, _MODULE = 0, 1  # JS_EVAL_TYPE_GLOBAL and JS_EVAL_TYPE_MODULE


class BasicOperations:
    """Everything but files."""

    def __init__(self, js: QuickJs, write: Write) -> None:
        self._js = js
        self._write = write

    def table(self) -> Operations:
        return {
            b"printOut": (1, self.print_out), b"printError": (1, self.print_error), b"exit": (1, self.exit),
            b"outOfMemory": (0, self.out_of_memory), b"encode": (1, self.encode), b"decode": (2, self.decode),
            b"clock": (1, self.clock), b"random": (1, self.random), b"promiseState": (1, self.promise_state),
            b"promiseResult": (1, self.promise_result), b"compile": (2, self.compile),
            b"evaluate": (2, self.evaluate),
        }  # fmt: skip

    def print_out(self, text: int) -> int:
        return self._print("stdout", text)

    def print_error(self, text: int) -> int:
        return self._print("stderr", text)

    def _print(self, stream: str, text: int) -> int:
        """In pieces: a string may be as large as the guest's memory, and this process has little beside that."""
        start, size = self._js.text_at(text)
        end = start + size
        for at in range(start, end, _PIECE_BYTES):
            self._write(stream, self._js.read(at, min(_PIECE_BYTES, end - at)))
        return self._js.new_undefined()

    def exit(self, code: int) -> int:
        raise GuestExit(self._js.number(code))

    def out_of_memory(self) -> int:
        raise OutOfMemory

    def encode(self, text: int) -> int:
        """Returns a string as a Uint8Array."""
        chars, size = self._js.characters(text)
        box: int = self._js.call("qjs_new_uint8_array", chars, size)
        self._js.call("qjs_free_cstring", chars)
        return box

    def decode(self, data: int, strict: int) -> int:
        """Returns bytes as a string; undefined for what is not UTF-8, if asked to be strict."""
        start, size = self._js.bytes_at(data)
        text = self._js.read(start, size)
        try:
            text.decode()
        except UnicodeDecodeError:
            if self._js.number(strict):
                return self._js.new_undefined()
            return self._js.new_string(text.decode(errors="replace").encode())
        box: int = self._js.call("qjs_new_string", start, size)
        return box

    def clock(self, which: int) -> int:
        """Returns milliseconds of a WASI clock."""
        self._js.call("clock_time_get", self._js.number(which), 1, self._js.scratch)
        return self._js.new_number(self._js.word(self._js.scratch, 8) / 1e6)

    def random(self, size: int) -> int:
        """Returns random bytes as a Uint8Array."""
        count = self._js.number(size)
        address = self._js.allocate(count)
        self._js.call("random_get", address, count)
        box: int = self._js.call("qjs_new_uint8_array", address, count)
        self._js.free(address)
        return box

    def promise_state(self, promise: int) -> int:
        return self._js.new_number(self._js.call("qjs_promise_state", promise))

    def promise_result(self, promise: int) -> int:
        box: int = self._js.call("qjs_promise_result", promise)
        return box

    def compile(self, code: int, name: int) -> int:
        return self._run(code, name, _SCRIPT)

    def evaluate(self, code: int, name: int) -> int:
        return self._run(code, name, _MODULE)

    def _run(self, code: int, name: int, flags: int) -> int:
        """Evaluates a string of the guest's; 0 if that threw, and the exception itself stays pending."""
        file = self._js.place(self._js.text(name))
        chars, size = self._js.characters(code)
        result: int = self._js.call("qjs_eval", chars, size, file, flags)
        self._js.call("qjs_free_cstring", chars)
        self._js.free(file)
        return 0 if self._js.is_exception(result) else result
