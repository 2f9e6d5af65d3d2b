"""Tools for what goes on in a living sandbox: processes that are started, read, fed and stopped, and their ports.

A process's output is both streams in the order in which they came, as on a terminal. A model reads it from a number on
(`since`), and is told the number for the next call; what is long is cut in its middle, as everywhere.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Literal, cast

import anyio
from mcp.types import CallToolResult
from pydantic import Field

from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.model import Model
from belljar.core.process import BoxProcess, Chunk, PtySize
from belljar.core.result import Status, StreamName
from belljar.living.process import AsyncProcess
from belljar.protocol.records import Caller
from belljar.service.mcp import content as answer
from belljar.service.mcp.boxes import Boxes, UsedBox
from belljar.service.mcp.calls import (
    ENDING_SECONDS,
    Backend,
    Calls,
    CommandLine,
    Ctx,
    Folder,
    Net,
    Session,
    own_of_session,
)

_MOST_WAIT_SECONDS = 50.0  # many clients give a call up after 60
_FIRST_OUTPUT_SECONDS = 0.5  # that starting waits for a first word, or a failure
_BURST_SECONDS = 0.05  # that is waited, after something came, for what comes right behind it
_FEEDING_SECONDS = 10.0
_STOPPING_SECONDS = 30.0
_MOST_INPUT = 256 * 1024  # characters
_MOST_BOXES, _MOST_PROCESSES = 16, 32  # in one answer; processes of each kind for each sandbox
_LOOKED_AT_BYTES = 64 * 1024  # of the beginning and of the end of what an answer tells
_MOST_ROWS = 8  # of processes beside another answer
_MOST_COMMAND = 200  # characters of a command line
_TERMINAL = PtySize(columns=120, rows=40)
# What colours and moves a cursor, and no model reads: control sequences, operating system commands, and the rest.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*(?:[@-~]|\Z)|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*(?:[0-~]|\Z))")

ProcessName = Annotated[str, Field(description='the process that start_process answered, such as "p1"')]
MaybeBox = Annotated[
    str | None, Field(description="the session_id of its sandbox; may be left out if only one has such a process")
]
Seconds = Annotated[float, Field(ge=0, le=_MOST_WAIT_SECONDS, description="seconds to wait, at most 50")]
Signal = Literal["INT", "TERM", "HUP", "QUIT", "KILL", "USR1", "USR2", "STOP", "CONT"]


class ProcessState(Model):
    """A process that was started in a living sandbox."""

    session_id: str
    process: str = Field(description="its id, for the other tools")
    command: str
    running: bool
    since: int = Field(description="the number of its newest piece of output: read_output goes on from there")
    status: str | None = Field(None, description="how it ended: success, error, oom_killed, aborted, …")
    exit_code: int | None = None
    problem: str | None = Field(None, description="what went wrong")
    suggestion: str | None = Field(None, description="what can be done")


class ProcessOutput(ProcessState):
    """A process and what it has printed."""

    output: str = Field(description="both streams in the order in which they came")
    missed: int = Field(0, description="bytes in between that are not kept any more")


class BoxProcesses(Model):
    """What goes on in one living sandbox."""

    session_id: str
    backend: str
    paused: bool = Field(description="somebody has stopped it where it is")
    started: tuple[ProcessState, ...] = Field(description="by start_process, those that have ended too")
    running: tuple[BoxProcess, ...] = Field((), description="all processes, by the kernel's word")
    left_out: int = Field(0, description="processes that did not fit into the answer")


class ProcessList(Model):
    """What goes on in living sandboxes."""

    sandboxes: tuple[BoxProcesses, ...]
    left_out: int = Field(0, description="sandboxes that did not fit into the answer, or have just ended")


class PortState(Model):
    """Whether something listens on a port of a living sandbox."""

    session_id: str
    port: int
    listening: bool


class ProcessTools:
    """Each public method is a tool; its docstring is what models are told."""

    def __init__(self, calls: Calls, boxes: Boxes) -> None:
        self._calls = calls
        self._boxes = boxes

    async def start_process(
        self, ctx: Ctx, command: CommandLine, cwd: Folder = None,
        session_id: Annotated[
            str | None, Field(description='a session of kind "sandbox"; left out: a new one, whose id is in the answer')
        ] = None,
        terminal: Annotated[bool, Field(description="for programs that want a terminal, such as a shell")] = False,
        net: Net = None, backend: Backend = "auto",
    ) -> Annotated[CallToolResult, ProcessOutput]:  # fmt: skip
        """Start a program that goes on in a sandbox beside everything else: a server, a watcher, a long build, a shell.
        Answers at once with its process id; go on with read_output, write_input, wait_for_port and stop_process. For
        what ends soon, use run_command."""
        caller = await self._calls.caller(ctx, "sessions")
        if session_id is not None:
            if net or backend != "auto":
                raise own_of_session()
            return await self._started(ctx, session_id, caller, command, cwd, terminal)
        id = (await self._boxes.open(ctx, caller, "sandbox", net=net, backend=backend)).id
        try:
            return await self._started(ctx, id, caller, command, cwd, terminal)
        except BaseException:  # nobody has learned its name
            with anyio.move_on_after(ENDING_SECONDS, shield=True), suppress(errors.NotFound):
                await self._calls.sessions.close(id, caller)
            raise

    async def _started(
        self, ctx: Ctx, id: str, caller: Caller, command: str | list[str], cwd: str | None, terminal: bool
    ) -> CallToolResult:
        async with self._boxes.used(id, caller) as used:
            self._boxes.make_room(id, caller)
            process = await used.box.start(command, cwd=cwd, pty=_TERMINAL if terminal else None)
            async with self._calls.waiting(ctx, _FIRST_OUTPUT_SECONDS):
                await _news(process, 0)
            return _output(used, process, 0)

    async def read_output(
        self, ctx: Ctx, process: ProcessName, session_id: MaybeBox = None,
        since: Annotated[int, Field(ge=0, description="the number that the last answer told; 0: from its start")] = 0,
        wait: Seconds = 5,
        until_end: Annotated[bool, Field(description="wait for its end, not only for something new")] = False,
    ) -> Annotated[CallToolResult, ProcessOutput]:  # fmt: skip
        """Read what a process has printed since the last call, and whether it still runs. Waits for something new, and
        answers without it when the seconds are over. Output is kept: it can be read again from any number."""
        caller = await self._calls.caller(ctx, "sessions")
        async with self._boxes.process(process, session_id, caller) as (used, found):
            async with self._calls.waiting(ctx, wait):
                await (found.gone() if until_end else _news(found, since))
            return _output(used, found, since)

    async def write_input(
        self, ctx: Ctx, process: ProcessName, session_id: MaybeBox = None,
        text: Annotated[
            str, Field(max_length=_MOST_INPUT, description='typed as it is: end a line with "\\n"; "\\u0003" is Ctrl-C')
        ] = "",
        close: Annotated[bool, Field(description="end its input afterwards, as Ctrl-D does")] = False,
    ) -> Annotated[CallToolResult, ProcessState]:  # fmt: skip
        """Write to a process's stdin, or type into its terminal. read_output then tells what it answers."""
        caller = await self._calls.caller(ctx, "sessions")
        async with self._boxes.process(process, session_id, caller) as (used, found):
            since = found.log.last
            with anyio.move_on_after(_FEEDING_SECONDS) as clock:
                await _feed(found, text, close=close)
            if clock.cancelled_caught:
                raise errors.Busy(
                    f"process {found.id} does not read its input: a part of the text was not written", retry_after=5
                )
            return _of_state(_state(used, found).model_copy(update={"since": since}))

    async def list_processes(
        self, ctx: Ctx,
        session_id: Annotated[str | None, Field(description="of one sandbox; left out: of all that you have")] = None,
    ) -> Annotated[CallToolResult, ProcessList]:  # fmt: skip
        """List your sandboxes and what runs in them: the processes that were started, how they ended, and all others
        with their memory and processor time."""
        caller = await self._calls.caller(ctx, "sessions")
        own = [session_id] if session_id is not None else [id for id, _ in self._boxes.own(caller)]
        found = []
        for id in own[-_MOST_BOXES:]:
            try:
                async with self._boxes.used(id, caller) as used:
                    found.append(await _processes(used))
            except (errors.NotFound, errors.SessionEnded, errors.InvalidRequest):  # it has just ended
                if session_id is not None:
                    raise
        return _of_list(ProcessList(sandboxes=tuple(found), left_out=len(own) - len(found)))

    async def stop_process(
        self, ctx: Ctx, process: ProcessName, session_id: MaybeBox = None,
        signal: Annotated[
            Signal | None, Field(description="send only this signal, and return; left out: end it for sure")
        ] = None,
    ) -> Annotated[CallToolResult, ProcessState]:  # fmt: skip
        """End a process and everything that it started, or send it a signal ("INT" interrupts it, "HUP" reloads many
        servers). Its output can still be read."""
        caller = await self._calls.caller(ctx, "sessions")
        async with self._boxes.process(process, session_id, caller) as (used, found):
            if signal is not None:
                await found.signal(signal)
            else:
                found.stop()
                with anyio.move_on_after(_STOPPING_SECONDS):
                    await found.gone()
            return _of_state(_state(used, found))

    async def wait_for_port(
        self, ctx: Ctx, session_id: Session, port: Annotated[int, Field(ge=1, le=65535)], timeout: Seconds = 30
    ) -> Annotated[CallToolResult, PortState]:
        """Wait until a server in a sandbox listens on a TCP port. Ask it then with run_command: curl localhost:PORT."""
        caller = await self._calls.caller(ctx, "sessions")
        async with self._boxes.used(session_id, caller) as used:
            told = PortState(session_id=session_id, port=port, listening=False)
            async with self._calls.waiting(ctx, timeout):
                await used.box.wait_for_port(port, timeout=2 * _MOST_WAIT_SECONDS)
                told = told.model_copy(update={"listening": True})
            if told.listening:
                return answer.of_model(told, f"port {port} of sandbox {session_id} listens")
            rows = [_line(_state(used, one)) for one in used.box.started][-_MOST_ROWS:]
            return answer.of_model(
                told, "\n".join([f"nothing listens on port {port} after {timeout:g} seconds", *rows])
            )


