"""One command in a living sandbox: what it leaves in the background goes on, and so do its streams."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends.base import Emit
from belljar.backends.native import jail
from belljar.backends.native.living import listing, walls
from belljar.backends.native.run import NativeJob, NativeRun
from belljar.control.control import Control, StartedGuest
from belljar.core import errors
from belljar.core.process import PtySize
from belljar.core.result import STREAMS, Status, StreamName
from belljar.host import process, procfs, terminal
from belljar.host.process_table import namespace, number_inside

_START_SECONDS = 5.0  # that bubblewrap may take to become the command; the start is told then in any case
_LOOK_SECONDS = 0.002
_SAID_BYTES = 4096  # of what a command prints first: bubblewrap's words, if it never ran
_END_SECONDS, _END_LOOK_SECONDS = 10.0, 0.02  # for what a command started to die, and between looks at it
_GENTLE = (Status.TIMEOUT, Status.ABORTED, Status.KILLED)  # after which there is a grace
_LEFT_BYTES = 1 << 20  # that are still read of what a pipe held when the command ended


class NativeLivingJob(NamedTuple):
    """What a run in a living sandbox needs beside what all native runs do."""

    machine: walls.MachineSpec
    entry: walls.EntrySpec
    holder: int  # the machine's first process
    terminals: str  # the path of the machine's /dev/pts/ptmx
    pty: PtySize | None
    keep_reading: Callable[[int], object]  # takes over a descriptor that processes in the background write to
    most_processes: int  # that may be in the machine, where there are no control groups


class NativeLivingRun(NativeRun):
    """Joins one bubblewrap to the machine, and attends to its command until that has ended."""

    def __init__(self, job: NativeJob, living: NativeLivingJob, emit: Emit, control: Control) -> None:
        super().__init__(job, emit, control)
        self._living = living
        self._over = False  # the command has ended: what is in its pipes now is read, and no more is waited for
        self._waits: set[anyio.CancelScope] = set()
        self._handle: int | None = None  # of the command's first process
        self._terminal = -1
        self._said = b""
        self._space = ""  # its user namespace, which no other command has
        self._fds.callback(self._let_go)

    # --- starting ---

    def _arguments(self) -> tuple[list[str], list[int]]:
        return walls.entry_arguments(self._living.machine, self._living.entry, self._fds)

    def _launcher(self) -> list[str]:
        joining = walls.joining(self._living.holder)
        if self._group:
            return [*jail.launcher(self._group.join_files, self._job.uid, 0), *joining]
        # The command's user namespace is made under this limit: the kernel holds all that is in the machine's to it.
        most = self._living.most_processes
        bound = min((most, *(limit for limit in resource.getrlimit(resource.RLIMIT_NPROC) if limit >= 0)))
        return [*jail.launcher((), self._job.uid, 0), "prlimit", f"--nproc={bound}", "--", *joining]

    def _streams(self, ours: dict[str, int], child_side: ExitStack) -> tuple[int, int, int]:
        if self._living.pty is None:
            return super()._streams(ours, child_side)
        near, far = terminal.open_pair(self._living.terminals, self._living.pty, owner=self._job.uid)
        child_side.callback(os.close, far)
        self._fds.callback(self._hang_up, near)
        self._terminal = ours["stdout"] = near
        if self._control.feed is not None:
            ours["stdin"] = os.dup(near)  # closed by who feeds it
        return far, far, far

    async def _begin(self, told: Mapping[str, Any]) -> None:
        await super()._begin(told)
        first: int = told["child-pid"]
        with suppress(OSError):
            self._handle = os.pidfd_open(first)
        inside = number_inside(first)
        if namespace(first, "pid") not in ("", namespace(self._living.holder, "pid")):
            self._let_go()  # it has ended, and somebody else got its number before we held it
            inside = 0
        if inside:
            # Somebody waits for the start, and may signal the command right then; or its user namespace must be known.
            if self._control.hear or not self._group:
                await self._become(first)
            self._space = namespace(first, "user")
            self._control.begin(StartedGuest(inside, self._signal, self._resize))

    async def _become(self, pid: int) -> None:
        """Waits until bubblewrap, and what else of ours comes before the command, has become the command."""
        words, ours = [*self._job.prefix, *process.hearing(), *self._job.argv], {b""}  # empty for a moment
        for count in {0, len(self._job.prefix), len(words) - len(self._job.argv)}:
            ours.add(_line(words[count:]))
        ours -= set() if self._living.pty else {_line(self._job.argv)}  # else `setsid` is the last of ours
        program = os.path.realpath(self._job.bubblewrap)
        with anyio.move_on_after(_START_SECONDS), suppress(OSError):  # it has ended
            while True:
                if os.readlink(f"/proc/{pid}/exe") != program and _line_of(pid) not in ours:
                    return
                await anyio.sleep(_LOOK_SECONDS)

    async def _signal(self, number: int) -> None:
        if self._handle is None:
            raise ProcessLookupError("the process has ended")
        signal.pidfd_send_signal(self._handle, number)

    async def _resize(self, size: PtySize) -> None:
        if self._terminal < 0:
            raise errors.InvalidRequest("this process has no terminal", fix="start it with pty=")
        terminal.resize(self._terminal, size)

    def _hang_up(self, near: int) -> None:
        self._terminal = -1
        os.close(near)

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    # --- attending ---

    async def _attend(self, child: process.Child, pipes: dict[str, int]) -> int:
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock, child)
            watchers.start_soon(self._watch_control, child)
            if self._control.feed is not None:
                watchers.start_soon(self._feed, pipes["stdin"])
            async with anyio.create_task_group() as readers:
                for name in STREAMS:
                    if name in pipes:
                        readers.start_soon(self._read, name, pipes[name], child)
                await self._read_status(pipes["status"])
                exit_ = await child.wait()
                if self._outcome.verdict is not None:
                    await self._end_family()
                self._finish_reading()
            await self._outcome.close_streams()
            watchers.cancel_scope.cancel()
        return exit_

    def _finish_reading(self) -> None:
        self._over = True
        for scope in self._waits:
            scope.cancel()

    async def _read(self, name: StreamName, fd: int, child: process.Child) -> None:
        os.set_blocking(fd, False)
        left = _LEFT_BYTES
        while left > 0 and (data := await self._next(fd)):
            if self._over:
                left -= len(data)
            if len(self._said) < _SAID_BYTES:
                self._said += data
            if self._control.hear:
                self._control.hear(name, data)
            if await self._outcome.take(name, data) and self._outcome.verdict is None:
                self._end(child, Status.OUTPUT_LIMIT)

    async def _next(self, fd: int) -> bytes:
        """The next bytes; empty at the end, and when the command is over and others of its stream go on."""
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                return os.read(fd, 1 << 16)
            except BlockingIOError:
                if self._over:
                    self._living.keep_reading(os.dup(fd))
                    return b""
            except OSError:  # a terminal that nobody has open any more
                return b""
            with anyio.CancelScope() as scope:
                self._waits.add(scope)
                try:
                    await anyio.wait_readable(fd)
                finally:
                    self._waits.discard(scope)

    # --- ending ---

    async def _end_family(self) -> None:
        """Waits until what the command started has ended, too, and ends it when its grace is over."""
        grace = self._limits.grace if self._outcome.verdict in _GENTLE else 0.0
        to_kill = anyio.current_time() + grace
        while await anyio.to_thread.run_sync(self._family):
            if anyio.current_time() > to_kill + _END_SECONDS:
                return  # to the box' own end
            if anyio.current_time() >= to_kill:
                await anyio.to_thread.run_sync(process.terminate, self._family, (), signal.SIGKILL)
            await anyio.sleep(_END_LOOK_SECONDS)

    def _kill(self, child: process.Child) -> None:
        if self._group or not child.ended():  # what it left is ended by what it is, not by whose children they were
            super()._kill(child)

    def _family(self) -> list[int]:
        """All that the command started, whoever is its parent now: it is the only one with its user namespace."""
        if self._group:
            return [pid for pid in self._group.pids() if pid != self._monitor]
        if not self._space:
            return procfs.descendants(self._monitor) if self._monitor else []
        return [pid for pid in listing.members(self._living.holder) if namespace(pid, "user") == self._space]

    def end_of_memory(self, pid: int) -> bool:
        """Ends the command because the machine is out of memory, if this process is one of its own."""
        if not self._monitor or pid not in self._family():
            return False
        self._outcome.end(Status.OOM_KILLED)
        process.terminate(self._family, number=signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._monitor, signal.SIGKILL)
        return True

    def _never_ran(self, exit_: int, oom_killed: bool) -> int | None:
        if b"bwrap: Can't chdir to" in self._said:
            raise errors.InvalidRequest(
                f"cwd: {self._living.entry.cwd} is no folder in the sandbox", fix="make it first"
            )
        if b"Resource temporarily unavailable" in self._said or b"Cannot fork" in self._said:
            raise errors.Busy(
                f"this sandbox has as many processes as it may have: {self._limits.pids}",
                retry_after=1.0,
                fix="end some of them, or open it with more pids",
            )
        return super()._never_ran(exit_, oom_killed)

    def _words(self) -> str:
        return self._said.decode("utf-8", "replace")

    def _terminate(self, child: process.Child) -> bool:
        return bool(process.terminate(lambda: self._members(child), spare=(child.pid,)))

    def _members(self, child: process.Child) -> list[int]:
        return self._group.pids() if self._group else self._family() or procfs.descendants(child.pid)

    async def _remove_group(self) -> None:
        """Removes the command's group, if it left nothing running; else that is done at the box's end."""
        if self._group:
            self._group.remove()


def _line(words: Sequence[str]) -> bytes:
    """A command line as the kernel tells it."""
    return b"".join(word.encode() + b"\0" for word in words)


def _line_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
