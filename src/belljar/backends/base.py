"""The contract of a backend, as Protocols. What a backend lacks is data in `Capabilities`, not an exception."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from anyio.abc import ByteStream, TaskGroup

from belljar.backends.snapshot import Snapshot
from belljar.backends.turn import TurnRequest
from belljar.control.box_tree import BoxTree
from belljar.control.control import Control
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.plan import Command, Plan
from belljar.core.process import BoxProcess
from belljar.core.request import Egress, Limits
from belljar.core.result import Collected, Entry, EventKind, File, Result, Status

Emit = Callable[[EventKind, str], Awaitable[None]]


class Box(Protocol):
    """One sandbox. `put`, `reading`, `get` and `list` work when its plan said `keep_files`.

    They act on what the guest sees at /workspace, a granted folder included, and with the guest's rights.
    """

    id: str

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        """Runs a command to its end.

        Args:
            command: the program with its files, environment and limits.
            emit: is awaited with each event: `started`, what the guest prints, limits it met, hosts it was denied.
            control: stops the command, and feeds its stdin.

        Returns:
            What came of it. A guest's failure is a result, not an exception.

        Raises:
            BackendError: the sandbox failed, not the guest.
        """
        ...

    async def put(self, files: Sequence[File]) -> None:
        """Writes files into /workspace. One that was there keeps its permissions.

        Raises:
            OSError: what the guest would get: PermissionError, IsADirectoryError, NotADirectoryError, ELOOP for a
                link, ENOSPC.
        """
        ...

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens one regular file of /workspace, and gives its content piece by piece, however large it is.

        Raises:
            OSError: what the guest would get, when it is opened; ELOOP for a link.
        """
        ...

    async def get(self, patterns: Sequence[str]) -> Collected:
        """Reads the regular files of /workspace that match, and says what was left out and why."""
        ...

    async def list(self) -> tuple[Entry, ...]:
        """Lists what is in /workspace."""
        ...


class Interpreter(Protocol):
    """An interpreter that lives in a box and keeps its variables from turn to turn. One turn at a time."""

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

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the last turn told, if its request was to `complete` one."""
        ...

    def interrupt(self) -> bool:
        """Asks the turn under way to end, as Ctrl-C does; the interpreter goes on, unless the turn does not react.

        Returns:
            False where that cannot be done, or no turn is under way: nothing has happened then.
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

    def interpreter(self, env: Mapping[str, str], lifetime: float, language: str = "python") -> Interpreter:
        """Returns an interpreter that is not open yet; a living box may have any number of them.

        Args:
            env: variables that its code finds.
            lifetime: seconds after which the caller will stop it; it may end by itself then.
            language: one of `Capabilities.sessions`.
        """
        ...


@runtime_checkable
class Networked(Box, Protocol):
    """A box whose network can be changed while it is open."""

    async def change_network(self, allowed: Egress) -> None:
        """Puts another list in force, and cuts the connections that it does not allow.

        Raises:
            NotAvailable: there is no way out of this box that could be opened now.
        """
        ...


class ImageUsed(NamedTuple):
    """The image that a command runs in.

    Attributes:
        name: as it was asked for, or as the settings say.
        id: of what the engine has under that name; empty where it does not tell.
    """

    name: str
    id: str = ""


@runtime_checkable
class Imaged(Box, Protocol):
    """A box whose commands run in an image."""

    async def image(self, language: str | None, kind: str | None) -> ImageUsed:
        """Returns the image for commands of a language and a type of work.

        Raises:
            BelljarError: there is none, and such a command would fail for that.
        """
        ...


@runtime_checkable
class Copyable(Box, Protocol):
    """A box whose session can be copied (`Capabilities.checkpoints`)."""

    async def snapshot(self) -> Snapshot:
        """Copies the session between two turns."""
        ...

    def check(self, snapshot: Snapshot) -> None:
        """Raises the reason why `restore` could not use this snapshot, if there is one."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Makes this box what the copied one was; its session then goes on from there."""
        ...


@runtime_checkable
class Drawing(Box, Protocol):
    """A box that has the figures of its last program (`Capabilities.figures`)."""

    async def figures(self, limit: int) -> Collected:
        """Reads the pictures that it left, in the order in which they were drawn; `limit`: bytes in all."""
        ...


