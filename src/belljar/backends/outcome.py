"""What every run has, on whichever backend: its streams, its clock, its denials, its verdict and its `Result`."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from belljar.backends.base import Emit
from belljar.core.model import ours
from belljar.core.request import Limits
from belljar.core.result import STREAMS, TIMEOUT_EXIT_CODE, EventKind, Result, Status, StreamName
from belljar.core.values import KIB, MIB
from belljar.host.capture import Capture
from belljar.host.egress.guest import DENIALS
from belljar.host.loops import give_way

KILLED_EXIT_CODE = 137  # a shell's for a program that SIGKILL ended; the kernel's OOM killer sends it, and so do we
WENT_ON = "a process that the guest had started was killed for memory; the guest itself went on"
_BULK_BYTES = 16 * KIB  # that come at once: from here on the reader lets others go first
_LARGE_BYTES = MIB  # of a stream: from here on its text is put together in a thread
_TAIL_CHARACTERS = 2000  # of stderr, where a program's last complaint is looked for
_building: RunVar[anyio.CapacityLimiter] = RunVar("building")
# A guest that prints these words and fails is believed: its own disk and memory are all it can lie about.
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)
_MEMORY_ERROR = re.compile(r"^(MemoryError\b|terminate called.*bad_alloc|fatal error: .*out of memory)", re.MULTILINE)


class Ending(NamedTuple):
    """How a guest ended and what it had used, by what its backend saw. None: that is not known."""

    exit_code: int | None
    oom_killed: bool = False  # was it, or a process of its own, killed for memory?
    refused_memory: bool = False  # does a guest over its limit get an error to print, instead of being killed?
    status: Status | None = None  # the backend's own verdict, where the exit code says too little
    memory_peak: int | None = None  # bytes
    cpu_ms: float | None = None
    fuel: int | None = None
    warnings: tuple[str, ...] = ()


class Outcome:
    """Collects what comes of one run, from its start to its `Result`.

    Attributes:
        verdict: what ended the run from outside (a limit, the caller); None while the guest is left to end itself.
    """

    def __init__(self, box: str, limits: Limits, emit: Emit, *, keep_output: bool = True) -> None:
        """Starts the clock.

        Args:
            box: the sandbox's id.
            limits: of the run.
            emit: is awaited with each event.
            keep_output: False: output is told and not kept, because the caller talks with the guest.
        """
        self.verdict: Status | None = None
        self.emit = emit
        self._box = box
        self._limits = limits
        self._streams = {name: Capture(limits.output if keep_output else None) for name in STREAMS}
        self._last_words = ""  # the end of a stderr that is not kept
        self._denied: list[str] = []
        self._started = time.perf_counter()
        self._startup_ms = 0.0
        self._begun = False
        self._early: list[tuple[EventKind, str]] = []  # what came before the start was told

    # --- while it runs ---

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the run was begun, its start included."""
        return (time.perf_counter() - self._started) * 1000

    async def begin(self) -> None:
        """Notes that the guest has started, and tells it: first of all, whatever was heard before."""
        self._startup_ms = self.elapsed_ms
        await self.emit("started", self._box)
        await self._tell_early()

    async def take(self, name: StreamName, data: bytes) -> bool:
        """Takes what the guest wrote to a stream, and tells it. Passing the output limit is told once.

        Returns:
            Whether the stream is flooded, so that the run should be ended.
        """
        if len(data) >= _BULK_BYTES:
            await give_way()
        capture = self._streams[name]
        warned = capture.cut
        if text := capture.feed(data):
            if capture.unlimited and name == "stderr":
                self._last_words = (self._last_words + text)[-_TAIL_CHARACTERS:]
            await self._tell(name, text)
        if capture.cut and not warned:
            await self._tell("limit", f"output: {name} passed {capture.limit} bytes; from here on only its end is kept")
        return capture.flooded

    async def close_streams(self) -> None:
        """Tells what was held back, characters that are not whole too: nothing more will come."""
        for name in STREAMS:
            await self.take(name, b"")
        await self._tell_early()
        for capture in self._streams.values():
            if capture.total >= _LARGE_BYTES:
                await _build(capture)

    async def _tell(self, kind: EventKind, text: str) -> None:
        # The start is heard of on another stream than the output, and the two come as they like.
        if self._begun:
            await self.emit(kind, text)
        else:
            self._early.append((kind, text))

    async def _tell_early(self) -> None:
        while self._early:  # more may come while this is told
            await self.emit(*self._early.pop(0))
        self._begun = True

    async def deny(self, words: str) -> None:
        """Tells of a connection that the guest was refused; the result names the first of them."""
        if len(self._denied) < DENIALS:
            self._denied.append(words)
        await self.emit("denied", words)

    async def tell_forks_refused(self, count: int) -> None:
        """Tells that the guest met its limit of processes, if it did."""
        if count:
            await self.emit("limit", f"pids: {count} forks were refused")

    async def time_out(self) -> None:
        """Returns when the run's time is over, counted from its very beginning."""
        await anyio.sleep(max(0.0, self._limits.timeout - self.elapsed_ms / 1000))

    def end(self, verdict: Status) -> bool:
        """Notes what ended the run. Only the first verdict counts; returns whether this was it."""
        if self.verdict is not None:
            return False
        self.verdict = verdict
        return True

    # --- afterwards ---

    @property
    def stderr(self) -> str:
        """What is kept of it."""
        return self._streams["stderr"].text

    def complain(self, words: str) -> None:
        """Adds a line of ours to the guest's stderr."""
        self._streams["stderr"].feed(f"{words}\n".encode())

    def result(self, ending: Ending) -> Result:
        """The run's result, by what the guest printed and how it ended."""
        out, err = self._streams["stdout"], self._streams["stderr"]
        stderr, cut = err.text, bool(out.cut or err.cut)
        peak, cpu = ending.memory_peak, ending.cpu_ms
        status = self.verdict or ending.status or judge(ending, stderr or self._last_words, cut=cut)
        return ours(Result)(
            status=status, exit_code=self._exit_code(status, ending.exit_code),
            stdout=out.text, stderr=stderr, truncated=cut,
            duration_ms=round(self.elapsed_ms, 3), startup_ms=round(self._startup_ms, 3),
            memory_used_mb=None if peak is None else round(peak / MIB, 3),
            cpu_ms=None if cpu is None else round(cpu, 3), fuel_consumed=ending.fuel, container_id=self._box,
            denied=tuple(self._denied), warnings=self._warnings(ending),
        )  # fmt: skip

    def _exit_code(self, status: Status, code: int | None) -> int | None:
        """A guest's own exit code; at a timeout 124, whatever it said while it was being ended, and none for a stop."""
        if status is Status.TIMEOUT:
            return TIMEOUT_EXIT_CODE
        return None if self.verdict in (Status.ABORTED, Status.KILLED) else code

    def _warnings(self, ending: Ending) -> tuple[str, ...]:
        went_on = ending.oom_killed and ending.exit_code != KILLED_EXIT_CODE and self.verdict is None
        return (WENT_ON, *ending.warnings) if went_on else ending.warnings


async def _build(capture: Capture) -> None:
    """Puts its text together in a thread, one at a time: each takes three times its size meanwhile."""
    limiter = _building.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(1)
        _building.set(limiter)
    await anyio.to_thread.run_sync(capture.build, limiter=limiter)


def judge(ending: Ending, stderr: str, *, cut: bool) -> Status:
    """The verdict on a guest that ended by itself, or that the kernel ended.

    Args:
        ending: how it ended.
        stderr: what it printed there.
        cut: whether its output passed the limit.
    """
    tail = stderr[-_TAIL_CHARACTERS:]
    if ending.exit_code == 0:
        return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
    if ending.oom_killed and ending.exit_code == KILLED_EXIT_CODE:
        return Status.OOM_KILLED
    if ending.refused_memory and _MEMORY_ERROR.search(tail):
        return Status.OOM_KILLED
    return Status.DISK_LIMIT if _NO_SPACE.search(tail) else Status.ERROR
