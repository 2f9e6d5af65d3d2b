"""A project's server in an open living sandbox: laid out, started, waited for, heard, and its port reached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from belljar.core import errors
from belljar.core.process import Chunk
from belljar.preview.backend import ApiBackend
from belljar.preview.connections import Idle
from belljar.preview.project import keep_in_step
from belljar.preview.proxy import Glance
from belljar.preview.watch import OutputWatch
from belljar.protocol.previews import PreviewFinding, PreviewStatus

if TYPE_CHECKING:
    from belljar.living.machine import LivingMachine
    from belljar.living.process import AsyncProcess
    from belljar.sandbox import AsyncSandbox

START_SECONDS = 120.0
_TOLD_LINES = 20
_NAME = "preview"  # of the process
_LAST_WORDS_SECONDS = 2.0
_AGAIN_SECONDS = 0.25

Told = Callable[[PreviewFinding], Awaitable[None]]


class PreviewServer:
    """A program in a living sandbox that listens on a port, and how it is.

    Attributes:
        port: at which it is expected.
        status: starting, running or error.
        reason: why it is in error.
        suggestion: what can be done about that.
        backend: who answers `/api` in its place.
        open: requests and WebSockets to it that are under way.
        idle: connections to it that wait for their next request.
        settled: is set when it is not starting any more.
        over: is set when it is in error.
        heard: is set when all that it wrote was read.
    """

    def __init__(
        self, box: AsyncSandbox, command: str | Sequence[str], port: int, *, copied: str | None = None,
        backend: ApiBackend | None = None, seconds: float = START_SECONDS, told: Told | None = None,
    ) -> None:  # fmt: skip
        """Nothing is started yet.

        Args:
            box: an open living sandbox.
            command: a line of shell, or a program with its arguments.
            port: at which it will listen.
            copied: a folder of the host whose files are copied to /workspace, and kept in step.
            backend: who answers `/api` in its place.
            seconds: that it may take until it listens.
            told: hears of what was found in its output.
        """
        self.port = port
        self.status: PreviewStatus = "starting"
        self.reason: str = ""
        self.suggestion: str = ""
        self.backend = backend
        self.open: int = 0
        self.idle: Idle = Idle()
        self.settled: anyio.Event = anyio.Event()
        self.over: anyio.Event = anyio.Event()
        self._box = box
        self._command = command
        self._copied = copied
        self._seconds = seconds
        self._told = told
        self._watch = OutputWatch(port)
        self._process: AsyncProcess | None = None
        self._started = anyio.Event()
        self.heard: anyio.Event = anyio.Event()

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        return tuple(self._watch.lines)[-_TOLD_LINES:]

    @property
    def findings(self) -> tuple[PreviewFinding, ...]:
        """What went wrong, as its output told."""
        return tuple(self._watch.findings)

    def glance(self) -> Glance:
        """Tells how it is."""
        return Glance(self.status, self.reason, self.suggestion, self.lines)

    async def output(self) -> AsyncIterator[Chunk]:
        """Gives what it writes, from its beginning to its end."""
        await self._started.wait()
        if self._process is not None:
            async for chunk in self._process.output():
                yield chunk

    async def dial(self) -> ByteStream:
        """Connects to its port."""
        return await self._box.dial(self.port)

    async def begin(self) -> None:
        """Lays out the project and starts the command. What comes of it is told by `status`.

        Raises:
            BelljarError: the project could not be copied.
        """
        if self._copied is not None:
            await self._copy(self._copied)
        machine = self._box._alive()
        machine.tasks.start_soon(self._live, machine)

    async def stop(self) -> None:
        """Ends the command: SIGTERM, and SIGKILL after its grace."""
        self.fail("it was stopped")
        with suppress(errors.BelljarError):
            await self._box.process(_NAME).kill()

    async def _copy(self, folder: str) -> None:
        try:
            await self._box.files.upload(folder)
        except OSError as error:
            raise errors.ExecutionFailed(
                f"the project could not be copied: {error.strerror or error}",
                fix="grant it more memory and disk, or grant the folder itself (live)",
            ) from None
        self._box._alive().tasks.start_soon(keep_in_step, folder, self._box.files)

    async def _live(self, machine: LivingMachine) -> None:
        """From its start to its end. Never raises."""
        try:
            process = await self._box.start(self._command, env={"PORT": str(self.port)}, id=_NAME)
        except errors.BelljarError as error:
            self.fail(error.message, error.fix)
            self._started.set()
            return
        self._process = process
        self._started.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear, process)
            tasks.start_soon(self._await_port, machine)
            await self._await_end(process)
            with anyio.move_on_after(_LAST_WORDS_SECONDS):
                await self.heard.wait()
            tasks.cancel_scope.cancel()
        await self._note(self._watch.end())
        await self.idle.close()
        self._explain_end(process)

    async def _hear(self, process: AsyncProcess) -> None:
        async for chunk in process.output():
            await self._note(self._watch.hear(chunk.stream, chunk.text))
        self.heard.set()

    async def _note(self, found: Sequence[PreviewFinding]) -> None:
        for one in found if self._told else ():
            assert self._told is not None
            with suppress(errors.BelljarError, OSError):
                await self._told(one)

    async def _await_port(self, machine: LivingMachine) -> None:
        with anyio.move_on_after(self._seconds):
            while self.status == "starting":
                try:
                    if await machine.box.listens(self.port):
                        self.status = "running"
                        self.settled.set()
                        return
                except errors.BelljarError:  # it is paused, or ends: then its end is told
                    pass
                await anyio.sleep(_AGAIN_SECONDS / 5)
        if self.status == "starting":
            self.fail(f"nothing listens on port {self.port} after {self._seconds:g} seconds")

    async def _await_end(self, process: AsyncProcess) -> None:
        """Waits for the end of the command, or of our patience with it."""
        async with anyio.create_task_group() as tasks:

            async def until_over() -> None:
                await self.over.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_over)
            with suppress(errors.BelljarError):
                await process.wait()
            tasks.cancel_scope.cancel()
        if process.running:
            with suppress(errors.BelljarError):
                await process.kill()

    def _explain_end(self, process: AsyncProcess) -> None:
        if self.status == "error":
            self.suggestion = self.suggestion or self._last_advice()
            return
        result, listened = process.result, self.status == "running"
        how = "" if result is None or result.exit_code is None else f" with exit code {result.exit_code}"
        if result is not None and result.status not in ("success", "error"):
            how = f": {result.status}"
        when = "" if listened else f" before anything listened on port {self.port}"
        advice = result.error.suggestion if result is not None and result.error else ""
        self.fail(f"the command ended{how}{when}", self._last_advice() or advice)

    def _last_advice(self) -> str:
        found = self.findings
        return found[-1].suggestion if found else ""

    def fail(self, reason: str, suggestion: str = "") -> None:
        """Says that it has ended, and why; what was said first counts."""
        if self.status != "error":
            self.status, self.reason, self.suggestion = "error", reason, suggestion
        self.settled.set()
        self.over.set()
