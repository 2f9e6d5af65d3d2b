"""One command in a native sandbox, from start to verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends.base import Emit
from belljar.backends.control import Control
from belljar.backends.native import jail
from belljar.backends.outcome import hear
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status, Stream, Usage
from belljar.core.values import MIB
from belljar.host import cgroups, process, procfs
from belljar.host.capture import Capture
from belljar.host.egress import DENIALS, PORT, Proxy, Told
from belljar.host.loops import lone_errors

_INODE = 1024  # what an empty file costs the kernel, about
# A guest that prints these words and fails is believed: its own disk is all it can lie about.
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)
_MEMORY_ERROR = re.compile(r"^(MemoryError\b|terminate called.*bad_alloc|fatal error: .*out of memory)", re.MULTILINE)
_KILLED = 137


class Job(NamedTuple):
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
    proxy: Callable[[Told], Proxy] | None = None


class NativeRun:
    """One bubblewrap: started, read, fed, watched, judged, and gone."""

    def __init__(self, job: Job, emit: Emit, control: Control) -> None:
        self._job = job
        self._limits = job.limits
        self._group = job.group
        self._emit = emit
        self._control = control
        keep = job.limits.output if control.feed is None else None
        self._streams = {"stdout": Capture(keep), "stderr": Capture(keep)}
        self._verdict: Status | None = None
        self.status: dict[str, Any] = {}
        self._fds = ExitStack()
        self._started = time.perf_counter()
        self._startup_ms = 0.0
        self._denied: list[str] = []
        self._monitor = 0  # bubblewrap's pid, while it lives

    async def go(self) -> Result:
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
                await self._sweep()
        if usage and usage.forks_refused:
            await self._emit("limit", f"pids: {usage.forks_refused} forks were refused")
        return self._result(exit_, usage)

    async def measure(self) -> Usage | None:
        """What it uses now; None before its start and after its end."""
        if not self._monitor:
            return None
        if self._group:
            figures = procfs.of_group(self._group)
        else:
            figures = await anyio.to_thread.run_sync(self._measure_tree, self._monitor, abandon_on_cancel=True)
        init = self.status.get("child-pid")
        if figures is None or not init or self._job.proxy:  # what goes through the proxy is loopback's traffic inside
            return figures
        rx, tx = procfs.network(init)
        return figures._replace(rx=rx, tx=tx)

    def _measure_tree(self, monitor: int) -> Usage | None:
        return procfs.of_processes(procfs.descendants(monitor), _footprint(monitor, self._folders, self._limits.memory))

    @property
    def _folders(self) -> Sequence[str]:
        """Of the guest, those that are kept in memory."""
        return ("tmp", "dev/shm") if self._job.jail.workspace else ("tmp", "dev/shm", "workspace")

    def _start(self) -> tuple[process.Child, dict[str, int]]:
        job = self._job
        args, fds = jail.arguments(job.jail, self._fds)
        ours: dict[str, int] = {}
        theirs: dict[str, int] = {}
        with ExitStack() as child_side:
            for name in ("stdout", "stderr", "status"):
                ours[name], theirs[name] = os.pipe()
                self._fds.callback(os.close, ours[name])
                child_side.callback(os.close, theirs[name])
            if job.uid is not None:  # so that the guest may open /dev/stdout again
                os.fchown(theirs["stdout"], job.uid, job.uid)
                os.fchown(theirs["stderr"], job.uid, job.uid)
            if self._control.feed is None:
                stdin = jail.memory_file(job.stdin, self._fds) if job.stdin else subprocess.DEVNULL
            else:
                stdin, ours["stdin"] = os.pipe()
                child_side.callback(os.close, stdin)
            command = [*job.argv]
            if job.proxy:
                near, far = socket.socketpair()
                child_side.callback(far.close)
                ours["door"] = near.detach()
                self._fds.callback(os.close, ours["door"])
                fds.append(far.fileno())
                command = ["python3", "-I", "-S", "-c", jail.DOOR, str(far.fileno()), str(PORT), *command]
            args += ["--json-status-fd", str(theirs["status"])]
            # In a file of its own, not on the command line, where every user of the host could read the environment.
            listing = jail.memory_file(b"\0".join(arg.encode() for arg in args) + b"\0", self._fds)
            line = jail.launcher(job.group.doors if job.group else (), job.uid, job.jail.space.holder)
            line += [job.bubblewrap, "--args", str(listing), "--", *job.prefix, *command]
            passed = (*fds, listing, theirs["status"])
            try:
                child = process.Child(line, stdin=stdin, stdout=theirs["stdout"], stderr=theirs["stderr"], fds=passed)
            except OSError as error:
                raise errors.StartFailed(f"bubblewrap could not be started: {error}") from None
        return child, ours

    async def _attend(self, child: process.Child, pipes: dict[str, int]) -> int:
        """Reads, feeds and watches until the guest has ended, one way or another."""
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock, child)
            watchers.start_soon(self._watch_control, child)
            if self._group is None:
                watchers.start_soon(self._watch_memory, child)
            if self._control.feed is not None:
                watchers.start_soon(self._feed, pipes["stdin"])
            if self._job.proxy:
                watchers.start_soon(self._let_out, self._job.proxy, pipes["door"])
            async with anyio.create_task_group() as readers:
                readers.start_soon(self._read_status, pipes["status"])
                for name in STREAMS:
                    readers.start_soon(self._read, name, pipes[name], child)
            exit_ = await child.wait()
            watchers.cancel_scope.cancel()
        return exit_

    async def _read(self, name: Stream, fd: int, child: process.Child) -> None:
        capture = self._streams[name]
        while data := await process.read_some(fd):
            await hear(capture, name, data, self._emit)
            if capture.flooded and self._verdict is None:
                self._end(child, Status.OUTPUT_LIMIT)
        await hear(capture, name, b"", self._emit)

    async def _read_status(self, fd: int) -> None:
        """bubblewrap tells the guest's pid and namespaces, and its exit code only if it really ran."""
        text = b""
        while data := await process.read_some(fd):
            text += data
            for line in text.splitlines():
                with suppress(ValueError):
                    self.status |= json.loads(line)
            if not self._startup_ms and self.status:
                self._startup_ms = (time.perf_counter() - self._started) * 1000
                await self._emit("started", self._job.id)

    async def _feed(self, fd: int) -> None:
        assert self._control.feed is not None
        try:
            async for data in self._control.feed:
                await process.write_all(fd, data)
        finally:
            os.close(fd)

    async def _let_out(self, proxy: Callable[[Told], Proxy], fd: int) -> None:
        """Takes the listening socket that the launcher made inside, and answers it from out here."""

        async def told(words: str) -> None:
            if len(self._denied) < DENIALS:
                self._denied.append(words)
            await self._emit("denied", words)

        await anyio.wait_readable(fd)
        with socket.socket(fileno=os.dup(fd)) as door:
            _, fds, _, _ = socket.recv_fds(door, 16, 1)
        if fds:
            await proxy(told).serve(socket.socket(fileno=fds[0]))

    async def _watch_clock(self, child: process.Child) -> None:
        await anyio.sleep(max(0.0, self._limits.timeout - (time.perf_counter() - self._started)))
        self._end(child, Status.TIMEOUT)

    async def _watch_control(self, child: process.Child) -> None:
        self._end(child, await self._control.stopped())

    async def _watch_memory(self, child: process.Child) -> None:
        """Without control groups: adds up all that the guest keeps in memory, and ends it over the limit."""
        while True:
            used = await anyio.to_thread.run_sync(_footprint, child.pid, self._folders, self._limits.memory)
            if used > self._limits.memory:
                return self._end(child, Status.OOM_KILLED)
            await anyio.sleep(0.02)

    def _end(self, child: process.Child, verdict: Status) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._kill(child)

    def _kill(self, child: process.Child) -> None:
        tree = [] if self._group else procfs.descendants(child.pid)
        child.kill()  # the init inside dies with it, and the whole pid namespace with the init
        if self._group:
            self._group.kill()
        for pid in tree:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def _sweep(self) -> None:
        group = self._group
        if group and not group.remove() and not await anyio.to_thread.run_sync(group.destroy):
            raise errors.CleanupFailed("a process of the sandbox did not die", fix="look at the kernel's log")

    def _result(self, exit_: int, usage: cgroups.GroupTotals | None) -> Result:
        out, err = self._streams["stdout"], self._streams["stderr"]
        code: int | None = self.status.get("exit-code")
        stderr = err.text
        if code is None and self._verdict is None:
            code = self._never_ran(exit_, usage, stderr)
        peak = usage.memory_peak if usage else None
        cpu = usage.cpu_ms if usage else None
        return Result(
            status=self._judge(code, usage, stderr, bool(out.cut or err.cut)), exit_code=code,
            stdout=out.text, stderr=stderr, truncated=bool(out.cut or err.cut),
            duration_ms=round((time.perf_counter() - self._started) * 1000, 3), startup_ms=round(self._startup_ms, 3),
            memory_used_mb=None if peak is None else round(peak / MIB, 3),
            cpu_ms=None if cpu is None else round(cpu, 3),
            container_id=self._job.id, denied=tuple(self._denied),
            warnings=tuple(self._casualties(code, usage)),
        )  # fmt: skip

    def _casualties(self, code: int | None, usage: cgroups.GroupTotals | None) -> list[str]:
        if usage is None or not usage.oom_kills or code == _KILLED or self._verdict:
            return []
        return ["a process that the guest had started was killed for memory; the guest itself went on"]

    def _never_ran(self, exit_: int, usage: cgroups.GroupTotals | None, said: str) -> int | None:
        """No exit code was reported: was the program missing, was it ended from outside, or did we fail?"""
        missing = re.search(r"^(?:bwrap: execvp|prlimit: failed to execute) (.+): (.+)$", said, re.MULTILINE)
        if missing:
            return 127 if "No such file" in missing[2] else 126
        if usage and usage.oom_kills:
            self._verdict = Status.OOM_KILLED
            return 137
        if exit_ < 0 or exit_ == 137:
            self._verdict = Status.KILLED
            return None
        raise errors.StartFailed(f"the sandbox could not be built: {said.strip() or f'exit code {exit_}'}")

    def _judge(self, code: int | None, usage: cgroups.GroupTotals | None, stderr: str, cut: bool) -> Status:
        if self._verdict:
            return self._verdict
        if code == 0:
            return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
        if usage and usage.oom_kills and code == _KILLED:
            return Status.OOM_KILLED
        if self._group is None and _MEMORY_ERROR.search(stderr[-2000:]):
            return Status.OOM_KILLED  # the rlimit refused the memory, and the guest gave up
        if _NO_SPACE.search(stderr[-2000:]):
            return Status.DISK_LIMIT
        return Status.ERROR


