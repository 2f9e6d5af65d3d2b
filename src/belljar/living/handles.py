"""What can be asked of a living sandbox, its processes and its interpreters, whether it is here or on a server.

The classes of this machine (`living.part`, `living.process`, `living.interpreter`) and those of the client answer to
these; the blocking twins call nothing else. What only a server has to be asked for is awaited there, and not here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from belljar.control.callbacks import Cancel, Listener, OutputCallback
from belljar.core import errors
from belljar.core.options import StrPath
from belljar.core.process import BoxProcess, Chunk, PtySize
from belljar.core.result import Entry, Result
from belljar.host.lifetime import Openable

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from belljar.living.files import AsyncFiles
    from belljar.living.network import AsyncNetwork


def pty_size(given: tuple[int, int] | PtySize | None) -> PtySize | None:
    """Returns the size of a terminal, from columns and rows."""
    if given is None or isinstance(given, PtySize):
        return given
    try:
        columns, rows = given
        return PtySize(columns=columns, rows=rows)
    except (TypeError, ValueError):
        raise errors.InvalidRequest("pty: takes columns and rows of 1 to 4096", fix="write pty=(80, 24)") from None


def lacking(backend: str, what: str) -> errors.NotAvailable:
    """Returns the error for what a backend's living sandboxes cannot do; `what`: that in words."""
    return errors.NotAvailable(
        f"{backend} {what}", fix="choose another backend: `belljar doctor` shows what each can do"
    )


class ProcessHandle(Protocol):
    """A process that was started in a living sandbox."""

    @property
    def id(self) -> str:
        """Its name in the sandbox."""
        ...

    @property
    def pid(self) -> int:
        """Its number inside the sandbox; 0 if it never ran."""
        ...

    @property
    def command(self) -> str:
        """Its command line."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values of the caller's."""
        ...

    @property
    def pty(self) -> PtySize | None:
        """The size that its terminal began with; None: it has none."""
        ...

    @property
    def started(self) -> float:
        """When it was started, in seconds since 1970."""
        ...

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        ...

    @property
    def error(self) -> errors.BelljarError | None:
        """Why Belljar lost it."""
        ...

    @property
    def result(self) -> Result | None:
        """What came of it."""
        ...

    def output(self, since: int = 0) -> AsyncIterator[Chunk]:
        """Gives its output as it comes, until its end."""
        ...

    def kept(self, since: int = 0) -> tuple[Chunk, ...] | Awaitable[tuple[Chunk, ...]]:
        """Returns the pieces of its output that are kept now."""
        ...

    async def write(self, data: bytes | str) -> None:
        """Writes to its standard input."""
        ...

    async def close_stdin(self) -> None:
        """Ends its standard input."""
        ...

    async def signal(self, signal: str | int) -> bool:
        """Sends it a signal."""
        ...

    async def kill(self) -> Result:
        """Ends it and everything it started."""
        ...

    async def resize(self, columns: int, rows: int) -> None:
        """Gives its terminal another size."""
        ...

    async def wait(self, timeout: float | None = None) -> Result:
        """Waits until it ends."""
        ...


class InterpreterHandle(Openable):
    """An interpreter of a living sandbox."""

    language: str

    @property
    @abstractmethod
    def ended(self) -> str:
        """Says how it ended; empty while it lives."""

    @abstractmethod
    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """Runs one turn, after those before it."""

    @abstractmethod
    def interrupt(self) -> bool | Awaitable[bool]:
        """Interrupts the turn under way."""

    @abstractmethod
    async def complete(self, text: str) -> tuple[str, ...]:
        """Returns the names that a half-typed one may become."""


class LivingHandle(Openable):
    """A sandbox, and what it can do when it is a living one."""

    @abstractmethod
    async def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        """Writes a file below /workspace."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Returns the content of a file below /workspace."""

    @abstractmethod
    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file below /workspace."""

    @abstractmethod
    async def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace."""

    @property
    @abstractmethod
    def network(self) -> AsyncNetwork:
        """What it may reach."""

    @abstractmethod
    async def start(
        self, command: str | Iterable[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        pty: tuple[int, int] | PtySize | None = None, timeout: float | None = None,
        labels: Mapping[str, str] | None = None, id: str = "",
    ) -> ProcessHandle:  # fmt: skip
        """Starts a process that goes on beside everything else."""

    @abstractmethod
    def process(self, id: str) -> ProcessHandle | Awaitable[ProcessHandle]:
        """Returns a process that was started here, by its id."""

    @property
    @abstractmethod
    def started(self) -> tuple[ProcessHandle, ...] | Awaitable[tuple[ProcessHandle, ...]]:
        """The processes that were started here."""

    @abstractmethod
    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the sandbox now."""

    @abstractmethod
    async def wait_for_port(self, port: int, *, timeout: float = 30.0) -> None:
        """Waits until something in the sandbox listens on a TCP port."""

    @abstractmethod
    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the sandbox's own loopback."""

    @property
    @abstractmethod
    def files(self) -> AsyncFiles:
        """Its files."""

    @abstractmethod
    def interpreter(self, language: str = "python", *, env: Mapping[str, str] | None = None) -> InterpreterHandle:
        """Returns an interpreter that keeps its variables, not yet open."""

    @property
    @abstractmethod
    def left_out(self) -> tuple[str, ...]:
        """What the sandbox or snapshot that it began with had and could not be copied."""

    @property
    @abstractmethod
    def living(self) -> bool:
        """Whether it is a living sandbox."""

    @property
    @abstractmethod
    def home(self) -> str:
        """The home of its programs."""

    @property
    @abstractmethod
    def labels(self) -> Mapping[str, str]:
        """Names and values of the caller's."""

    @property
    @abstractmethod
    def expires(self) -> float | None:
        """When it ends by itself."""

    @property
    @abstractmethod
    def paused(self) -> bool:
        """Whether its processes are stopped where they are."""

    @property
    @abstractmethod
    def ended(self) -> str:
        """Says how it ended; empty while it lives."""

    @abstractmethod
    async def pause(self) -> None:
        """Stops all its processes where they are."""

    @abstractmethod
    async def resume(self) -> None:
        """Lets its processes go on."""

    @abstractmethod
    def extend(self, seconds: float) -> Awaitable[None] | None:
        """Moves the end of its time to so many seconds from now."""
