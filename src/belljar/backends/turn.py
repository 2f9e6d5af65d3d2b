"""One turn of a session: what an interpreter is asked to run, and what has been heard of it so far.

Whatever is heard comes from the guest, so it is treated as hostile: sizes are capped, types are checked, and nothing
that a turn says is believed about anything but that turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio.to_thread

from belljar.backends import guest_text
from belljar.core.request import Limits
from belljar.core.result import (
    STREAMS,
    TIMEOUT_EXIT_CODE,
    ErrorType,
    Failure,
    GuestException,
    MimeBundle,
    Result,
    Status,
    StreamName,
)
from belljar.core.values import MIB
from belljar.host.capture import FLOOD_BYTES, Capture, scrub
from belljar.host.egress.guest import DENIALS

if TYPE_CHECKING:
    from belljar.backends.base import Emit

AGENT_FOLDER = ".belljar"  # where the agent lies, among the read-only inputs
AGENT_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp/matplotlib"}
_MESSAGE_CHARACTERS = 500
_PARTS = ("awaiting", "magics", "names", "values")
MAX_RESULTS = 64
MAX_NAMES = 1000  # that a half-typed name may become
_MAX_NAME_CHARACTERS = 100
_MOST_CHARACTERS = {"name": 200, "value": 10_000, "traceback": 100_001}  # of an exception; the agent cuts them so
_FLOOD_FACTOR = 16  # times what is kept: a turn that says more ends its session, so it may say much
_FRAME_BYTES = 256  # that a frame counts for at least: an empty one is work, too
MAX_RESULTS_BYTES = 32 * MIB  # of all results of a turn together, as the guest sent them


@cache
def agent_source() -> bytes:
    """Returns the program that runs turns inside the sandbox; its parts are put before it as text."""
    parts = {name: guest_text.python_program(f"session/{name}") for name in _PARTS}
    return f"PARTS = {parts!r}\n{guest_text.python_program('session/agent')}".encode()


def is_name(value: object) -> bool:
    """Says whether a guest's word is a name of Python, and nothing that would act on a terminal."""
    return isinstance(value, str) and len(value) <= _MAX_NAME_CHARACTERS and value.isidentifier()


class TurnRequest(NamedTuple):
    """The code of one turn, its number in the session (it names the code's file), and its limits.

    Attributes:
        complete: the code is a half-typed name, and nothing is run: the turn tells the names that it may become.
    """

    number: int
    code: str
    limits: Limits
    complete: bool = False

    def message(self) -> bytes:
        """Returns what the agent is sent."""
        what = "complete" if self.complete else "code"
        return json.dumps({"turn": self.number, what: self.code, "timeout": self.limits.timeout}).encode()


class TurnVerdict(NamedTuple):
    """How a turn ended, as its agent says."""

    ok: bool
    exit_code: int
    timed_out: bool
    exception: GuestException | None = None

    @classmethod
    def read(cls, frame: Mapping[str, Any]) -> TurnVerdict:
        """Reads the agent's last frame of a turn; what makes no sense counts as a failure."""
        code = frame.get("exit_code")
        exit_code = code if type(code) is int and 0 <= code <= 255 else 1
        ok = frame.get("ok") is True and exit_code == 0
        return cls(ok, exit_code, frame.get("timeout") is True, None if ok else _exception(frame.get("exception")))


def _exception(told: object) -> GuestException | None:
    """What the guest says of its exception, cut to lengths that are enough."""
    if not isinstance(told, dict):
        return None
    words = {name: word for name in _MOST_CHARACTERS if isinstance(word := told.get(name), str)}
    if len(words) < len(_MOST_CHARACTERS) or not words["name"]:
        return None
    return GuestException(**{name: scrub(word[-_MOST_CHARACTERS[name] :]) for name, word in words.items()})


