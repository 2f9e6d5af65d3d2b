"""One command in a container, from its creation to its verdict."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from belljar import errors
from belljar.backends.base import STREAMS, Control, Emit, hear, lone_errors
from belljar.backends.docker_engine import Wire, asking
from belljar.models import Limits, Result, Status
from belljar.output import Capture

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

_KILLED = 137
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)
_LATE_WORD = (0.0, 0.05, 0.1, 0.2, 0.4)  # seconds: an engine may hear of the OOM killer after the end of its victim
_PIPE = 32_768  # bytes of input that surely fit into a pipe, so that nobody waits for a reader
_LAST_WORDS = 1.0  # seconds for the output of a guest that has ended
_PREAMBLE = 1 << 16


class Job(NamedTuple):
    """All that one run needs to know."""

    id: str
    name: str  # of the container, so that it can be removed whatever becomes of us
    body: dict[str, Any]
    stdin: bytes
    limits: Limits
    deliver: Callable[[DockerContainer], Awaitable[None]]  # puts the files in place
    count_deaths: bool = False  # must we look for ourselves whether the OOM killer struck?


class DockerRun:
    """One container: created, heard, started, supplied, watched, judged. Whoever made it removes it."""

    def __init__(self, client: Docker, job: Job, emit: Emit, control: Control) -> None:
        self._client = client
        self._job = job
        self._emit = emit
        self._control = control
        keep = job.limits.output if control.feed is None else None
        self._streams = {name: Capture(keep) for name in STREAMS}
        self._verdict: Status | None = None
        self._word = secrets.token_hex(16).encode()
        self._preamble: bytes | None = b""  # stderr before the guest began; None from then on
        self._started = time.perf_counter()
        self._startup_ms = 0.0
        self._ended = False
        self._deaths: Path | None = None
        self._died_of_hunger = False
        self._listening = anyio.CancelScope()
        self.container: DockerContainer

    async def go(self) -> Result:
        with anyio.CancelScope(shield=True):  # half a creation would be a container that nobody knows of
            async with asking("the container could not be created", errors.StartFailed):
                self.container = await self._client.containers.create(self._job.body, name=self._job.name)
        try:
            with lone_errors():
                return await self._go()
        finally:
            if not self._ended:
                with anyio.CancelScope(shield=True):
                    await self._kill()

    async def _go(self) -> Result:
        if self._control.stopping:
            self._ended = True
            return self._result(None, False, self._control.reason)
        stream = self.container.attach(stdin=True, stdout=True, stderr=True)
        async with Wire.to(stream, "the container's streams") as wire, anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock)
            watchers.start_soon(self._watch_control)
            await self._start()
            watchers.start_soon(self._talk, wire)
            if len(self._job.stdin) > _PIPE:
                watchers.start_soon(self._watch_exit)
            await self._listen(wire, watchers.start_soon)
            code = await self._exit_code()
            watchers.cancel_scope.cancel()
        return self._result(code, await self._was_starved(code), self._verdict)

    async def _start(self) -> None:
        async with asking("the container could not be started", errors.StartFailed):
            await self.container.start()
        self._deaths = await self._count_of_deaths()
        try:
            await self._job.deliver(self.container)
        except errors.BelljarError:
            if self._verdict is None:
                raise
        if self._verdict:  # its end came before its beginning
            await self._kill()

    async def _count_of_deaths(self) -> Path | None:
        """The kernel's own count, for an engine that does not tell: Podman, with control groups version 1."""
        if not self._job.count_deaths:
            return None
        async with asking("the container's state", errors.StartFailed):
            pid = int((await self.container.show())["State"]["Pid"])
        with suppress(OSError, StopIteration):
            rows = [row.split(":", 2) for row in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
            group = next(path for _, kinds, path in rows if "memory" in kinds.split(","))
            return Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
        return None

    async def _talk(self, wire: Wire) -> None:
        await wire.send(self._word + b"\n" + self._job.stdin)
        if self._control.feed is not None:
            async for data in self._control.feed:
                await wire.send(data)
        wire.end()

    async def _watch_exit(self) -> None:
        """An engine that still holds input for a guest that has ended does not end the conversation by itself."""
        with suppress(Exception):
            await self.container.wait()
        await anyio.sleep(_LAST_WORDS)
        self._listening.cancel()

    async def _listen(self, wire: Wire, start_soon: Callable[..., object]) -> None:
        with self._listening:
            async for name, data in wire.parts():
                heard = await self._begin(data) if name == "stderr" and self._preamble is not None else data
                if heard:
                    await hear(self._streams[name], name, heard, self._emit)
                if self._streams[name].flooded and self._verdict is None:
                    self._verdict = Status.OUTPUT_LIMIT
                    start_soon(self._kill)
        self._died_of_hunger = self._deaths is not None and _oom_kills(self._deaths) > 0
        for each in STREAMS:
            await hear(self._streams[each], each, b"", self._emit)

    async def _begin(self, data: bytes) -> bytes:
        """Looks for the word that the launcher says back just before it becomes the guest."""
        assert self._preamble is not None
        said = self._preamble + data
        before, found, after = said.partition(self._word + b"\n")
        if not found:
            self._preamble = said[-_PREAMBLE:]
            return b""
        self._preamble = None
        self._startup_ms = (time.perf_counter() - self._started) * 1000
        await self._emit("started", self._job.id)
        return before + after

    async def _exit_code(self) -> int:
        async with asking("the container's end"):
            code = (await self.container.wait())["StatusCode"]
        self._ended = True
        if not isinstance(code, int):
            raise errors.ExecutionFailed(f"the engine told no exit code: {code!r}")
        if self._preamble is not None and self._verdict is None and code != _KILLED:
            said = self._preamble.decode("utf-8", "replace").strip()
            raise errors.StartFailed(f"the guest could not be started: {said[-500:] or f'exit code {code}'}")
        return code

    async def _was_starved(self, code: int) -> bool:
        if self._died_of_hunger:
            return True
        for pause in _LATE_WORD if code == _KILLED and self._verdict is None else (0.0,):
            await anyio.sleep(pause)
            async with asking("the container's state"):
                if (await self.container.show())["State"].get("OOMKilled") is True:
                    return True
        return False

    async def _watch_clock(self) -> None:
        await anyio.sleep(max(0.0, self._job.limits.timeout - (time.perf_counter() - self._started)))
        await self._end(Status.TIMEOUT)

    async def _watch_control(self) -> None:
        await self._end(await self._control.stopped())

    async def _end(self, verdict: Status) -> None:
        if self._verdict is None:
            self._verdict = verdict
        await self._kill()

    async def _kill(self) -> None:
        """Returns when the engine says that it is dead. What it says otherwise does not matter: it will be removed."""
        try:
            async with asking("kill", seconds=15):
                await self.container.kill(signal="KILL")
        except errors.BelljarError:
            return

    def _result(self, code: int | None, starved: bool, verdict: Status | None) -> Result:
        out, err = self._streams["stdout"], self._streams["stderr"]
        stderr, cut = err.text, bool(out.cut or err.cut)
        ended = verdict is not None
        went_on = starved and code != _KILLED and not ended
        return Result(
            status=verdict or _judge(code, starved, stderr, cut), exit_code=None if ended else code,
            stdout=out.text, stderr=stderr, truncated=cut,
            duration_ms=round((time.perf_counter() - self._started) * 1000, 3), startup_ms=round(self._startup_ms, 3),
            container_id=self._job.id,
            reasons=("a process that the guest had started was killed for memory; the guest itself went on",)
            if went_on else (),
        )  # fmt: skip


def _oom_kills(control: Path) -> int:
    with suppress(OSError):  # the engine was faster, and has removed the group
        found = re.search(r"^oom_kill (\d+)$", control.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _judge(code: int | None, starved: bool, stderr: str, cut: bool) -> Status:
    if code == 0:
        return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
    if starved and code == _KILLED:
        return Status.OOM_KILLED
    return Status.DISK_LIMIT if _NO_SPACE.search(stderr[-2000:]) else Status.ERROR
