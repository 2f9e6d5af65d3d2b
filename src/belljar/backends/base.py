"""The contract of a backend. Five verbs; what a backend lacks is data in `Capabilities`, not an exception."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, runtime_checkable

from anyio.abc import TaskGroup

from belljar.backends.control import Control
from belljar.backends.turn import TurnRequest
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.plan import Command, Plan
from belljar.core.result import Collected, Entry, EventKind, File, FileTree, Result, Status, Stream, Usage
from belljar.host.capture import Capture

Emit = Callable[[EventKind, str], Awaitable[None]]


async def hear(capture: Capture, name: Stream, data: bytes, emit: Emit) -> None:
    """Takes what a guest wrote to a stream and tells it; past the limit that is told, once. Empty data: its end."""
    warned = capture.cut
    if text := capture.feed(data):
        await emit(name, text)
    if capture.cut and not warned:
        await emit("limit", f"output: {name} passed {capture.limit} bytes; from here on only its end is kept")


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


class Interpreter(Protocol):
    """A Python interpreter that lives in a box and keeps its variables from turn to turn. One turn at a time."""

    @property
    def ended(self) -> str:
        """Says how the interpreter ended; empty while it lives."""
        ...

    async def open(self, tasks: TaskGroup, emit: Emit) -> None:
        """Starts the interpreter, and returns when it is ready for a turn.

        Args:
            tasks: where it may run what has to go on between turns.
            emit: hears the events that belong to no turn, such as a denied connection of a thread.

        Raises:
            StartFailed: it did not get ready.
        """
        ...

    async def turn(self, request: TurnRequest, emit: Emit) -> Result:
        """Runs one turn to its end; `emit` hears its output, results and denials as they come.

        Returns:
            The turn's result. If the interpreter ended with it, `ended` says so afterwards.

        Raises:
            BackendError: the turn was lost by a failure of ours.
        """
        ...

    def stop(self, reason: Status) -> None:
        """Ends the interpreter; a turn under way then returns what it has, with this status."""
        ...

    async def close(self) -> None:
        """Ends the interpreter, and returns when nothing of it is left."""
        ...


@runtime_checkable
class Interpreting(Box, Protocol):
    """A box that can hold a live interpreter: `Capabilities.sessions`."""

    def interpreter(self, env: Mapping[str, str], lifetime: float) -> Interpreter:
        """Returns an interpreter that is not open yet; after `lifetime` seconds it is ended."""
        ...


@runtime_checkable
class Copyable(Box, Protocol):
    """A box whose session can be copied: `Capabilities.checkpoints`."""

    async def snapshot(self) -> Snapshot: ...
    def check(self, snapshot: Snapshot) -> None: ...
    async def restore(self, snapshot: Snapshot) -> None: ...


@runtime_checkable
class Measurable(Protocol):
    """A box that can tell what its command uses."""

    async def measure(self) -> Usage | None:
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