class TurnRecord:
    """Collects the output, results and denials of one turn, tells them as they come, and makes its Result."""

    def __init__(self, request: TurnRequest, box: str, emit: Emit) -> None:
        self.number: int = request.number
        self.verdict: TurnVerdict | None = None
        self.interrupted: bool = False  # whoever asked for it wanted it to end
        self.settled: bool = False  # all that it wrote to stderr has come
        self.names: tuple[str, ...] = ()
        self.fuel: int | None = None  # that it used, where that is counted
        self._box = box
        self._emit = emit
        self._streams: dict[StreamName, Capture] = {name: Capture(request.limits.output) for name in STREAMS}
        self._results: list[MimeBundle] = []
        self._room = MAX_RESULTS_BYTES
        self._budget = max(_FLOOD_FACTOR * request.limits.output, FLOOD_BYTES) + MAX_RESULTS_BYTES
        self._dropped = False
        self._denied: list[str] = []
        self._started = time.perf_counter()

    def spend(self, size: int, frames: int) -> None:
        """Counts what the guest sent; a turn may say so much more than is kept, and no more.

        Args:
            size: bytes, whatever is in them.
            frames: how many frames they are.

        Raises:
            OverflowError: that is too much: the interpreter is to be ended.
        """
        self._budget -= size + frames * _FRAME_BYTES
        if self._budget < 0:
            raise OverflowError

    async def write(self, stream: object, data: bytes) -> None:
        """Takes what the guest wrote to stdout or stderr."""
        for name in STREAMS:
            if stream == name and (shown := self._streams[name].feed(data)):
                await self._emit(name, shown)

    async def display(self, bundle: Mapping[str, Any], size: int) -> None:
        """Takes one result, which took `size` bytes to send; past the limits it is dropped."""
        self._room -= size
        if self._room < 0 or len(self._results) >= MAX_RESULTS:
            self._dropped = True
            return
        clean = await _scrubbed(bundle, size)
        self._results.append(clean)
        await self._emit("display", str(clean.get("text/plain", "")))

    def drop(self) -> None:
        """Notes that a result was too large to be sent."""
        self._dropped = True

    async def hear(self, frame: Mapping[str, Any], size: int) -> None:
        """Takes a frame that the agent sent about this turn; `size` is the length of its JSON."""
        if isinstance(text := frame.get("text"), str):
            await self.write(frame.get("stream"), text.encode("utf-8", "replace"))
        elif isinstance(display := frame.get("display"), dict):
            await self.display(display, size)
        elif isinstance(names := frame.get("names"), list):
            self.names = tuple(name for name in names[:MAX_NAMES] if is_name(name))
        elif type(frame.get("settled")) is int and frame["settled"] == self.number:
            self.settled = True
        elif type(frame.get("done")) is int and frame["done"] == self.number:
            self.verdict = TurnVerdict.read(frame)

    async def deny(self, message: str) -> None:
        """Takes a connection that was refused."""
        if len(self._denied) < DENIALS:
            self._denied.append(message)
        await self._emit("denied", message)

    def result(self, interrupted: Status = Status.KILLED, exit_code: int | None = None) -> Result:
        """Returns what the turn amounts to; the arguments say how the interpreter ended if it gave no verdict."""
        out, err = self._streams["stdout"], self._streams["stderr"]
        cut = bool(out.cut or err.cut or self._dropped)
        if self.verdict is not None:
            interrupted, exit_code = self._judge(self.verdict, cut), self.verdict.exit_code
        elif interrupted is Status.SUCCESS:  # an interpreter that leaves in the middle of a turn has failed
            interrupted = Status.ERROR
        if interrupted is Status.TIMEOUT:
            exit_code = TIMEOUT_EXIT_CODE
        return Result(
            status=interrupted, exit_code=exit_code, stdout=out.text, stderr=err.text, truncated=cut,
            duration_ms=round((time.perf_counter() - self._started) * 1000, 3), results=tuple(self._results),
            container_id=self._box, denied=tuple(self._denied), error=self._failure(), fuel_consumed=self.fuel,
        )  # fmt: skip

    def _failure(self) -> Failure | None:
        """The exception, for whoever diagnoses the turn."""
        exception = self.verdict.exception if self.verdict else None
        if exception is None:
            return None
        message = f"{exception.name}: {exception.value}"[:_MESSAGE_CHARACTERS]
        return Failure(error_type=ErrorType.RUNTIME_ERROR, message=message, suggestion="", exception=exception)

    def _judge(self, verdict: TurnVerdict, cut: bool) -> Status:
        if verdict.timed_out:
            return Status.TIMEOUT
        if not verdict.ok:
            return Status.ABORTED if self.interrupted else Status.ERROR
        return Status.OUTPUT_LIMIT if cut else Status.SUCCESS


async def _scrubbed(bundle: Mapping[str, Any], size: int) -> MimeBundle:
    """Scrubs a bundle, in a thread if it is large."""
    clean: MimeBundle = scrub(bundle) if size < MIB else await anyio.to_thread.run_sync(scrub, bundle)
    return clean
