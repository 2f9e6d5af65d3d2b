"""One command in a running virtual machine, from start to verdict."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from belljar.backends.apple import output as apple_output
from belljar.backends.apple.cli import Call, Cli
from belljar.backends.base import Emit
from belljar.backends.control import Control
from belljar.backends.outcome import hear
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status, Stream
from belljar.core.values import MIB
from belljar.host.capture import Capture
from belljar.host.loops import lone_errors

_START = 60.0
_GRACE = 10.0  # for a call whose guest was ended; then the whole machine goes
_EARLY = 1 << 20
_KILLED = 137
_OURS = 125  # of the shell inside, before it has said its mark
# A guest that prints these words and fails is believed: its own disk and memory are all it can lie about.
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)
_MEMORY_ERROR = re.compile(r"^(MemoryError\b|terminate called.*bad_alloc|fatal error: .*out of memory)", re.MULTILINE)


class Figures(NamedTuple):
    """What the machine counted since it was booted; None: it does not say."""

    oom_kills: int = 0
    memory_peak: int | None = None
    cpu_ms: float | None = None


class Job(NamedTuple):
    """All that one run needs to know."""

    id: str
    words: Callable[[str], Sequence[str]]  # the mark -> the arguments
    stdin: bytes
    limits: Limits
    before: Figures
    sweep: Callable[[], Awaitable[Figures]]  # ends whatever the guest's uid runs
    destroy: Callable[[], Awaitable[None]]  # ends the machine


def figures(said: str, *, own_kernel: bool) -> Figures:
    """The counters of version 2 groups, of version 1, or (in a kernel of its own) of the whole machine."""
    parts = dict(re.findall(r"^([a-z_.]+):\n((?:[^:]*\n)*?)(?=[a-z_.]+:$)", said, re.MULTILINE))

    def number(part: str, pattern: str = r"^(\d+)$") -> int | None:
        match = re.search(pattern, parts.get(part, ""), re.MULTILINE)
        return int(match[1]) if match else None

    kills = [number("memory.events", r"^oom_kill (\d+)$"), number("memory.oom_control", r"^oom_kill (\d+)$")]
    kills += [number("kernel", r"^oom_kill (\d+)$")] if own_kernel else []
    peak = number("memory.peak") or number("memory.max_usage_in_bytes")
    usec, nsec = number("cpu.stat", r"^usage_usec (\d+)$"), number("cpuacct.usage")
    cpu = usec / 1000 if usec is not None else nsec / 1e6 if nsec is not None else None
    return Figures(max((n for n in kills if n is not None), default=0), peak, cpu)


class AppleRun:
    """One `container exec`: started, read, fed, watched, judged."""

    def __init__(self, cli: Cli, job: Job, emit: Emit, control: Control) -> None:
        self._cli = cli
        self._job = job
        self._emit = emit
        self._control = control
        keep = job.limits.output if control.feed is None else None
        self._streams = {name: Capture(keep) for name in STREAMS}
        self._mark = f"belljar-{secrets.token_hex(16)}"
        self._before_mark: bytes | None = b""  # the CLI's own words; None: the guest has started
        self._early = b""  # of stdout, until its start was told: the two streams come as they like
        self._began = anyio.Event()
        self._told = anyio.Event()
        self._verdict: Status | None = None
        self._figures: Figures | None = None
        self._started = time.perf_counter()
        self._startup_ms = 0.0
        self._lost = ""

    async def go(self) -> Result:
        with ExitStack() as fds, lone_errors():
            stdin = bool(self._job.stdin) or self._control.feed is not None
            call = self._cli.start(self._job.words(self._mark), fds, stdin=stdin)
            try:
                code = await self._attend(call)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._stop()
                raise
            finally:
                await call.end()
        if self._before_mark is not None and self._verdict is None:
            raise self._never_ran(code)
        if self._figures is None:
            await self._stop()
        for name in STREAMS:
            await hear(self._streams[name], name, b"", self._emit)
        return self._result(code)

    async def _attend(self, call: Call) -> int:
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock, watchers)
            watchers.start_soon(self._watch_control, watchers)
            watchers.start_soon(self._feed, call)
            code = await call.drain(lambda data: self._output(data, watchers), lambda d: self._errors(d, watchers))
            watchers.cancel_scope.cancel()
        return code

    async def _read(self, name: Stream, data: bytes, tasks: TaskGroup) -> None:
        capture = self._streams[name]
        await hear(capture, name, data, self._emit)
        if capture.flooded and self._verdict is None:
            self._end(Status.OUTPUT_LIMIT, tasks)

    async def _output(self, data: bytes, tasks: TaskGroup) -> None:
        if self._told.is_set():
            await self._read("stdout", data, tasks)
            return
        self._early += data
        if len(self._early) > _EARLY:
            await self._told.wait()

    async def _errors(self, data: bytes, tasks: TaskGroup) -> None:
        """What comes before the mark is the CLI's word, what comes after it the guest's."""
        if self._before_mark is not None:
            self._before_mark += data
            said, found, data = self._before_mark.partition(f"{self._mark}\n".encode())
            if not found:
                self._before_mark = said[-(1 << 16) :]
                return
            self._before_mark = None
            self._startup_ms = self._elapsed_ms()
            self._began.set()
            await self._emit("started", self._job.id)
            while self._early:
                early, self._early = self._early, b""
                await self._read("stdout", early, tasks)
            self._told.set()
        if data:
            await self._read("stderr", data, tasks)

    async def _feed(self, call: Call) -> None:
        if self._control.feed is None:
            if self._job.stdin:
                await call.feed(self._job.stdin)
            call.end_input()
            return
        try:
            async for data in self._control.feed:
                await call.feed(data)
        finally:
            call.end_input()

    async def _watch_clock(self, tasks: TaskGroup) -> None:
        """The guest's time runs from when it started; that it starts at all is for the machine to see to."""
        with anyio.move_on_after(_START) as patience:
            await self._began.wait()
        if patience.cancelled_caught:
            await self._job.destroy()
            raise errors.BackendTimeout(f"the command was not started within {_START:g} s")
        await anyio.sleep(self._job.limits.timeout)
        self._end(Status.TIMEOUT, tasks)

    async def _watch_control(self, tasks: TaskGroup) -> None:
        self._end(await self._control.stopped(), tasks)

    def _end(self, verdict: Status, tasks: TaskGroup) -> None:
        if self._verdict is None:
            self._verdict = verdict
            tasks.start_soon(self._finish)

    async def _finish(self) -> None:
        """The guest and all it started are ended; if the call does not end then, neither is the machine kept.

        A guest that has not begun yet is ended when it has: a signal sent before would miss it.
        """
        with anyio.move_on_after(_GRACE):
            await self._began.wait()
        await self._stop()
        await anyio.sleep(_GRACE)
        await self._job.destroy()

    async def _stop(self) -> None:
        try:
            self._figures = await self._job.sweep()
        except errors.BelljarError as error:
            self._lost = error.message
            self._figures = Figures()
            await self._job.destroy()

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000

    def _never_ran(self, code: int) -> errors.BelljarError:
        said = (self._before_mark or b"").decode("utf-8", "replace")
        if code == _OURS:
            why = " ".join(said.split())
            return errors.StartFailed(f"the command could not be started: {why}", fix="choose another image")
        return apple_output.failure(said, "the command could not be started")

    def _result(self, code: int) -> Result:
        out, err = self._streams["stdout"], self._streams["stderr"]
        now, before = self._figures or Figures(), self._job.before
        if self._lost and self._verdict is None:
            raise errors.ExecutionFailed(f"the sandbox was lost while the command ran: {self._lost}")
        cut, killed = bool(out.cut or err.cut), now.oom_kills > before.oom_kills
        cpu = None if now.cpu_ms is None else now.cpu_ms - (before.cpu_ms or 0)
        warnings: tuple[str, ...] = ()
        if killed and code != _KILLED and self._verdict is None:
            warnings = ("a process that the guest had started was killed for memory; the guest itself went on",)
        return Result(
            status=self._judge(code, killed, err.text, cut), exit_code=code if self._verdict is None else None,
            stdout=out.text, stderr=err.text, truncated=cut,
            duration_ms=round(self._elapsed_ms(), 3), startup_ms=round(self._startup_ms, 3),
            memory_used_mb=None if now.memory_peak is None else round(now.memory_peak / MIB, 3),
            cpu_ms=None if cpu is None else round(cpu, 3), container_id=self._job.id, warnings=warnings,
        )  # fmt: skip

    def _judge(self, code: int, killed: bool, stderr: str, cut: bool) -> Status:
        if self._verdict:
            return self._verdict
        if code == 0:
            return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
        if killed and code == _KILLED:
            return Status.OOM_KILLED
        if _MEMORY_ERROR.search(stderr[-2000:]):
            return Status.OOM_KILLED  # refused by the rlimit, or by a kernel that does not promise what it lacks
        if _NO_SPACE.search(stderr[-2000:]):
            return Status.DISK_LIMIT
        return Status.ERROR