async def _news(process: AsyncProcess, since: int) -> None:
    """Waits until there is output after a number, or the process has ended."""
    if process.log.last > since:
        return
    async with aclosing(cast(AsyncGenerator[Chunk, None], process.output(since))) as pieces:
        await anext(pieces, None)
    with anyio.move_on_after(_BURST_SECONDS):
        await process.gone()


async def _feed(process: AsyncProcess, text: str, *, close: bool) -> None:
    try:
        if text:
            await process.write(text)
        if close:
            await process.close_stdin()
    except BrokenPipeError:
        raise errors.InvalidRequest(
            f"process {process.id} takes no input: it has ended, or its input was closed",
            fix="read_output tells how it ended; start another with start_process",
        ) from None


# --- what a model reads of it ---


def _state(used: UsedBox, process: AsyncProcess) -> ProcessState:
    running = process.running
    result = None if running else process.result
    wanted = result is not None and result.status is Status.ABORTED  # somebody ended it: nothing went wrong
    error = answer.short_failure(result) if result and not wanted else None
    return ProcessState(
        session_id=used.id, process=process.id, command=_command(process.command), running=running,
        since=process.log.last, status=None if running else str(result.status) if result else "lost",
        exit_code=result.exit_code if result else None,
        problem=f"{error.error_type}: {error.message}" if error else _lost(process),
        suggestion=error.suggestion if error else None,
    )  # fmt: skip


