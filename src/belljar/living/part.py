"""The part of `Sandbox` that works in a living one: processes that go on, files, ports, interpreters, pause and time.

`sandbox` imports it with each use, so that it imports nothing that costs; the rest comes when a sandbox lives.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.options import check_seconds
from belljar.core.process import PROCESS_NAME, BoxProcess, PtySize, words
from belljar.core.request import Life, RunRequest
from belljar.living.handles import LivingHandle

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from belljar.core.net_change import NetworkChange, NetworkRecord
    from belljar.engine.lease import Lease
    from belljar.living.files import AsyncFiles
    from belljar.living.interpreter import AsyncBoxInterpreter
    from belljar.living.machine import Beginning, LivingMachine
    from belljar.living.network import AsyncNetwork
    from belljar.living.process import AsyncProcess

_NAME_FIX = "write letters, digits, dots, dashes and underscores, such as dev-1"

PartT = TypeVar("PartT", bound="AsyncLivingPart")


class AsyncLivingPart(LivingHandle):
    """What `AsyncSandbox` can do when it was opened with `living=True`."""

    _request: RunRequest
    _machine: LivingMachine | None = None
    _was_closed: bool = False

    _beginning: Beginning | None = None

    @abstractmethod
    def _asked(self, **options: Any) -> RunRequest:
        """Returns what is asked for by one command's options."""

    @property
    @abstractmethod
    def lease(self) -> Lease:
        """The open box with the decisions that led to it."""

    @abstractmethod
    def another(self, id: str = "") -> Self:
        """Returns a new sandbox, not yet open, asked for in the same words."""

    # --- processes ---

    async def start(
        self, command: str | Iterable[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        pty: tuple[int, int] | PtySize | None = None, timeout: float | None = None,
        labels: Mapping[str, str] | None = None, id: str = "",
    ) -> AsyncProcess:  # fmt: skip
        """Starts a process that goes on beside everything else, and returns when it runs.

        It goes on until it ends by itself, is ended, or the sandbox ends. The first megabyte of its output is kept,
        and the last one.

        Args:
            command: a line of shell, or a program with its arguments.
            cwd: the folder in which it starts, below /workspace unless it begins with a slash.
            env: variables, besides the sandbox's own.
            pty: gives it a terminal of so many columns and rows.
            timeout: seconds after which it is ended; none unless given.
            labels: names and values of your own, to find it by.
            id: its name in this sandbox, under which it is recorded, too; a new one unless given.

        Raises:
            InvalidRequest: what was asked for makes no sense.
            BackendError: Belljar or a backend failed, not the process.
        """
        from belljar.living.handles import pty_size
        from belljar.living.process import AsyncProcess

        machine, size = self._alive(), pty_size(pty)
        machine.box  # noqa: B018  (which raises where nothing can be started)
        if size is not None:
            machine.require("pty", "has no terminals")
        if id and not PROCESS_NAME.fullmatch(id):
            raise errors.InvalidRequest(f"id: {id[:80]!r} is no name of a process", fix=_NAME_FIX)
        asked = self._asked(command=words(command), workdir=cwd, env=env or {}, timeout=timeout)
        await machine.check_folder(asked.workdir)
        process = AsyncProcess(id or machine.next_id(), asked, size, labels or {})
        try:
            machine.admit(process)
        except errors.BelljarError:
            process.forgo()
            raise
        await process.begin(machine, id or f"{machine.lease.box.id}.{process.id}")
        return process

    def process(self, id: str) -> AsyncProcess:
        """Returns a process that was started here, by its id.

        Raises:
            NotFound: there is none, or it ended long ago.
        """
        found = self._alive().processes.get(id)
        if found is None:
            raise errors.NotFound(f"this sandbox has no process {id[:80]!r}", fix="`started` lists those that it has")
        return found

    @property
    def started(self) -> tuple[AsyncProcess, ...]:
        """The processes that were started here: all that run, and the last that have ended."""
        return tuple(self._alive().processes.values())

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the sandbox now, by the kernel's word: also what its processes have started."""
        return await self._alive().box.processes()

    # --- ports ---

    async def wait_for_port(self, port: int, *, timeout: float = 30.0) -> None:
        """Waits until something in the sandbox listens on a TCP port.

        Raises:
            TimeoutError: nothing does after so many seconds.
        """
        from belljar.living.ports import wait_for

        await wait_for(self._alive(), port, timeout)

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the sandbox's own loopback. No network is opened for that, in or out.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        from belljar.living.ports import dialled

        return await dialled(self._alive(), port)

    @property
    def network(self) -> AsyncNetwork:
        """What it may reach, told and changed at once: `await box.network.allow("example.org")`."""
        from belljar.living.network import AsyncNetwork

        return AsyncNetwork(self._change_network)

    async def _change_network(self, change: NetworkChange | None) -> NetworkRecord:
        told = await self.lease.change_network(change)
        if self._machine is not None:
            self._machine.note_change()
        return told

    # --- files and interpreters ---

    @property
    def files(self) -> AsyncFiles:
        """Its files, by whole paths."""
        from belljar.living.files import AsyncFiles

        self._alive()
        return AsyncFiles(self._alive)

    def interpreter(self, language: str = "python", *, env: Mapping[str, str] | None = None) -> AsyncBoxInterpreter:
        """Returns an interpreter that keeps its variables: `async with box.interpreter() as python`, or `await` it.

        There may be any number of them. They see the sandbox's files, processes and ports.

        Args:
            language: its language.
            env: variables that its code finds, besides the sandbox's own.
        """
        from belljar.living.interpreter import AsyncBoxInterpreter

        self._alive()
        return AsyncBoxInterpreter(self._alive, language, {**self._request.env, **(env or {})})

    # --- copies of its files ---

    async def snapshot(self, *, labels: Mapping[str, str] | None = None, owner: str = "") -> BoxSnapshot:
        """Keeps its files as they are now: home, /workspace, /tmp and /var/tmp, with permissions, times and links.

        Where the backend can, its processes are stopped meanwhile, so that all files are of one moment; else
        `BoxSnapshot.quiet` is false. No process, no memory and no granted folder is kept. What earlier snapshots hold
        already takes no room.

        Args:
            labels: names and values of your own, to find it by.
            owner: whose it is, where a service keeps those of several callers.

        Raises:
            PolicyDenied: there are too many, or it is too large: see `living` in the settings.
        """
        from belljar.living.snapshots import taken

        return await taken(self._alive(), labels, owner)

    async def fork(
        self, *, labels: Mapping[str, str] | None = None, expires: float | None = None, id: str = ""
    ) -> Self:  # fmt: skip
        """Opens a second sandbox with the files of this one as they are now; `close` it when you are done.

        It is asked for in the same words, and is independent from then on; a granted folder is the same for both.
        Processes are not copied: what is to run there is started there.

        Args:
            labels: names and values of its own; the same unless given.
            expires: seconds until it ends; as asked of this one unless given.
            id: the name under which it is recorded; a new one unless given.
        """
        from belljar.living.snapshots import forked

        return await forked(self._alive(), self.another(id), labels, expires)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the sandbox or snapshot that it began with had and could not be copied, and why."""
        return tuple(self._alive().left_out)

    # --- its life ---

    @property
    def living(self) -> bool:
        """Whether it is a living sandbox: one machine for all its commands."""
        return self._request.living is not None

    @property
    def home(self) -> str:
        """The home of its programs."""
        return self._request.living.home if self._request.living else "/tmp"

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values of yours."""
        return self._request.living.labels if self._request.living else {}

    @property
    def expires(self) -> float | None:
        """When it ends by itself, in seconds since 1970; None: it does not."""
        return self._alive().expires

    @property
    def paused(self) -> bool:
        """Whether its processes are stopped where they are."""
        return self._alive().paused

    @property
    def ended(self) -> str:
        """Says how it ended, if its time was over before it was closed; empty while it lives."""
        return self._alive().ended

    async def pause(self) -> None:
        """Stops all its processes where they are, until `resume`. They keep their memory and use no processor."""
        await self._alive().pause()

    async def resume(self) -> None:
        """Lets its processes go on; one that paused because its time was over gets that time again."""
        await self._alive().resume()

    def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now."""
        check_seconds(seconds=seconds)
        self._alive().extend(seconds)

    def _begin_as(self, asked: Life, beginning: Beginning) -> None:
        """Changes what it will be when it is opened."""
        self._request = self._request.model_copy(update={"living": asked})
        self._beginning = beginning

    def _not_open(self) -> errors.InvalidRequest:
        if self._was_closed:
            return errors.InvalidRequest("this sandbox is not open: it was closed", fix="open another")
        return errors.InvalidRequest("this sandbox is not open", fix="use it in a `with` block, or .open() it")

    def _alive(self) -> LivingMachine:
        if self._request.living is None:
            raise errors.InvalidRequest("this is not a living sandbox", fix="open it with living=True")
        if self._machine is None:
            raise self._not_open()
        return self._machine
