"""One command in a container, from its start to its result."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from belljar.backends.base import Emit
from belljar.backends.containers.egress_relay import EgressRelay
from belljar.backends.containers.engine_stats import usage_of
from belljar.backends.containers.marked_stream import MarkedStream
from belljar.backends.containers.standby import Standby
from belljar.backends.outcome import KILLED_EXIT_CODE, Ending, Outcome
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status, Usage
from belljar.host import cgroups, kernel_log, procfs
from belljar.host.cgroups import GroupTotals
from belljar.host.docker_api import asking, container_stats
from belljar.host.egress.judgement import Told
from belljar.host.egress.proxy import Proxy
from belljar.host.loops import lone_errors

# Seconds between looks at a dead container: an engine may hear of the OOM killer after the end of its victim.
_LATE_OOM_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.4)
_LAST_OUTPUT_SECONDS = 1.0  # that a run has before it is watched, and that its output has after its end
_UNKNOWN_EXIT_CODE = 255
_NOT_KILLED = "the engine did not answer when it was told to end the container: it will be told again, until it is gone"


class ContainerJob(NamedTuple):
    """All that one run needs to know."""

    id: str
    order: bytes  # what the launcher is to run
    stdin: bytes
    limits: Limits
    create: Callable[[], Awaitable[Standby]]  # a container that nobody has used
    deliver: Callable[[Standby], Awaitable[None]]  # starts it if it is not up, and puts the files in place
    relay: EgressRelay | None = None  # its way out, if it was granted hosts
    proxy: Callable[[Told], Proxy] | None = None
    own_kernel: bool = False  # does it run in a kernel of its own, so that the host does not see its processes?
    lasting: bool = False  # can it touch what outlives it? Then nobody is told anything before it is dead.


class DockerRun:
    """Gives one container its command, supplies and watches it. Whoever made the container removes it."""

    def __init__(self, job: ContainerJob, emit: Emit, control: Control) -> None:
        self._job = job
        self._control = control
        self._outcome = Outcome(job.id, job.limits, emit, keep_output=control.feed is None)
        self._mark = secrets.token_hex(16).encode()
        self._marked = {name: MarkedStream(self._mark, begun=name == "stdout") for name in STREAMS}
        self._usage: GroupTotals | None = None
        self._cpu_before = 0.0
        self._delivered = False
        self._ended = False
        self._not_killed = False  # was it to be killed, and is it unknown whether that worked?
        # What a kill puts an end to: a container that is dead, or has no order yet, can do nothing any more.
        self._delivering = anyio.CancelScope()
        self._listening = anyio.CancelScope()
        self._waiting = anyio.CancelScope()  # for the engine to tell the container's end
        self._over = anyio.Event()  # the guest has ended by itself
        self._silent_since = time.perf_counter()  # infinite while what was heard is told
        self._standby: Standby

    @property
    def begun(self) -> bool:
        """Whether the guest was started."""
        return self._marked["stderr"].begun

    async def go(self) -> Result:
        """Runs the command in a new container, and ends the container.

        Raises:
            StartFailed: the guest could not be started.
            BackendError: the engine failed.
        """
        if self._control.stopping:
            self._outcome.end(self._control.reason)
            return self._result(None, False)
        self._standby = await self._job.create()
        try:
            with lone_errors():
                return await self._go()
        finally:
            if not self._ended:
                with anyio.CancelScope(shield=True):
                    await self._kill()
            await self._standby.close()

    async def _go(self) -> Result:
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock)
            watchers.start_soon(self._watch_control)
            await self._deliver()
            if self._outcome.verdict:  # its end came before its beginning: it is never given its order
                self._ended = True
                watchers.cancel_scope.cancel()
                return self._result(None, False)
            if self._job.relay:
                await watchers.start(self._serve_egress)
            watchers.start_soon(self._feed)
            watchers.start_soon(self._watch_exit)
            await self._listen(watchers.start_soon)
            if self._not_killed:  # the verdict is ours; the cleanup asks again when the engine hears again
                self._ended = True
                watchers.cancel_scope.cancel()
                return self._result(None, False)
            code = await self._exit_code()
            watchers.cancel_scope.cancel()
        oom_killed = await self._was_oom_killed(code)
        if self._usage:
            await self._outcome.tell_forks_refused(self._usage.forks_refused)
        return self._result(code, oom_killed)

    async def _deliver(self) -> None:
        try:
            with self._delivering:
                await self._job.deliver(self._standby)
        except errors.BelljarError:
            if self._outcome.verdict is None:
                raise
        if self._outcome.verdict and not self._delivering.cancelled_caught:  # it may have come up after the kill
            await self._kill()
        elif self._standby.group:
            self._cpu_before = self._standby.group.usage().cpu_ms or 0.0
        self._delivered = True

    async def measure(self) -> Usage | None:
        """From the container's group; only where we cannot see that, the engine is asked."""
        if not self._delivered or self._ended:
            return None
        figures: Usage | None
        if group := self._standby.group:
            figures = await anyio.to_thread.run_sync(self._read_group, group, abandon_on_cancel=True)
        else:
            async with asking("the container's figures", seconds=5):
                figures = usage_of(await container_stats(self._standby.container))
        # What goes through the proxy is no traffic of the container's network.
        return figures._replace(rx=None, tx=None) if figures and self._job.relay else figures

    def _read_group(self, group: cgroups.Group) -> Usage | None:
        """Reads what the container's group counts, in a thread; None if it is gone."""
        if (figures := procfs.of_group(group)) is None:
            return None
        rx, tx = next((found for pid in group.pids() if (found := procfs.network(pid)) != (None, None)), (None, None))
        return figures._replace(cpu_ms=max(0.0, (figures.cpu_ms or 0.0) - self._cpu_before), rx=rx, tx=tx)

    async def _serve_egress(self, *, task_status: TaskStatus[None]) -> None:
        """Answers what the guest asks of the proxy."""
        assert self._job.relay
        assert self._job.proxy
        async with self._job.relay.open(self._standby) as listener:
            task_status.started()
            await self._job.proxy(self._outcome.deny).serve(listener)

    async def _feed(self) -> None:
        streams = self._standby.streams
        await streams.send(self._mark + b"\n" + self._job.order + self._job.stdin)
        if self._control.feed is not None:
            async for data in self._control.feed:
                await streams.send(data)
        streams.end()

    async def _watch_exit(self) -> None:
        """Ends listening some time after the container's end.

        An engine that still holds input for a container that is dead does not close its streams by itself. But a
        listener that takes its time has not heard all yet.
        """
        await anyio.sleep(_LAST_OUTPUT_SECONDS)
        with suppress(Exception):
            await self._standby.container.wait()
        rest = _LAST_OUTPUT_SECONDS
        while rest > 0:
            await anyio.sleep(rest)
            silent = time.perf_counter() - self._silent_since
            rest = 0.0 if self._outcome.verdict else min(_LAST_OUTPUT_SECONDS, _LAST_OUTPUT_SECONDS - silent)
        self._listening.cancel()

    async def _listen(self, start_soon: Callable[..., object]) -> None:
        with self._listening:
            async for name, data in self._standby.streams.parts():
                self._silent_since = math.inf
                marked = self._marked[name]
                waited = not marked.begun
                heard = marked.take(data)
                if waited and marked.begun:
                    await self._outcome.begin()
                flooded = bool(heard) and await self._outcome.take(name, heard)
                if flooded and self._outcome.verdict is None:
                    start_soon(self._end, Status.OUTPUT_LIMIT)
                if all(each.ended is not None for each in self._marked.values()):
                    self._over.set()
                    break
                self._silent_since = time.perf_counter()
        if self._marked["stderr"].ended is None and self._outcome.verdict is None:
            self._read_usage()  # all of it was killed at once, and an engine may not tell by whom
        for each in STREAMS:
            if held := self._marked[each].rest():
                await self._outcome.take(each, held)
        await self._outcome.close_streams()

    async def _exit_code(self) -> int:
        """The guest's exit code as the launcher told it, else the container's as the engine tells it."""
        told = self._marked["stderr"].ended
        if told is not None and self._outcome.verdict is None:
            self._read_usage()
            if self._job.lasting or self._usage is None:
                await self._kill()
            self._ended = True  # its processes are dead; what is left of it is removed in a moment
            return min(int(told), _UNKNOWN_EXIT_CODE) if re.fullmatch(rb"\d{1,3}", told) else _UNKNOWN_EXIT_CODE
        code = KILLED_EXIT_CODE
        with self._waiting:  # who killed it has seen its end, and wants no exit code of a busy engine
            async with asking("the container's end"):
                code = (await self._standby.container.wait())["StatusCode"]
        self._ended = True
        if not isinstance(code, int):
            raise errors.ExecutionFailed(f"the engine told no exit code: {code!r}")
        if not self.begun and code != KILLED_EXIT_CODE:
            said = self._marked["stderr"].preamble.decode("utf-8", "replace").strip()
            raise errors.StartFailed(f"the guest could not be started: {said[-500:] or f'exit code {code}'}")
        # The launcher itself never ends with 0 before it has told an exit code: if none was heard, it was lost.
        return code or _UNKNOWN_EXIT_CODE

    def _read_usage(self) -> None:
        """Reads the group's figures, while the container is still there."""
        usage = self._standby.group.usage() if self._standby.group else None
        if usage and (usage.memory_peak is not None or usage.cpu_ms is not None):  # else the group is gone
            self._usage = usage

    async def _was_oom_killed(self, code: int) -> bool:
        if self._usage is not None and (self._usage.oom_kills or self._marked["stderr"].ended is not None):
            return self._usage.oom_kills > 0
        if self._outcome.verdict:
            return False
        for pause in _LATE_OOM_SECONDS if code == KILLED_EXIT_CODE else (0.0,):
            await anyio.sleep(pause)
            async with asking("the container's state"):
                if (await self._standby.container.show())["State"].get("OOMKilled") is True:
                    return True
        if code != KILLED_EXIT_CODE or self._standby.group is None:
            return False
        # The group was gone before it could be read, and an engine that hears of it too late does not tell at all.
        return await anyio.to_thread.run_sync(kernel_log.killed_for_memory, str(self._standby.container.id))

    async def _watch_clock(self) -> None:
        await self._outcome.time_out()
        await self._stop(Status.TIMEOUT)

    async def _watch_control(self) -> None:
        await self._stop(await self._control.stopped())

    async def _stop(self, verdict: Status) -> None:
        """Asks the guest to end itself, and ends it when its grace is over; what it prints meanwhile is kept."""
        first, grace = self._outcome.end(verdict), self._job.limits.grace
        if first and grace and self.begun:
            await self._standby.terminate(own_kernel=self._job.own_kernel)
            with anyio.move_on_after(grace):
                await self._over.wait()
        await self._end(verdict)

    async def _end(self, verdict: Status) -> None:
        self._outcome.end(verdict)
        self._read_usage()
        await self._kill()

    async def _kill(self) -> None:
        if await self._standby.kill():
            self._listening.deadline = anyio.current_time() + _LAST_OUTPUT_SECONDS
        else:
            self._not_killed = True
            self._listening.cancel()
        self._delivering.cancel()
        self._waiting.cancel()

    def _result(self, code: int | None, oom_killed: bool) -> Result:
        usage, ended = self._usage, self._outcome.verdict is not None
        cpu = usage.cpu_ms if usage else None
        return self._outcome.result(
            Ending(
                None if ended else code, oom_killed, memory_peak=usage.memory_peak if usage else None,
                cpu_ms=None if cpu is None else max(0.0, cpu - self._cpu_before),
                warnings=(_NOT_KILLED,) if self._not_killed else (),
            )
        )  # fmt: skip
