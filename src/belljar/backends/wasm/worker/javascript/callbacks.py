"""What QuickJS itself asks of its host (`env` in its imports): modules, rejected promises, and our prelude's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .calls import GuestExit, WasiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .operations import Operations
    from .quickjs import QuickJs

# Name -> how many arguments and results, all of 32 bits.
IMPORTS = {
    "host_get_timezone_offset": (2, 1), "host_interrupt": (0, 1), "host_promise_rejection": (3, 0),
    "host_module_normalize": (2, 1), "host_module_load": (2, 1), "host_call": (5, 1),
}  # fmt: skip


class Callbacks:
    """Answers for one instance. The methods have the names of the imports."""

    def __init__(self, js: QuickJs, operations: Operations, must: Callable[[int], int]) -> None:
        self._js = js
        self._operations = operations
        self._must = must  # returns a box unless it is an exception, which ends the guest

    def host_get_timezone_offset(self, _high: int, _low: int) -> int:
        return 0

    def host_interrupt(self) -> int:
        return 0

    def host_promise_rejection(self, promise: int, reason: int, handled: int) -> None:
        flag = self._js.new_number(handled)
        self._must(self._js.apply(self._js.entry["settled"], promise, reason, flag))
        for box in (promise, reason, flag):
            self._js.call("qjs_free_value", box)

    def host_module_normalize(self, base: int, name: int) -> int:
        return self._ask("normalize", self._js.c_string(base), self._js.c_string(name))[0]

    def host_module_load(self, name: int, size_at: int) -> int:
        address, size = self._ask("source", self._js.c_string(name))
        if address:
            self._js.write(size_at, size.to_bytes(4, "little"))
        return address

    def _ask(self, entry: str, *texts: bytes) -> tuple[int, int]:
        """Returns the prelude's answer as a C string that QuickJS will free; null, with the exception pending, if it
        threw."""
        js = self._js
        boxes = [js.new_string(text) for text in texts]
        result = js.apply(js.entry[entry], *boxes)
        for box in boxes:
            js.call("qjs_free_value", box)
        if js.is_exception(result):
            return 0, 0
        data = js.text(result)
        js.call("qjs_free_value", result)
        return js.place(data), len(data)

    def host_call(self, name: int, size: int, _this: int, count: int, at: int) -> int:
        """Does what a function of our prelude asks for."""
        expected, work = self._operations[self._js.read(name, size)]
        if count != expected:
            raise GuestExit(1)  # only a guest that has got hold of our own functions can come here
        try:
            return work(*memoryview(self._js.read(at, 4 * count)).cast("I"))
        except WasiError as error:
            return self._js.new_number(-error.number)