@runtime_checkable
class Living(Box, Protocol):
    """A box that is one machine for all its commands (`Capabilities.living`, asked for by `Plan.living`).

    `run` may be called any number of times at once. Commands see each other's processes and ports, and what a command
    leaves in the background goes on after its end. `run` calls `Control.begin` when the command runs, and
    `Control.hear` with its output; where `Command.pty` is given, that is a terminal's, all of it stdout. Where there is
    a `Control.hear`, the result keeps no output and no output limit ends the command.
    """

    tree: BoxTree

    @property
    def own_folders(self) -> tuple[str, ...]:
        """The folders that are the guest's own, by whole paths: what a snapshot keeps, and no granted folder."""
        ...

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the box now, without what is ours."""
        ...

    async def listens(self, port: int) -> bool:
        """Whether something in the box listens on a TCP port, by the kernel's word."""
        ...

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the box's own loopback, without a route from outside.

        Raises:
            OSError: as a program inside would get it: ConnectionRefusedError.
        """
        ...

    async def pause(self) -> None:
        """Stops all processes of the box where they are (`pause` in `Capabilities.living`)."""
        ...

    async def resume(self) -> None:
        """Lets them go on."""
        ...


@runtime_checkable
class LastingBox(Living, Protocol):
    """A living box that may go on without this process, as `Plan.absence` says.

    Attributes:
        place: by which its backend finds it again; empty: it ends with us all the same.
        left: whether it goes on though it is closed: it has been left.
        stopped: whether its processes are stopped where they are, if it was found again.
        life: seconds that it may live on, as things are; None: no end is known.
    """

    left: bool
    stopped: bool
    life: Callable[[], float | None]

    @property
    def place(self) -> Mapping[str, str | int]: ...

    def leave(self) -> None:
        """Has it go on when it is closed, with the processes that have a `Control.feed`."""
        ...

    async def rejoin(self, place: Mapping[str, str | int], limits: Limits, emit: Emit, control: Control) -> Result:
        """Waits for the end of a process that an earlier server started (`StartedGuest.place`), as `run` does.

        Nothing that it prints is heard any more.

        Raises:
            SessionEnded: it has ended, and nothing is known of its end.
        """
        ...


class Backend(Protocol):
    """A runtime that opens sandboxes."""

    name: str

    async def probe(self) -> Capabilities:
        """Tries what works here. Never raises: it says why not, and how to fix it."""
        ...

    async def languages(self) -> tuple[LanguageSupport, ...]:
        """Says for each language whether it can be run here."""
        ...

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Box]:
        """Makes a sandbox by a finished plan, and removes it with all that it holds at the end."""
        ...

    async def reap(self) -> int:
        """Removes what a Belljar that died left behind; returns how many sandboxes that were."""
        ...


@runtime_checkable
class Finding(Backend, Protocol):
    """A backend whose boxes may go on without the process that opened them."""

    def find(self, plan: Plan, place: Mapping[str, str | int]) -> AbstractAsyncContextManager[Box]:
        """Takes over a box that an earlier process left (`LastingBox.place`), and removes it at the end.

        Raises:
            SessionEnded: it is not there any more, or not what it was.
        """
        ...

    async def discard(self, id: str, place: Mapping[str, str | int]) -> None:
        """Removes such a box, if it is still there and ours; `id`: that of its plan."""
        ...


@runtime_checkable
class Rememberable(Backend, Protocol):
    """A backend whose probe holds until something changes, so that other processes may go by it."""

    def depends_on(self) -> Mapping[str, Any]:
        """Returns what the probe's outcome depends on beside the machine and the user, as JSON. It starts nothing.

        Raises:
            BackendError, OSError: not even that can be told; there is nothing to go by then.
        """
        ...

    def found(self) -> Mapping[str, str]:
        """Returns what the last probe found that opening a box needs."""
        ...

    def recall(self, found: Mapping[str, str]) -> None:
        """Takes over what another process' probe found; what is cheap to check is checked again.

        Raises:
            BackendError, OSError: it no longer holds.
        """
        ...


@runtime_checkable
class Preparable(Backend, Protocol):
    """A backend that needs something done once (`Capabilities.setup`)."""

    async def setup(self, told: Callable[[str], object], image: str | None = None) -> None:
        """Does it, and calls `told` with each step.

        Args:
            told: Is called with each step.
            image: What the first run will need of a backend with images; without one: the usual image.
        """
        ...