def _footprint(monitor: int, folders: Sequence[str], limit: int) -> int:
    """Private memory of the guest's processes, its files in memory, and what waits in its sockets.

    The monitor's child is the init, whose root is still the host's while it builds the jail; what it
    forks is the guest, inside.
    """
    guests = [pid for init in procfs.children(monitor) for pid in procfs.descendants(init)]
    total = sum(map(_private_memory, guests))
    if total > limit and len(guests) > 1:  # forked processes share most pages: ask again, dearly and exactly
        total = sum(map(_fair_share, guests))
    for guest in guests[:1]:
        total += sum(_in_folder(f"/proc/{guest}/root/{folder}") for folder in folders)
        if _has_sockets(f"/proc/{guest}/net/sockstat"):
            total += sum(_in_sockets(f"/proc/{guest}/net/{kind}") for kind in ("tcp", "tcp6"))
    return total


def _private_memory(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _fair_share(pid: int) -> int:
    """Private memory, and of shared pages one part for each process that shares them."""
    with suppress(OSError):
        rows = re.findall(r"^Pss_Anon:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return sum(map(int, rows)) * 1024
    return 0


def _in_folder(path: str) -> int:
    with suppress(OSError):
        space = os.statvfs(path)
        return (space.f_blocks - space.f_bfree) * space.f_frsize + (space.f_files - space.f_ffree) * _INODE
    return 0


def _has_sockets(path: str) -> bool:
    """Listing connections takes milliseconds, so it is done only for a guest that has more than a few."""
    with suppress(OSError):
        return any(int(n) > 8 for n in re.findall(r"TCP6?: inuse (\d+)", Path(path).read_text()))
    return False


def _in_sockets(path: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        queues = [line.split()[4].split(":") for line in Path(path).read_text().splitlines()[1:]]
        return sum(int(sent, 16) + int(received, 16) for sent, received in queues)
    return 0