def _lost(process: AsyncProcess) -> str | None:
    return None if process.error is None else answer.cut(process.error.message, 1000)


def _output(used: UsedBox, process: AsyncProcess, since: int) -> CallToolResult:
    state = _state(used, process)  # before the output: whoever reads on from its number misses nothing
    chunks = [chunk for chunk in process.kept(since) if chunk.seq <= state.since]
    missed = sum(chunk.missed for chunk in chunks)
    text = _text(chunks) if process.pty is None else _as_on_terminal(_text(chunks))
    told = ProcessOutput(**dict(state), output=neutralise(answer.cut(text)), missed=missed)
    shown = [told.output.rstrip("\n")] if told.output.strip() else ["(it printed nothing new)"]
    return answer.of_model(told, "\n".join([*shown, *_told(state)]))


def _text(chunks: list[Chunk]) -> str:
    """Both streams as text, without what would only colour it. A character may be cut in two by the end of a piece."""
    decoders: dict[StreamName, codecs.IncrementalDecoder] = {}
    parts = []
    for chunk in _ends(chunks):
        if chunk.missed:
            parts.append(f"\n[… {chunk.missed} bytes …]\n")
        decoder = decoders.setdefault(chunk.stream, codecs.getincrementaldecoder("utf-8")("replace"))
        parts.append(decoder.decode(chunk.data))
    parts += [decoder.decode(b"", True) for decoder in decoders.values()]
    return _ESCAPES.sub("", "".join(parts)).replace("\r\n", "\n")


