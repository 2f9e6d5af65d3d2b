"""An open living sandbox: its box, and all that goes on in it, until it is closed or its time is over."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from belljar.backends.base import Living
from belljar.core import errors
from belljar.core.process import Feature
from belljar.core.request import Life
from belljar.core.result import Status
from belljar.core.values import WORKSPACE
from belljar.host.lifetime import LifetimeTask
from belljar.host.loops import lone_errors
from belljar.living.handles import lacking

if TYPE_CHECKING:
    from belljar.control.box_tree import BoxTree
    from belljar.engine.lease import Lease
    from belljar.living.interpreter import AsyncBoxInterpreter
    from belljar.living.process import AsyncProcess

_END_SECONDS = 20.0  # that all its processes may take to end, beside their grace
_KEPT_PROCESSES = 32  # that have ended and are still told of, with their output
_MOST_PROCESSES = 128  # that were started here and run: each has up to two megabytes of output

Beginning = Callable[["LivingMachine"], Awaitable[None]]


class LivingMachine:
    """The box of a living sandbox, and what runs in it.

    Attributes:
        asked: what was asked of the sandbox.
        processes: those that were started here, by id: all that run, and the last that have ended.
        interpreters: those that are open.
        paused: whether its processes are stopped where they are.
        ended: how it ended; empty while it lives.
        expires: when it ends by itself, in seconds since 1970; None: never.
        over: is set when nothing of it is left.
    """

    def __init__(
        self, opening: AbstractAsyncContextManager[Lease], asked: Life, beginning: Beginning | None = None
    ) -> None:
        """Nothing is opened yet.

        Args:
            opening: opens the box.
            asked: what was asked of the sandbox.
            beginning: lays out the files that it begins with.
        """
        self.asked = asked
        self.processes: dict[str, AsyncProcess] = {}
        self.interpreters: set[AsyncBoxInterpreter] = set()
        self.paused: bool = False
        self.ended: str = ""
        self.expires: float | None = None
        self._opening = opening
        self._beginning = beginning
        self._held = LifetimeTask(self._holding())
        self._lease: Lease | None = None
        self._tasks: TaskGroup
        self._started = 0
        self._deadline: float | None = None  # by the monotonic clock
        self._moved = anyio.Event()
        self.over: anyio.Event = anyio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Lease]:
        """Opens it, and ends it with all that runs in it."""
        await self._held.open()
        try:
            yield self.lease
        finally:
            await self._held.close()

    # --- what others need ---

    @property
    def lease(self) -> Lease:
        """The open box with the decisions that led to it.

        Raises:
            SessionEnded: it has ended.
        """
        if self._lease is None or self.ended:
            raise errors.SessionEnded(f"this sandbox has ended: {self.ended or 'it is not open'}", fix="open a new one")
        return self._lease

    @property
    def box(self) -> Living:
        """The box itself, where its processes may go on.

        Raises:
            InvalidRequest: it is paused.
        """
        box = self.lease.box
        assert isinstance(box, Living)
        if self.paused:
            raise errors.InvalidRequest("this sandbox is paused", fix="resume() it first")
        return box

    @property
    def tree(self) -> BoxTree:
        """The files of the box."""
        return self.box.tree

    @property
    def home(self) -> str:
        """The home of its programs."""
        return self.lease.plan.home

    @property
    def disk(self) -> int:
        """The bytes that each of its folders may hold."""
        return self.lease.plan.limits.disk

    @property
    def tasks(self) -> TaskGroup:
        """Where that runs which goes on until the sandbox ends. What is started there must not raise."""
        return self._tasks

    async def check_folder(self, path: str) -> None:
        """Raises InvalidRequest unless a command can start in a folder: a missing one is not made."""
        if path == WORKSPACE:
            return
        try:
            kind = (await self.box.tree.stat(path)).kind
        except OSError as error:
            raise errors.InvalidRequest(f"cwd: {path}: {error.strerror}", fix="make it first: files.make_dir") from None
        if kind not in ("folder", "link"):
            raise errors.InvalidRequest(f"cwd: {path} is a {kind}", fix="name a folder")

    def require(self, feature: Feature, what: str) -> None:
        """Raises NotAvailable where the backend's living sandboxes lack a feature; `what`: that in words."""
        capabilities = self.lease.capabilities
        if feature not in (capabilities.living or ()):
            raise lacking(capabilities.backend, what)

    def admit(self, process: AsyncProcess) -> None:
        """Takes a process that is about to start; of those that have ended, the oldest is forgotten."""
        over = [id for id, one in self.processes.items() if not one.running]
        for id in over[: len(over) - _KEPT_PROCESSES + 1]:
            del self.processes[id]
        if len(self.processes) - len(over) >= _MOST_PROCESSES:
            raise errors.Busy(
                f"this sandbox has {_MOST_PROCESSES} started processes that run",
                retry_after=1.0,
                fix="end some of them",
            )
        if process.id in self.processes:
            raise errors.InvalidRequest(f"id: this sandbox has a process {process.id!r}", fix="choose another id")
        self.processes[process.id] = process

    def next_id(self) -> str:
        """Returns the id of a process that was given none."""
        self._started += 1
        return f"p{self._started}"

    # --- pause and time ---

    async def pause(self) -> None:
        """Stops all that runs where it is. Pausing twice does no harm."""
        self.require("pause", "cannot pause a sandbox")
        if not self.paused:
            await self.box.pause()
            self.paused = True

    async def resume(self) -> None:
        """Lets it go on; one that paused because its time was over gets that time again."""
        lease = self.lease
        if self.paused:
            assert isinstance(lease.box, Living)
            await lease.box.resume()
            self.paused = False
            if self._deadline is None and self.asked.expires is not None:
                self.extend(self.asked.expires)

    def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now."""
        self.lease  # noqa: B018  (which raises if it has ended)
        self._deadline = time.monotonic() + seconds
        self.expires = time.time() + seconds
        moved, self._moved = self._moved, anyio.Event()
        moved.set()

    async def _watch(self) -> None:
        """Ends it, or pauses it, when its time is over."""
        while True:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                if not await self._expire():
                    return
                continue
            moved = self._moved
            with anyio.move_on_after(left):
                await moved.wait()

    async def _expire(self) -> bool:
        """Does what is to be done then; whether it lives on."""
        assert self._lease is not None
        action = self.asked.on_expire
        await self._lease.engine.record("expired", run=self._lease.box.id, action=action)
        if action == "pause":
            self._deadline = None
            with suppress(errors.BelljarError):  # one that cannot be paused any more is ended
                await self.pause()
                return True
        self.ended = "its time was over"
        self._held.end()
        return False

    # --- its life ---

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[None]:
        try:
            async with self._life():
                yield
        finally:
            self.over.set()

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        async with self._opening as lease:
            if not isinstance(lease.box, Living):
                raise errors.ExecutionFailed(f"{lease.capabilities.backend} opened a sandbox that does not live on")
            self._lease = lease
            with lone_errors():
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    try:
                        await self._begin()
                        yield
                    finally:
                        await self._end()
                        tasks.cancel_scope.cancel()

    async def _begin(self) -> None:
        if self._beginning is not None:
            await self._beginning(self)
        if self.asked.expires is not None:
            self.extend(self.asked.expires)
        self._tasks.start_soon(self._watch)

    async def _end(self) -> None:
        """Ends all that runs; what does not end in time is left to the box' own end."""
        assert self._lease is not None
        reason = Status.KILLED if self.ended else Status.ABORTED
        self.ended = self.ended or "it was closed"
        with anyio.move_on_after(self._lease.plan.limits.grace + _END_SECONDS, shield=True):
            if self.paused:
                assert isinstance(self._lease.box, Living)
                with suppress(errors.BelljarError):
                    await self._lease.box.resume()
            for interpreter in tuple(self.interpreters):
                with suppress(errors.BelljarError):
                    await interpreter.close()
            running = [process for process in self.processes.values() if process.running]
            for process in running:
                process.stop(reason)
            for process in running:
                await process.gone()
