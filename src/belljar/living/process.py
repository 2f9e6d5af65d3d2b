"""Processes that go on: started in a living sandbox, heard, fed, signalled and waited for."""

from __future__ import annotations

import errno
import signal as signals
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import anyio

from belljar.backends.base import Emit, LastingBox
from belljar.control.control import Control
from belljar.control.output_log import OutputLog
from belljar.core import errors
from belljar.core.lasting import ProcessMark
from belljar.core.process import Chunk, PtySize, shell_text
from belljar.core.request import Life, Limits, RunRequest
from belljar.core.result import STREAMS, Result, Status, StreamName
from belljar.host.loops import lone_errors
from belljar.living.handles import pty_size

if TYPE_CHECKING:
    from belljar.engine.lease import Lease
    from belljar.living.machine import LivingMachine

_PIECE_BYTES = 64 * 1024  # of what is written at once
_WAITING_PIECES = 16  # that may wait until the program reads them
_END_OF_INPUT = b"\x04"  # what Ctrl-D types
_LEAST_SECONDS = 0.1  # of a time that was over while nobody looked


class AsyncProcess:
    """A process that was started in a living sandbox, and goes on until it ends or the sandbox does.

    Its output is kept, the first megabyte and the last one, so that readers can come, go and come back: `output`.

    Attributes:
        id: its name in the sandbox.
        command: its command line.
        labels: names and values of yours.
        pty: the size that its terminal began with; None: it has none.
        log: its output so far.
        started: when it was started, in seconds since 1970.
        found: whether an earlier server started it: nothing that it prints is heard any more, and it gets no input.
    """

    def __init__(self, id: str, request: RunRequest, pty: PtySize | None, labels: Mapping[str, str]) -> None:
        """Nothing is started yet: `AsyncSandbox.start` makes one and starts it."""
        self.id: str = id
        self.command: str = shell_text(request.command or ()) or " ".join(request.command or ())
        self.labels: Mapping[str, str] = dict(labels)
        self.pty: PtySize | None = pty
        self.log: OutputLog = OutputLog()
        self.started: float = time.time()
        self._request = request
        self._feed, self._input = anyio.create_memory_object_stream[bytes](_WAITING_PIECES)
        self._control = Control(self._input, self.log.add)
        self._begun = anyio.Event()
        self._over = anyio.Event()
        self._result: Result | None = None
        self._error: errors.BelljarError | None = None
        self._found: ProcessMark | None = None
        self.found: bool = False
        self._run = ""  # the name under which it is recorded

    @classmethod
    def found_again(cls, mark: ProcessMark) -> AsyncProcess:
        """Returns a process that an earlier server started, and left running; it is joined by `begin`."""
        limits = {} if mark.timeout is None else {"timeout": mark.timeout}
        asked = RunRequest(command=mark.argv, limits=Limits(**limits), living=Life())
        process = cls(mark.id, asked, mark.pty, mark.labels)
        process.started, process._found, process.found, process._run = mark.started, mark, True, mark.run
        process.forgo()
        process.log.close()
        return process

    def mark(self) -> ProcessMark | None:
        """Returns by what it is found again; None: it cannot be, or has ended."""
        place = self._control.guest.place if self._control.guest else {}
        if not (place and self.running):
            return None
        return ProcessMark(
            id=self.id, argv=self._request.command or (), labels=self.labels, pty=self.pty, started=self.started,
            timeout=self._request.limits.named().get("timeout"), place=place, run=self._run,
        )  # fmt: skip

    def __repr__(self) -> str:
        state = "runs" if self.running else f"ended: {self._result.status if self._result else self._error}"
        return f"<process {self.id}, {state}>"

    @property
    def pid(self) -> int:
        """Its number inside the sandbox; 0 if it never ran."""
        return self._control.guest.pid if self._control.guest else 0

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._over.is_set()

    @property
    def result(self) -> Result | None:
        """What came of it; None while it runs, and where Belljar lost it (`wait` raises the reason then)."""
        return self._result

    @property
    def error(self) -> errors.BelljarError | None:
        """Why Belljar lost it; None while it runs, and where it has a result."""
        return self._error

    def output(self, since: int = 0) -> AsyncIterator[Chunk]:
        """Gives its output as it comes, until its end: `async for chunk in process.output()`.

        Args:
            since: the `seq` of the last piece that you have; what came after it and is kept is given at once.
        """
        return self.log.follow(since)

    def kept(self, since: int = 0) -> tuple[Chunk, ...]:
        """Returns the pieces of its output that are kept now, after number `since`."""
        return tuple(self.log.since(since))

    async def write(self, data: bytes | str) -> None:
        """Writes to its standard input, or types into its terminal; waits while it does not read.

        Raises:
            BrokenPipeError: it has ended, or its input was closed.
        """
        view = memoryview(data.encode() if isinstance(data, str) else data)
        try:
            for start in range(0, len(view), _PIECE_BYTES):
                await self._feed.send(bytes(view[start : start + _PIECE_BYTES]))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise BrokenPipeError(errno.EPIPE, "the process has ended, or its input was closed") from None

    async def close_stdin(self) -> None:
        """Ends its standard input, as Ctrl-D does; what has a terminal can be written to afterwards."""
        if self.pty is not None:
            await self.write(_END_OF_INPUT)
        else:
            self._feed.close()

    async def signal(self, signal: str | int) -> bool:
        """Sends it a signal: "TERM", "INT", 9, …

        Returns:
            False if it has ended.
        """
        number, guest = _number(signal), self._control.guest
        if not self.running or guest is None:
            return False
        try:
            await guest.signal(number)
        except ProcessLookupError:
            return False
        return True

    async def kill(self) -> Result:
        """Ends it and everything it started: SIGTERM, and SIGKILL after its grace. Returns its result."""
        self.stop()
        return await self.wait()

    async def resize(self, columns: int, rows: int) -> None:
        """Gives its terminal another size."""
        if self.pty is None:
            raise errors.InvalidRequest("this process has no terminal", fix="start it with pty=(80, 24)")
        size = pty_size((columns, rows))
        if self.running and size and self._control.guest:
            await self._control.guest.resize(size)

    async def wait(self, timeout: float | None = None) -> Result:
        """Waits until it ends, and returns its result, whose `stdout` and `stderr` are what is kept of its output.

        Raises:
            TimeoutError: it has not ended after so many seconds. It goes on.
            BackendError: Belljar lost it.
        """
        with anyio.move_on_after(timeout):
            await self._over.wait()
        if self.running:
            raise TimeoutError(f"process {self.id} has not ended after {timeout:g} seconds; it goes on")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    # --- for the machine ---

    def stop(self, reason: Status = Status.ABORTED) -> None:
        """Ends it and everything it started, without waiting for that."""
        self._control.stop(reason)

    async def gone(self) -> None:
        """Waits until nothing of it is left."""
        await self._over.wait()

    def forgo(self) -> None:
        """Says that it will never be started."""
        self._feed.close()
        self._input.close()

    async def begin(self, machine: LivingMachine, id: str) -> None:
        """Starts it, and returns when it runs or has failed to.

        Raises:
            BelljarError: it could not be started.
        """
        self._run = id
        machine.tasks.start_soon(self._live, machine, id)
        await self._begun.wait()
        if self._error is not None:
            machine.processes.pop(self.id, None)
            raise self._error

    async def join(self, machine: LivingMachine) -> None:
        """Waits for the end of one that was found again."""
        await self._live(machine, self._run)

    async def _live(self, machine: LivingMachine, id: str) -> None:
        try:
            work = await self._work(machine.lease)
            with lone_errors():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._note_start, machine)
                    self._result = await machine.lease.conduct(
                        self._request, work, listener=None, id=id, again=self._found is not None
                    )
                    tasks.cancel_scope.cancel()
        except errors.BelljarError as error:
            self._error = error
        except Exception as error:  # a bug of ours must not end the sandbox
            self._error = errors.ExecutionFailed(f"the process was lost: {type(error).__name__}: {error}")
        finally:
            if self._result is None and self._error is None:
                self._error = errors.Aborted("the sandbox ended before the process did")
            self.log.close()
            self._input.close()
            self._feed.close()
            self._over.set()
            self._begun.set()
            machine.note_change()

    async def _work(self, lease: Lease) -> Callable[[Emit], Awaitable[Result]]:
        """What runs it to its end, or waits for the end of one that was found again."""
        box, mark = lease.box, self._found
        if mark is None:
            command = (await lease.command(self._request)).model_copy(update={"pty": self.pty})

            async def run(emit: Emit) -> Result:
                return self._with_output(await box.run(command, emit, self._control))

            return run
        assert isinstance(box, LastingBox)
        limits, place = lease.limits(self._request), mark.place
        rest = max(_LEAST_SECONDS, limits.timeout - (time.time() - self.started))

        async def wait(emit: Emit) -> Result:
            return await box.rejoin(place, limits.model_copy(update={"timeout": rest}), emit, self._control)

        return wait

    async def _note_start(self, machine: LivingMachine) -> None:
        await self._control.started()
        self._begun.set()
        machine.note_change()

    def _with_output(self, result: Result) -> Result:
        """The backend's result with what is kept of its output, by which it is diagnosed."""
        kept = self.log.since(0)
        texts: dict[StreamName, list[bytes]] = {name: [] for name in STREAMS}
        for chunk in kept:
            texts[chunk.stream].append(chunk.data)
        out, err = (b"".join(texts[name]).decode("utf-8", "replace") for name in STREAMS)
        cut = any(chunk.missed for chunk in kept)
        return result.model_copy(update={"stdout": out, "stderr": err, "truncated": cut})


def _number(signal: str | int) -> int:
    if isinstance(signal, str):
        name = signal.upper().removeprefix("SIG")
        found = getattr(signals, f"SIG{name}", None)
        if isinstance(found, signals.Signals):
            return int(found)
    elif not isinstance(signal, bool) and 0 < signal < 65:
        return int(signal)
    raise errors.InvalidRequest(f"signal: there is no signal {signal!r}", fix='write signal("TERM"), or its number')