def _ends(chunks: list[Chunk]) -> list[Chunk]:
    """The beginning and the end of long output: nobody waits until megabytes have been looked at for escapes."""
    head, tail, room = 0, len(chunks), _LOOKED_AT_BYTES
    while head < tail and room > 0:
        room -= len(chunks[head].data)
        head += 1
    room = _LOOKED_AT_BYTES
    while tail > head and room > 0:
        tail -= 1
        room -= len(chunks[tail].data)
    if tail == head:
        return chunks
    between = sum(len(chunk.data) + chunk.missed for chunk in chunks[head:tail])
    first = chunks[tail].model_copy(update={"missed": chunks[tail].missed + between})
    return [*chunks[:head], first, *chunks[tail + 1 :]]


def _as_on_terminal(text: str) -> str:
    """Without what a program wrote over: of a progress bar, how far it came."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _of_state(state: ProcessState) -> CallToolResult:
    return answer.of_model(state, "\n".join(_told(state)))


def _told(state: ProcessState) -> list[str]:
    """Last in an answer, so that no program can have the last word in it."""
    named = f'session_id="{state.session_id}", process="{state.process}"'
    if state.running:
        return [
            f"[process {state.process} of sandbox {state.session_id} runs; "
            f"read_output({named}, since={state.since}) reads on]"
        ]
    code = f", exit code {state.exit_code}" if state.exit_code is not None else ""
    words = [f"[process {state.process} of sandbox {state.session_id} has ended: {state.status}{code}]"]
    if state.problem:
        words += [state.problem, *([f"Suggestion: {state.suggestion}"] if state.suggestion else [])]
    return words


def _line(state: ProcessState) -> str:
    code = f", exit code {state.exit_code}" if state.exit_code is not None else ""
    how = "runs" if state.running else f"has ended: {state.status}{code}"
    return f"process {state.process} {how}: {state.command}"


async def _processes(used: UsedBox) -> BoxProcesses:
    """The newest of those that were started, and the first of those that run: no list grows without bounds."""
    started, running = used.box.started, () if used.box.paused else await used.box.processes()
    shown = [one.model_copy(update={"command": _command(one.command)}) for one in running[:_MOST_PROCESSES]]
    states = [
        _state(used, one).model_copy(update={"problem": None, "suggestion": None}) for one in started[-_MOST_PROCESSES:]
    ]
    return BoxProcesses(
        session_id=used.id, backend=used.box.lease.capabilities.backend, paused=used.box.paused, started=tuple(states),
        running=tuple(shown), left_out=len(running) - len(shown) + len(started) - len(states),
    )  # fmt: skip


def _command(line: str) -> str:
    """A command line as it can be shown: a guest writes its own."""
    return neutralise(answer.cut(line, _MOST_COMMAND)).replace("\n", " ")


def _of_list(told: ProcessList) -> CallToolResult:
    lines = [f"[{told.left_out} sandboxes were left out]"] if told.left_out else []
    for box in told.sandboxes:
        lines.append(f"sandbox {box.session_id} on {box.backend}{', paused' if box.paused else ''}")
        lines += [f"  {_line(state)}" for state in box.started]
        lines += [f"  {_figures(process)}  {process.command}" for process in box.running]
        lines += [f"  [{box.left_out} more were left out]"] if box.left_out else []
    return answer.of_model(told, "\n".join(lines) or 'you have no sandboxes: session_open(kind="sandbox") opens one')


def _figures(process: BoxProcess) -> str:
    memory = f", {process.memory // 1024} KiB" if process.memory is not None else ""
    cpu = f", {process.cpu_ms / 1000:.1f} s of processor" if process.cpu_ms is not None else ""
    return f"pid {process.pid}{memory}{cpu}"
