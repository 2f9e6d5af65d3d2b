"""One command in a running virtual machine, from its start to its result."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from belljar.backends.apple import output as apple_output
from belljar.backends.apple.cli import Cli, CliCall
from belljar.backends.base import Emit
from belljar.backends.outcome import Ending, Outcome
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.result import Result, Status, StreamName
from belljar.host.loops import lone_errors

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0  # for a call whose guest was ended; then the whole machine goes
_PREAMBLE_BYTES = 1 << 16
_NOT_STARTED_EXIT_CODE = 125  # of the shell inside, before it has printed its mark


class MachineFigures(NamedTuple):
    """What the machine counted since it was booted; None: it does not say."""

    oom_kills: int = 0
    memory_peak: int | None = None
    cpu_ms: float | None = None


class AppleJob(NamedTuple):
    """All that one run needs to know."""

    id: str
    words: Callable[[str], Sequence[str]]  # the mark -> the arguments
    stdin: bytes
    limits: Limits
    before: MachineFigures
    sweep: Callable[[], Awaitable[MachineFigures]]  # ends whatever the guest's uid runs
    destroy: Callable[[], Awaitable[None]]  # ends the machine


def figures(said: str, *, own_kernel: bool) -> MachineFigures:
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
    return MachineFigures(max((n for n in kills if n is not None), default=0), peak, cpu)


class AppleRun:
    """Starts one `container exec`, reads, feeds and watches it."""

    def __init__(self, cli: Cli, job: AppleJob, emit: Emit, control: Control) -> None:
        self._cli = cli
        self._job = job
        self._control = control
        self._outcome = Outcome(job.id, job.limits, emit, keep_output=control.feed is None)
        self._mark = f"belljar-{secrets.token_hex(16)}"
        self._before_mark: bytes | None = b""  # what the CLI itself said; None: the guest has started
        self._began = anyio.Event()
        self._figures: MachineFigures | None = None
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
        if self._before_mark is not None and self._outcome.verdict is None:
            raise self._never_ran(code)
        if self._figures is None:
            await self._stop()
        await self._outcome.close_streams()
        return self._result(code)

    async def _attend(self, call: CliCall) -> int:
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock, watchers)
            watchers.start_soon(self._watch_control, watchers)
            watchers.start_soon(self._feed, call)
            code = await call.drain(lambda d: self._read("stdout", d, watchers), lambda d: self._errors(d, watchers))
            watchers.cancel_scope.cancel()
        return code

    async def _read(self, name: StreamName, data: bytes, tasks: TaskGroup) -> None:
        if await self._outcome.take(name, data):
            self._end(Status.OUTPUT_LIMIT, tasks)

    async def _errors(self, data: bytes, tasks: TaskGroup) -> None:
        """Takes what comes before the mark as the CLI's own message, and what comes after it as the guest's."""
        if self._before_mark is not None:
            self._before_mark += data
            said, found, data = self._before_mark.partition(f"{self._mark}\n".encode())
            if not found:
                self._before_mark = said[-_PREAMBLE_BYTES:]
                return
            self._before_mark = None
            self._began.set()
            await self._outcome.begin()
        if data:
            await self._read("stderr", data, tasks)

    async def _feed(self, call: CliCall) -> None:
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
        with anyio.move_on_after(_START_SECONDS) as patience:
            await self._began.wait()
        if patience.cancelled_caught:
            await self._job.destroy()
            raise errors.BackendTimeout(f"the command was not started within {_START_SECONDS:g} s")
        await anyio.sleep(self._job.limits.timeout)
        self._end(Status.TIMEOUT, tasks)

    async def _watch_control(self, tasks: TaskGroup) -> None:
        self._end(await self._control.stopped(), tasks)

    def _end(self, verdict: Status, tasks: TaskGroup) -> None:
        if self._outcome.end(verdict):
            tasks.start_soon(self._finish)

    async def _finish(self) -> None:
        """The guest and all it started are ended; if the call does not end then, neither is the machine kept.

        A guest that has not begun yet is ended when it has: a signal sent before would miss it.
        """
        with anyio.move_on_after(_GRACE_SECONDS):
            await self._began.wait()
        await self._stop()
        await anyio.sleep(_GRACE_SECONDS)
        await self._job.destroy()

    async def _stop(self) -> None:
        try:
            self._figures = await self._job.sweep()
        except errors.BelljarError as error:
            self._lost = error.message
            self._figures = MachineFigures()
            await self._job.destroy()

    def _never_ran(self, code: int) -> errors.BelljarError:
        said = (self._before_mark or b"").decode("utf-8", "replace")
        if code == _NOT_STARTED_EXIT_CODE:
            why = " ".join(said.split())
            return errors.StartFailed(f"the command could not be started: {why}", fix="choose another image")
        return apple_output.failure(said, "the command could not be started")

    def _result(self, code: int) -> Result:
        now, before, ended = self._figures or MachineFigures(), self._job.before, self._outcome.verdict is not None
        if self._lost and not ended:
            raise errors.ExecutionFailed(f"the sandbox was lost while the command ran: {self._lost}")
        return self._outcome.result(
            Ending(
                None if ended else code, now.oom_kills > before.oom_kills,
                refused_memory=True,  # by the rlimit, or by a kernel that does not promise what it lacks
                memory_peak=now.memory_peak,
                cpu_ms=None if now.cpu_ms is None else now.cpu_ms - (before.cpu_ms or 0),
            )
        )  # fmt: skip
