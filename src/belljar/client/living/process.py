"""A process of a living sandbox on a server: an `AsyncProcess` over HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from belljar.client.connections import Unanswered
from belljar.client.runs import parse
from belljar.client.transport import Transport
from belljar.core import errors
from belljar.core.process import Chunk, PtySize
from belljar.core.result import Result
from belljar.core.spelling import heard, respelled
from belljar.core.values import MIB
from belljar.protocol import file_errors
from belljar.protocol.living import MAX_STDIN_BYTES, OutputPage, ProcessRecord, SignalSent, StdinWritten

_WAIT_SECONDS = 25.0  # that one request waits for something to happen
_STDIN_SECONDS = 30.0  # that a server waits until the program has read some
_KILL_SECONDS = 120.0  # that its grace may take
_LOSSES = 2  # in a row, each after all repetitions, that a reader of output bears
_PAGE_BYTES = MIB // 2


class AsyncRemoteProcess:
    """A process of a living sandbox on a server. It goes on however often we come and go.

    What was known when the server was last asked is in its attributes; `refresh` asks again.
    """

    def __init__(self, transport: Transport, sandbox: str, record: ProcessRecord) -> None:
        """Is made by `AsyncRemoteLivingSandbox`. `sandbox`: the path of its API."""
        self._transport = transport
        self._path = f"{sandbox}/processes/{record.id}"
        self._record = record

    def __repr__(self) -> str:
        return f"<process {self.id}, {self._record.state}>"

    @property
    def id(self) -> str:
        """Its name in the sandbox."""
        return self._record.id

    @property
    def pid(self) -> int:
        """Its number inside the sandbox; 0 if it never ran."""
        return self._record.pid

    @property
    def command(self) -> str:
        """Its command line."""
        return self._record.command

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values of yours."""
        return self._record.labels

    @property
    def pty(self) -> PtySize | None:
        """The size that its terminal began with; None: it has none."""
        return self._record.pty

    @property
    def started(self) -> float:
        """When it was started, in seconds since 1970."""
        return self._record.started

    @property
    def running(self) -> bool:
        """Whether it had not ended when the server was last asked."""
        return self._record.state == "running"

    @property
    def result(self) -> Result | None:
        """What came of it; None while it runs, as far as is known, and where it was lost."""
        return respelled(self._record.result, "python") if self._record.result else None

    @property
    def error(self) -> errors.BelljarError | None:
        """Why the server lost it; None while it runs, as far as is known, and where it has a result."""
        return heard(self._record.problem) if self._record.problem else None

    @property
    def record(self) -> ProcessRecord:
        """What the server said of it when it was last asked; `refresh` asks again."""
        return self._record

    async def refresh(self) -> ProcessRecord:
        """Asks the server how it is, and returns the answer."""
        self._record = parse(ProcessRecord, await self._transport.ask("GET", self._path))
        return self._record

    async def output(self, since: int = 0) -> AsyncIterator[Chunk]:
        """Gives its output as it comes, until its end: `async for chunk in process.output()`.

        A connection that breaks meanwhile is opened again: nothing is lost, and nothing comes twice.

        Args:
            since: the `seq` of the last piece that you have; what came after it and is kept is given at once.
        """
        losses = 0
        while True:
            try:
                page = await self._page(since, _WAIT_SECONDS)
            except Unanswered:  # though the question was repeated
                losses += 1
                if losses > _LOSSES:
                    raise
                continue
            losses = 0
            for chunk in page.chunks:
                since = chunk.seq
                yield chunk
            if page.over:
                return

    async def kept(self, since: int = 0) -> tuple[Chunk, ...]:
        """Returns the pieces of its output that are kept now, after number `since`."""
        found: list[Chunk] = []
        while True:
            page = await self._page(since, 0)
            found += page.chunks
            if page.over or not page.chunks or page.chunks[-1].seq >= page.last:
                return tuple(found)
            since = page.chunks[-1].seq

    async def write(self, data: bytes | str) -> None:
        """Writes to its standard input, or types into its terminal; waits while it does not read.

        Raises:
            BrokenPipeError: it has ended, or its input was closed.
        """
        left = memoryview(data.encode() if isinstance(data, str) else data)
        while left:
            piece = bytes(left[:MAX_STDIN_BYTES])
            with file_errors.raised(self.id):
                answer = await self._ask("POST", "/stdin", content=piece, read=_STDIN_SECONDS + self._transport.timeout)
            left = left[parse(StdinWritten, answer).written :]

    async def close_stdin(self) -> None:
        """Ends its standard input, as Ctrl-D does; what has a terminal can be written to afterwards."""
        await self._ask("DELETE", "/stdin", again=self.pty is None)

    async def signal(self, signal: str | int) -> bool:
        """Sends it a signal: "TERM", "INT", 9, …

        Returns:
            False if it has ended.
        """
        return parse(SignalSent, await self._ask("POST", "/signal", json={"signal": signal})).sent

    async def kill(self) -> Result:
        """Ends it and everything it started: SIGTERM, and SIGKILL after its grace. Returns its result."""
        answer = await self._ask("POST", "/kill", again=True, read=_KILL_SECONDS)
        self._record = parse(ProcessRecord, answer)
        return await self.wait()

    async def resize(self, columns: int, rows: int) -> None:
        """Gives its terminal another size."""
        await self._ask("POST", "/resize", again=True, json={"columns": columns, "rows": rows})

    async def wait(self, timeout: float | None = None) -> Result:
        """Waits until it ends, and returns its result, whose `stdout` and `stderr` are what is kept of its output.

        Raises:
            TimeoutError: it has not ended after so many seconds. It goes on.
            BackendError: the server lost it.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.running or (self._record.result is None and self._record.problem is None):
            left = _WAIT_SECONDS if end is None else max(0.0, min(_WAIT_SECONDS, end - time.monotonic()))
            answer = await self._ask(
                "GET", "/wait", params={"timeout": f"{left:.3f}"}, read=left + self._transport.timeout
            )
            self._record = parse(ProcessRecord, answer)
            if self.running and end is not None and time.monotonic() >= end:
                raise TimeoutError(f"process {self.id} has not ended after {timeout:g} seconds")
            if self._record.state == "lost" and self._record.problem is None:
                raise errors.ExecutionFailed(f"process {self.id} was lost", fix="start it again")
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    async def _page(self, since: int, seconds: float) -> OutputPage:
        asked = {"since": since, "limit": _PAGE_BYTES, "wait": f"{seconds:g}"}
        return parse(
            OutputPage, await self._ask("GET", "/output", params=asked, read=seconds + self._transport.timeout)
        )

    async def _ask(self, method: str, what: str, **options: Any) -> bytes:
        return await self._transport.ask(method, self._path + what, **options)
