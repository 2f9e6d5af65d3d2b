"""An open living sandbox: its box, and all that goes on in it, until it is closed or its time is over."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from belljar.backends.base import LastingBox, Living
from belljar.core import errors
from belljar.core.lasting import BoxMark
from belljar.core.process import Feature
from belljar.core.request import Egress, Life
from belljar.core.result import Event, LifeKind, Status
from belljar.core.values import WORKSPACE
from belljar.host.box_tree import HostTree
from belljar.host.lifetime import LifetimeTask
from belljar.host.loops import lone_errors
from belljar.living.handles import lacking
from belljar.living.process import AsyncProcess

if TYPE_CHECKING:
    from belljar.control.box_tree import BoxTree
    from belljar.engine.lease import Lease
    from belljar.living.interpreter import AsyncBoxInterpreter

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
        leaving: it is closed because the server ends, and goes on if it can.
        left: by what it is found again, if it goes on.
        left_out: what the sandbox or snapshot that it began with had, and it has not.
    """

    def __init__(
        self, opening: AbstractAsyncContextManager[Lease], asked: Life, beginning: Beginning | None = None,
        found: BoxMark | None = None,
    ) -> None:  # fmt: skip
        """Nothing is opened yet.

        Args:
            opening: opens the box.
            asked: what was asked of the sandbox.
            beginning: lays out the files that it begins with.
            found: what an earlier server wrote down of it, if it left it running.
        """
        self.asked = asked
        self.processes: dict[str, AsyncProcess] = {}
        self.interpreters: set[AsyncBoxInterpreter] = set()
        self.paused: bool = False
        self.ended: str = ""
        self.expires: float | None = None
        self.left_out: list[str] = []
        self._opening = opening
        self._beginning = beginning
        self._found = found
        self.leaving: bool = False
        self.left: BoxMark | None = None
        self._held = LifetimeTask(self._holding())
        self._lease: Lease | None = None
        self._egress: Egress | None = None  # what it could reach when it was opened, or found
        self._tasks: TaskGroup
        self._started = 0
        self._deadline: float | None = None  # by the monotonic clock
        self._moved = anyio.Event()
        self._used = time.monotonic()  # when it was used last
        self._uses = 0  # commands and turns under way
        self._stopped = False  # its processes are, for as long as somebody reads its files
        self._stopping = anyio.Lock()
        self._told = 0
        self.over: anyio.Event = anyio.Event()
        self.changed: anyio.Event = anyio.Event()  # is set, and another takes its place, when `mark` has changed

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
        """The box itself, where its processes may go on. Who asks for it uses the sandbox.

        Raises:
            InvalidRequest: it is paused.
        """
        box = self.resting_box
        if self.paused:
            raise errors.InvalidRequest("this sandbox is paused", fix="resume() it first")
        self._used = time.monotonic()
        return box

    @property
    def resting_box(self) -> Living:
        """The box itself, also while it is paused."""
        box = self.lease.box
        assert isinstance(box, Living)
        return box

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Says that the sandbox is used while the block runs.

        Raises:
            InvalidRequest: it is paused.
        """
        self.box  # noqa: B018  (which raises)
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self._used = time.monotonic()

    async def tell(self, kind: LifeKind, text: str = "", **facts: str) -> None:
        """Records what became of the sandbox, and tells it to the engine's listeners."""
        assert self._lease is not None
        engine, id = self._lease.engine, self._lease.box.id
        await engine.record(kind, run=id, **facts)
        self._told += 1
        await engine.publish(Event(run=id, seq=self._told, kind=kind, text=text or " ".join(facts.values())), None)

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
        """Takes a process that is about to start; of those that have ended, the oldest is forgotten.

        Raises:
            SessionEnded: the sandbox has ended meanwhile.
            Busy: there are as many as may be.
            InvalidRequest: there is one of its name.
        """
        self.lease  # noqa: B018  (which raises if it has ended)
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

    # --- going on without us ---

    def mark(self) -> BoxMark | None:
        """Returns by what it is found again, as it is now; None: it ends with us."""
        box = self._lease.box if self._lease is not None and not self.ended else None
        if self._lease is None or not isinstance(box, LastingBox) or not box.place:
            return None
        marks = (process.mark() for process in self.processes.values())
        now = self._lease.plan.egress
        return BoxMark(
            egress=self._found.egress if self._found and now == self._egress else None if now == self._egress else now,
            place=box.place, walls=self._lease.plan.walls, ends=self.expires, paused=self.paused,
            left_out=tuple(self.left_out), started=self._started, processes=tuple(mark for mark in marks if mark),
        )  # fmt: skip

    def note_change(self) -> None:
        """Says that `mark` would tell something else now."""
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def _take_over(self, found: BoxMark) -> None:
        """Goes on with what an earlier server left."""
        box = self.lease.box
        assert isinstance(box, LastingBox)
        self.left_out, self._started = [*found.left_out], found.started
        if box.stopped and not found.paused:  # it was stopped for a moment, whose end was lost
            await box.resume()
        self.paused = box.stopped and found.paused
        if found.ends is not None:
            self.extend(found.ends - time.time())
        for mark in found.processes:
            self.processes[mark.id] = process = AsyncProcess.found_again(mark)
            self._tasks.start_soon(process.join, self)

    # --- pause and time ---

    async def pause(self) -> None:
        """Stops all that runs where it is. Pausing twice does no harm."""
        self.require("pause", "cannot pause a sandbox")
        async with self._stopping:
            if self.paused:
                return
            with anyio.CancelScope(shield=True):  # who gives up must not leave it stopped without our knowing
                await self.box.pause()
                self.paused = True
        self.note_change()
        await self.tell("paused")

    async def resume(self) -> None:
        """Lets it go on; one that paused because its time was over gets that time again."""
        box = self.resting_box
        async with self._stopping:
            if not self.paused:
                return
            with anyio.CancelScope(shield=True):
                await box.resume()
                self.paused = False
            self._used = time.monotonic()
            if self._deadline is None and self.asked.expires is not None:
                self.extend(self.asked.expires)
        self._wake()
        await self.tell("resumed")

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[bool]:
        """Stops what runs while the block reads the files, so that they are of one moment; gives whether that holds.

        Where files are read by a program of the sandbox, it goes on.
        """
        box, able = self.resting_box, "pause" in (self.lease.capabilities.living or ())
        async with self._stopping:
            if self.paused or not (able and isinstance(box.tree, HostTree)):
                yield self.paused
                return
            self._stopped = True
            try:
                yield await self._stop(box)
            finally:
                self._stopped = False
                with anyio.CancelScope(shield=True), suppress(errors.BelljarError, OSError):
                    await box.resume()

    async def _stop(self, box: Living) -> bool:
        try:
            await box.pause()
        except TimeoutError:  # a process could not be stopped
            return False
        return True

    def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now."""
        self.lease  # noqa: B018  (which raises if it has ended)
        self._used = time.monotonic()
        self._deadline = time.monotonic() + seconds
        self.expires = time.time() + seconds
        self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, anyio.Event()
        moved.set()
        self.note_change()

    async def _watch(self) -> None:
        """Ends it, or pauses it, when its time is over or nobody has used it for long."""
        while True:
            moved = self._moved
            left = self._left()
            if left is not None and left <= 0:
                if not await self._expire():
                    return
                continue
            with anyio.move_on_after(left):
                await moved.wait()

    def _left(self) -> float | None:
        """Seconds until something has to be done; None: nothing will have to."""
        ends = [] if self._deadline is None else [self._deadline]
        if self.asked.idle is not None and not self.paused:
            busy = self._uses or any(process.running for process in self.processes.values())
            ends.append((time.monotonic() if busy else self._used) + self.asked.idle)
        return min(ends) - time.monotonic() if ends else None

    async def _expire(self) -> bool:
        """Does what is to be done then; whether it lives on."""
        action = self.asked.on_expire
        over = self._deadline is not None and self._deadline <= time.monotonic()
        why = "its time was over" if over else f"nobody used it for {self.asked.idle:g} seconds"
        await self.tell("expired", why, action=action)
        if action == "pause":
            if over:
                self._deadline = self.expires = None
            with suppress(errors.BelljarError):  # one that cannot be paused any more is ended
                await self.pause()
                return True
        self.ended = why
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
        self._egress = self.lease.plan.egress
        if isinstance(self.lease.box, LastingBox):
            self.lease.box.life = self._life_left
        if self._found is not None:
            await self._take_over(self._found)
        elif self.asked.expires is not None:
            self.extend(self.asked.expires)
        self._used = time.monotonic()
        await self.tell("found" if self._found else "opened", backend=self.lease.capabilities.backend)
        self._tasks.start_soon(self._watch)

    def _life_left(self) -> float | None:
        """Seconds until it ends by itself; None: it does not, or is paused then."""
        ends = None if self.asked.on_expire == "pause" else self._deadline
        return None if ends is None else ends - time.monotonic()

    async def _end(self) -> None:
        """Ends all that runs; what does not end in time is left to the box' own end."""
        assert self._lease is not None
        if await self._leave():
            return
        reason = Status.KILLED if self.ended else Status.ABORTED
        self.ended = self.ended or "it was closed"
        with anyio.move_on_after(self._lease.plan.limits.grace + _END_SECONDS, shield=True):
            with suppress(errors.BelljarError):
                await self.tell("closed", self.ended)
            if self.paused or self._stopped:
                assert isinstance(self._lease.box, Living)
                with suppress(errors.BelljarError, OSError):
                    await self._lease.box.resume()
            for interpreter in tuple(self.interpreters):
                with suppress(errors.BelljarError):
                    await interpreter.close()
            running = [process for process in self.processes.values() if process.running]
            for process in running:
                process.stop(reason)
            for process in running:
                await process.gone()

    async def _leave(self) -> bool:
        """Has it go on without us, if that is wanted and can be; whether it does."""
        assert self._lease is not None
        box = self._lease.box
        if not (self.leaving and isinstance(box, LastingBox) and box.place) or self.ended:
            return False
        with anyio.move_on_after(_END_SECONDS, shield=True):
            for interpreter in () if self.paused else tuple(self.interpreters):
                with suppress(errors.BelljarError):
                    await interpreter.close()
            with suppress(errors.BelljarError):
                await self.tell("left")
        mark = self.mark()
        box.leave()
        if box.left:
            self.left, self.ended = mark, "the service ended, and left it running"
        return box.left
