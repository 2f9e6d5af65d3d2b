"""The contract of a backend. Five verbs; what a backend lacks is data in `Capabilities`, not an exception."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream

from belljar.models import (
    Capabilities,
    Collected,
    Command,
    Entry,
    EventKind,
    File,
    FileTree,
    LanguageSupport,
    Plan,
    Result,
    Status,
)
from belljar.output import Capture

Emit = Callable[[EventKind, str], Awaitable[None]]
Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


@contextmanager
def lone_errors() -> Iterator[None]:
    """A task group's single exception as itself, not in a group: callers catch what was raised."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__


def in_this_loop(function: Callable[[], object]) -> Callable[[], None]:
    """The function as one that any thread may call: it is then run in the event loop we are in now."""
    loop: Any = anyio.lowlevel.current_token().native_token
    thread = threading.get_ident()
    from_outside = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon  # asyncio's, or trio's

    def call() -> None:
        function() if threading.get_ident() == thread else from_outside(function)

    return call


async def hear(capture: Capture, name: Stream, data: bytes, emit: Emit) -> None:
    """Takes what a guest wrote to a stream and tells it; past the limit that is told, once. Empty data: its end."""
    warned = capture.cut
    if text := capture.feed(data):
        await emit(name, text)
    if capture.cut and not warned:
        await emit("limit", f"output: {name} passed {capture.limit} bytes; from here on only its end is kept")


class Control:
    """The caller's hand on a running command: stop it, or (if `feed` is set) talk to its stdin."""

    def __init__(self, feed: MemoryObjectReceiveStream[bytes] | None = None) -> None:
        self.feed = feed
        self.reason = Status.ABORTED
        self._stopped = anyio.Event()
        self._told: list[Callable[[Status], object]] = []

    def stop(self, reason: Status = Status.ABORTED) -> None:
        """Ends the command and everything it started; its partial output is still returned."""
        if not self._stopped.is_set():
            self.reason = reason
            self._stopped.set()
            for call in self._told:
                call(reason)

    def tell(self, call: Callable[[Status], object]) -> None:
        """For who has no task to wait in `stopped`: called once, at once if it has happened already."""
        call(self.reason) if self._stopped.is_set() else self._told.append(call)

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    async def stopped(self) -> Status:
        await self._stopped.wait()
        return self.reason


class Snapshot:
    """What a session was at one moment: the written pages of its memory, and the files of its box.

    `pages` is an open file (in memory): first the page numbers, then the pages. It is closed with the last user.
    """

    def __init__(
        self, binary: str, size: int, count: int, pages: int, files: FileTree = (), folders: tuple[str, ...] = ()
    ) -> None:
        self.binary = binary
        self.size = size
        self.count = count
        self.pages = pages
        self.files = files
        self.folders = folders
        self.turns = 0  # that the session had had

    @property
    def bytes(self) -> int:
        """How much is kept: of memory and of files."""
        return os.fstat(self.pages).st_size + sum(len(file.content) for file in self.files)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.pages)


class Box(Protocol):
    """One sandbox. `put`, `get` and `list` work when the plan said `keep_files`."""

    id: str

    async def run(self, command: Command, emit: Emit, control: Control) -> Result: ...
    async def put(self, files: Sequence[File]) -> None: ...
    async def get(self, patterns: Sequence[str]) -> Collected: ...
    async def list(self) -> tuple[Entry, ...]: ...


@runtime_checkable
class Copyable(Box, Protocol):
    """A box whose session can be copied: `Capabilities.checkpoints`."""

    async def snapshot(self) -> Snapshot: ...
    def check(self, snapshot: Snapshot) -> None: ...
    async def restore(self, snapshot: Snapshot) -> None: ...


class Figures(NamedTuple):
    """What a command uses. None: that cannot be known here, which is not the same as nothing.

    Counters count from the command's start, or, where one process serves many guests, from the first look at this one.
    """

    cpu_ms: float | None = None
    memory: int | None = None  # bytes that it holds now, without what the kernel could take back at any time
    rx: int | None = None
    tx: int | None = None
    disk_read: int | None = None
    disk_write: int | None = None


@runtime_checkable
class Measurable(Protocol):
    """A box that can tell what its command uses."""

    async def measure(self) -> Figures | None:
        """None while no command runs, and where nothing is known. Cheap: it is asked each second."""
        ...


class Backend(Protocol):
    name: str

    async def probe(self) -> Capabilities:
        """Never raises; says why not and how to fix it."""
        ...

    async def languages(self) -> tuple[LanguageSupport, ...]: ...

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Box]: ...

    async def reap(self) -> int:
        """Removes what a Belljar that died left behind; returns how many sandboxes that were."""
        ...


@runtime_checkable
class Preparable(Backend, Protocol):
    """A backend that needs something done once: `Capabilities.setup`."""

    async def setup(self, told: Callable[[str], object]) -> None:
        """Does it, telling each step."""
        ...
