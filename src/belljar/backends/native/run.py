"""One command in a native sandbox, from its start to its result."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends.base import Emit
from belljar.backends.guest_text import python_program
from belljar.backends.native import jail
from belljar.backends.native.footprint import footprint
from belljar.backends.outcome import KILLED_EXIT_CODE, Ending, Outcome
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status, StreamName, Usage
from belljar.host import cgroups, process, procfs
from belljar.host.egress.guest import PORT
from belljar.host.egress.judgement import Told
from belljar.host.egress.proxy import Proxy
from belljar.host.guest_uid import group_of
from belljar.host.loops import lone_errors

_MEMORY_CHECK_SECONDS = 0.02


class NativeJob(NamedTuple):
    """All that one run needs to know."""

    id: str
    jail: jail.Jail
    prefix: Sequence[str]  # what sets the guest's rlimits, where no control group does
    argv: Sequence[str]
    stdin: bytes
    limits: Limits
    bubblewrap: str
    uid: int | None
    group: cgroups.Group | None
    around: cgroups.Group | None = None  # of the box, if it is kept: what earlier commands left counts there
    namespace: str = ""  # the path of the mount namespace in which a granted folder was lent to the uid
    proxy: Callable[[Told], Proxy] | None = None


class NativeRun:
    """Starts one bubblewrap, reads, feeds and watches it, and ends all that is left of it."""

    def __init__(self, job: NativeJob, emit: Emit, control: Control) -> None:
        self._job = job
        self._limits = job.limits
        self._group = job.group
        self._control = control
        keep = control.feed is None and control.hear is None
        self._outcome = Outcome(job.id, job.limits, emit, keep_output=keep)
        self.status: dict[str, Any] = {}  # what bubblewrap tells of the guest: its pid, its namespaces, its exit code
        self._fds = ExitStack()
        self._monitor = 0  # bubblewrap's pid, while it lives

    async def go(self) -> Result:
        """Runs the command; when this returns or raises, nothing of it is left."""
        try:
            with self._fds, lone_errors():
                child, pipes = self._start()
                self._monitor = child.pid
                try:
                    exit_ = await self._attend(child, pipes)
                except BaseException:
                    self._kill(child)
                    with anyio.CancelScope(shield=True):
                        await child.wait()
                    raise
                finally:
                    self._monitor = 0
            usage = self._group.usage() if self._group else None
        finally:
            with anyio.CancelScope(shield=True):
                await self._remove_group()
        if usage:
            await self._outcome.tell_forks_refused(usage.forks_refused)
        return self._result(exit_, usage)

    async def measure(self) -> Usage | None:
        """Returns what it uses now; None before its start and after its end."""
        if not self._monitor:
            return None
        return await anyio.to_thread.run_sync(self._measure, self._monitor, abandon_on_cancel=True)

    def _measure(self, monitor: int) -> Usage | None:
        """Reads the counters, in a thread: of a group with many processes, or that the kernel is busy with, it takes
        long."""
        if self._group:
            figures = procfs.of_group(self._group)
            if figures and self._job.around:
                figures = figures._replace(memory=self._job.around.figures().memory)
        else:
            figures = procfs.of_processes(procfs.descendants(monitor), self._footprint(monitor))
        init = self.status.get("child-pid")
        if figures is None or not init or self._job.proxy:  # what goes through the proxy is loopback's traffic inside
            return figures
        rx, tx = procfs.network(init)
        return figures._replace(rx=rx, tx=tx)

    def _footprint(self, monitor: int) -> int:
        folders = ("tmp", "dev/shm") if self._job.jail.workspace else ("tmp", "dev/shm", "workspace")
        return footprint(monitor, folders, self._limits.memory)

    async def deny(self, words: str) -> None:
        """Tells of a connection that the guest was refused."""
        await self._outcome.deny(words)

    # --- starting ---

    def _start(self) -> tuple[process.Child, dict[str, int]]:
        """Starts bubblewrap; returns it with our ends of its pipes."""
        job, ours = self._job, dict[str, int]()
        args, fds = self._arguments()
        with ExitStack() as child_side:
            stdin, stdout, stderr = self._streams(ours, child_side)
            status = self._pipe("status", ours, child_side)
            command = [*self._listener(ours, fds, child_side), *job.argv]
            args += ["--json-status-fd", str(status)]
            # In a file of its own, not on the command line, where every user of the host could read the environment.
            listing = jail.memory_file(b"\0".join(arg.encode() for arg in args) + b"\0", self._fds)
            line = [*self._launcher(), job.bubblewrap, "--args", str(listing), "--", *job.prefix, *process.hearing()]
            try:
                child = process.Child(
                    [*line, *command], stdin=stdin, stdout=stdout, stderr=stderr, fds=(*fds, listing, status)
                )
            except OSError as error:
                raise errors.StartFailed(f"bubblewrap could not be started: {error}") from None
        return child, ours

    def _arguments(self) -> tuple[list[str], list[int]]:
        return jail.arguments(self._job.jail, self._fds)

    def _launcher(self) -> list[str]:
        join_files = self._group.join_files if self._group else ()
        return jail.launcher(join_files, self._job.uid, self._job.jail.space.holder, self._job.namespace)

    def _streams(self, ours: dict[str, int], child_side: ExitStack) -> tuple[int, int, int]:
        """Makes the guest's stdin, stdout and stderr."""
        stdout, stderr = (self._pipe(name, ours, child_side) for name in STREAMS)
        if self._job.uid is not None:  # so that the guest may open /dev/stdout again
            for stream in (stdout, stderr):
                os.fchown(stream, self._job.uid, group_of(self._job.uid))
        return self._stdin(ours, child_side), stdout, stderr

    def _pipe(self, name: str, ours: dict[str, int], child_side: ExitStack) -> int:
        """Makes a pipe that we read; returns the end that is written to."""
        ours[name], theirs = os.pipe()
        self._fds.callback(os.close, ours[name])
        child_side.callback(os.close, theirs)
        return theirs

    def _stdin(self, ours: dict[str, int], child_side: ExitStack) -> int:
        """The guest's stdin: the bytes that were given, nothing, or a pipe that the caller feeds."""
        if self._control.feed is None:
            return jail.memory_file(self._job.stdin, self._fds) if self._job.stdin else subprocess.DEVNULL
        stdin, ours["stdin"] = os.pipe()
        child_side.callback(os.close, stdin)
        return stdin

    def _listener(self, ours: dict[str, int], fds: list[int], child_side: ExitStack) -> list[str]:
        """What comes before the guest's command if it was granted hosts: it hands us a socket that listens inside."""
        if not self._job.proxy:
            return []
        near, far = socket.socketpair()
        child_side.callback(far.close)
        ours["listener"] = near.detach()
        self._fds.callback(os.close, ours["listener"])
        fds.append(far.fileno())
        return ["python3", "-I", "-S", "-c", python_program("egress_listener"), str(far.fileno()), str(PORT)]

    # --- attending ---

    async def _attend(self, child: process.Child, pipes: dict[str, int]) -> int:
        """Reads, feeds and watches until the guest has ended, one way or another; bubblewrap's exit code."""
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock, child)
            watchers.start_soon(self._watch_control, child)
            if self._group is None:
                watchers.start_soon(self._watch_memory, child)
            if self._control.feed is not None:
                watchers.start_soon(self._feed, pipes["stdin"])
            if self._job.proxy:
                watchers.start_soon(self._serve_egress, self._job.proxy, pipes["listener"])
            async with anyio.create_task_group() as readers:
                readers.start_soon(self._read_status, pipes["status"])
                for name in STREAMS:
                    readers.start_soon(self._read, name, pipes[name], child)
            await self._outcome.close_streams()
            exit_ = await child.wait()
            watchers.cancel_scope.cancel()
        return exit_

    async def _read(self, name: StreamName, fd: int, child: process.Child) -> None:
        while data := await process.read_some(fd):
            if await self._outcome.take(name, data) and self._outcome.verdict is None:
                self._end(child, Status.OUTPUT_LIMIT)

    async def _read_status(self, fd: int) -> None:
        """bubblewrap tells the guest's pid and namespaces, and its exit code only if it really ran."""
        text = b""
        while data := await process.read_some(fd):
            begun = bool(self.status)
            text += data
            for line in text.splitlines():
                with suppress(ValueError):
                    self.status |= json.loads(line)
            if not begun and self.status:
                await self._begin(self.status)

    async def _begin(self, told: Mapping[str, Any]) -> None:
        """Is called with the first that bubblewrap tells of the guest."""
        await self._outcome.begin()

    async def _feed(self, fd: int) -> None:
        assert self._control.feed is not None
        try:
            async for data in self._control.feed:
                await process.write_all(fd, data)
        finally:
            os.close(fd)

    async def _serve_egress(self, proxy: Callable[[Told], Proxy], fd: int) -> None:
        """Takes the listening socket that the launcher made inside, and answers it from out here."""
        await anyio.wait_readable(fd)
        with socket.socket(fileno=os.dup(fd)) as near:
            _, fds, _, _ = socket.recv_fds(near, 16, 1)
        if fds:
            await proxy(self._outcome.deny).serve(socket.socket(fileno=fds[0]))

    async def _watch_clock(self, child: process.Child) -> None:
        await self._outcome.time_out()
        await self._stop(child, Status.TIMEOUT)

    async def _watch_control(self, child: process.Child) -> None:
        await self._stop(child, await self._control.stopped())

    async def _watch_memory(self, child: process.Child) -> None:
        """Without control groups: adds up all that the guest keeps in memory, and ends it over the limit."""
        while True:
            if await anyio.to_thread.run_sync(self._footprint, child.pid) > self._limits.memory:
                return self._end(child, Status.OOM_KILLED)
            await anyio.sleep(_MEMORY_CHECK_SECONDS)

    # --- ending ---

    async def _stop(self, child: process.Child, verdict: Status) -> None:
        """Asks the guest to end itself, and ends it when its grace is over; what it prints meanwhile is kept."""
        if not self._outcome.end(verdict):
            return  # it is being ended already
        if self._limits.grace and self._terminate(child):
            await anyio.sleep(self._limits.grace)
        self._kill(child)

    def _terminate(self, child: process.Child) -> bool:
        """Sends SIGTERM to all that the guest has started; False: it has not started anything yet.

        Neither bubblewrap nor its init inside get the signal: with one of them all the others would be gone at once.
        """
        init = self.status.get("child-pid")
        if not init:
            return False
        told = process.terminate(
            lambda: self._group.pids() if self._group else procfs.descendants(init), spare=(child.pid, init)
        )
        return bool(told)

    def _end(self, child: process.Child, verdict: Status) -> None:
        self._outcome.end(verdict)
        self._kill(child)

    def _kill(self, child: process.Child) -> None:
        tree = [] if self._group else procfs.descendants(child.pid)
        child.kill()  # the init inside dies with it, and the whole pid namespace with the init
        if self._group:
            self._group.kill()
        for pid in tree:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def _remove_group(self) -> None:
        group = self._group
        if group and not group.remove() and not await anyio.to_thread.run_sync(group.destroy):
            raise errors.CleanupFailed("a process of the sandbox did not die", fix="look at the kernel's log")

    def _result(self, exit_: int, usage: cgroups.GroupTotals | None) -> Result:
        oom_killed = bool(usage and usage.oom_kills)
        code: int | None = self.status.get("exit-code")
        if code is None and self._outcome.verdict is None:
            code = self._never_ran(exit_, oom_killed)
        return self._outcome.result(
            Ending(
                code, oom_killed, refused_memory=self._group is None,  # by an rlimit: the guest can only give up
                memory_peak=usage.memory_peak if usage else None, cpu_ms=usage.cpu_ms if usage else None,
            )
        )  # fmt: skip

    def _never_ran(self, exit_: int, oom_killed: bool) -> int | None:
        """No exit code was reported: was the program missing, was it ended from outside, or did we fail?"""
        said = self._words()
        missing = re.search(r"^(?:bwrap: execvp|prlimit: failed to execute) (.+): (.+)$", said, re.MULTILINE)
        if missing:
            return 127 if "No such file" in missing[2] else 126
        if oom_killed:
            self._outcome.end(Status.OOM_KILLED)
            return KILLED_EXIT_CODE
        if exit_ < 0 or exit_ == KILLED_EXIT_CODE:
            self._outcome.end(Status.KILLED)
            return None
        raise errors.StartFailed(f"the sandbox could not be built: {said.strip() or f'exit code {exit_}'}")

    def _words(self) -> str:
        """What was printed to stderr: bubblewrap's own words, if the command never ran."""
        return self._outcome.stderr
