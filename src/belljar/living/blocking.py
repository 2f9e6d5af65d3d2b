"""The blocking twins of what a living sandbox has, wherever it is: its processes, connections and interpreters."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from belljar.control.callbacks import Cancel, Listener, OutputCallback
from belljar.core import errors
from belljar.core.options import StrPath
from belljar.core.process import BoxProcess, Chunk, PtySize
from belljar.core.result import Entry, Result
from belljar.host import portal
from belljar.living.handles import InterpreterHandle, LivingHandle, ProcessHandle

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from belljar.living.files import Files
    from belljar.living.network import Network

T = TypeVar("T")
HandleT = TypeVar("HandleT", bound=LivingHandle)
_READ_BYTES = 64 * 1024


def _asked(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """Calls what is async on a server and not so here, in the event loop's thread."""

    async def ask() -> T:
        answer = function(*arguments)
        found: T = await answer if inspect.isawaitable(answer) else answer
        return found

    return portal.call(ask)


class LivingPart(portal.Blocking[HandleT]):
    """What a sandbox can do beside commands, here or on a server; most of it when it is a living one."""

    # --- files below /workspace, of any sandbox ---

    def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        """Writes a file of the sandbox, text or bytes, by its name below /workspace."""
        portal.call(lambda: self._core.write(path, content, executable=executable))

    def read(self, path: str) -> bytes:
        """Returns the content of a file of the sandbox, or raises the OSError that its guest would get."""
        return portal.call(self._core.read, path)

    def reading(self, path: str) -> AbstractContextManager[Iterator[bytes]]:
        """Opens a file as `read` does, for one that is too large to be held: `with box.reading("big") as pieces`."""
        return portal.reading(self._core.reading(path))

    def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        return portal.call(self._core.list)

    @property
    def network(self) -> Network:
        """What it may reach, told and changed at once: `box.network.allow("example.org")`."""
        from belljar.living.network import Network

        return Network(self._core.network)

    # --- what goes on in a living one ---

    def start(
        self, command: str | Iterable[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        pty: tuple[int, int] | PtySize | None = None, timeout: float | None = None,
        labels: Mapping[str, str] | None = None, id: str = "",
    ) -> Process:  # fmt: skip
        """Starts a process that goes on beside everything else, and returns when it runs: see `AsyncSandbox.start`."""
        return Process(
            portal.call(
                lambda: self._core.start(
                    command, cwd=cwd, env=env, pty=pty, timeout=timeout, labels=labels, id=id
                )
            )
        )  # fmt: skip

    def process(self, id: str) -> Process:
        """Returns a process that was started here, by its id."""
        return Process(_asked(self._core.process, id))

    @property
    def started(self) -> tuple[Process, ...]:
        """The processes that were started here: all that run, and the last that have ended."""
        return tuple(Process(one) for one in _asked(lambda: self._core.started))

    def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the sandbox now, by the kernel's word: also what its processes have started."""
        return portal.call(self._core.processes)

    def wait_for_port(self, port: int, *, timeout: float = 30.0) -> None:
        """Waits until something in the sandbox listens on a TCP port; raises TimeoutError if nothing does."""
        portal.call(partial(self._core.wait_for_port, port, timeout=timeout))

    def dial(self, port: int) -> Connection:
        """Connects to a TCP port of the sandbox's own loopback. No network is opened for that, in or out.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        return Connection(portal.call(self._core.dial, port))

    @property
    def files(self) -> Files:
        """Its files, by whole paths."""
        from belljar.living.files import Files

        return Files(self._core.files)

    def interpreter(self, language: str = "python", *, env: Mapping[str, str] | None = None) -> BoxInterpreter:
        """Opens an interpreter that keeps its variables: `with box.interpreter() as python`, or `close` it later."""
        return BoxInterpreter._of(self._core.interpreter(language, env=env))._open()

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the sandbox or snapshot that it began with had and could not be copied, and why."""
        return self._core.left_out

    @property
    def living(self) -> bool:
        """Whether it is a living sandbox: one machine for all its commands."""
        return self._core.living

    @property
    def home(self) -> str:
        """The home of its programs."""
        return self._core.home

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values of yours."""
        return self._core.labels

    @property
    def expires(self) -> float | None:
        """When it ends by itself, in seconds since 1970; None: it does not."""
        return self._core.expires

    @property
    def paused(self) -> bool:
        """Whether its processes are stopped where they are."""
        return self._core.paused

    @property
    def ended(self) -> str:
        """Says how it ended, if its time was over before it was closed; empty while it lives."""
        return self._core.ended

    def pause(self) -> None:
        """Stops all its processes where they are, until `resume`. They keep their memory and use no processor."""
        portal.call(self._core.pause)

    def resume(self) -> None:
        """Lets its processes go on; one that paused because its time was over gets that time again."""
        portal.call(self._core.resume)

    def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now."""
        _asked(self._core.extend, seconds)


class Process:
    """A process that was started in a living sandbox, and goes on until it ends or the sandbox does.

    Its output is kept, the first megabyte and the last one, so that readers can come, go and come back: `output`.
    """

    def __init__(self, core: ProcessHandle) -> None:
        """Wraps the async one: `Sandbox.start` makes it."""
        self._core = core

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def id(self) -> str:
        """Its name in the sandbox."""
        return self._core.id

    @property
    def pid(self) -> int:
        """Its number inside the sandbox; 0 if it never ran."""
        return self._core.pid

    @property
    def command(self) -> str:
        """Its command line."""
        return self._core.command

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values of yours."""
        return self._core.labels

    @property
    def pty(self) -> PtySize | None:
        """The size that its terminal began with; None: it has none."""
        return self._core.pty

    @property
    def started(self) -> float:
        """When it was started, in seconds since 1970."""
        return self._core.started

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._core.running

    @property
    def result(self) -> Result | None:
        """What came of it; None while it runs, and where Belljar lost it (`wait` raises the reason then)."""
        return self._core.result

    @property
    def error(self) -> errors.BelljarError | None:
        """Why Belljar lost it; None while it runs, and where it has a result."""
        return self._core.error

    def output(self, since: int = 0) -> Iterator[Chunk]:
        """Gives its output as it comes, until its end: `for chunk in process.output()`.

        Args:
            since: the `seq` of the last piece that you have; what came after it and is kept is given at once.
        """
        return portal.iterating(self._core.output(since))

    def kept(self, since: int = 0) -> tuple[Chunk, ...]:
        """Returns the pieces of its output that are kept now, after number `since`."""
        return _asked(self._core.kept, since)

    def write(self, data: bytes | str) -> None:
        """Writes to its standard input, or types into its terminal; waits while it does not read.

        Raises:
            BrokenPipeError: it has ended, or its input was closed.
        """
        portal.call(self._core.write, data)

    def close_stdin(self) -> None:
        """Ends its standard input, as Ctrl-D does; what has a terminal can be written to afterwards."""
        portal.call(self._core.close_stdin)

    def signal(self, signal: str | int) -> bool:
        """Sends it a signal: "TERM", "INT", 9, … False if it has ended."""
        return portal.call(self._core.signal, signal)

    def kill(self) -> Result:
        """Ends it and everything it started: SIGTERM, and SIGKILL after its grace. Returns its result."""
        return portal.call(self._core.kill)

    def resize(self, columns: int, rows: int) -> None:
        """Gives its terminal another size."""
        portal.call(self._core.resize, columns, rows)

    def wait(self, timeout: float | None = None) -> Result:
        """Waits until it ends, and returns its result: see `AsyncProcess.wait`.

        Raises:
            TimeoutError: it has not ended after so many seconds. It goes on.
        """
        return portal.call(partial(self._core.wait, timeout))


class BoxInterpreter(portal.Blocking[InterpreterHandle]):
    """An interpreter that lives in a living sandbox: `with box.interpreter() as python: python.run("x = 1")`.

    What holds for turns is told at `AsyncBoxInterpreter`.
    """

    @property
    def language(self) -> str:
        """Its language."""
        return self._core.language

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """Runs one turn: see `AsyncBoxInterpreter.run`. Callbacks are called from another thread."""
        return portal.call(
            lambda: self._core.run(
                code, path=path, timeout=timeout, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr,
                cancel=cancel, id=id,
            )
        )  # fmt: skip

    def interrupt(self) -> bool:
        """Interrupts the turn under way, from another thread: see `AsyncBoxInterpreter.interrupt`."""
        return _asked(self._core.interrupt)

    def complete(self, text: str) -> tuple[str, ...]:
        """Returns the names that a half-typed one, such as "os.pa", may become, as the guest says."""
        return portal.call(self._core.complete, text)

    @property
    def ended(self) -> str:
        """Says how it ended; empty while it lives."""
        return self._core.ended


class Connection:
    """A connection to a port of a living sandbox: `with box.dial(8000) as port: port.write(b"..."); port.read()`."""

    def __init__(self, stream: ByteStream) -> None:
        """Wraps the async one: `Sandbox.dial` makes it."""
        self._stream = stream

    def read(self, count: int = _READ_BYTES) -> bytes:
        """Returns what came next, at most so many bytes; waits for it. Nothing: the other side has closed."""

        async def receive() -> bytes:
            try:
                return await self._stream.receive(count)
            except anyio.EndOfStream:
                return b""

        return portal.call(receive)

    def write(self, data: bytes) -> None:
        """Sends all of it."""
        portal.call(self._stream.send, data)

    def close(self) -> None:
        """Closes it, in both directions. Closing twice does no harm."""
        portal.call(self._stream.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
