"""An interpreter behind the stdin and stdout of an agent (`session_agents`), on any box that can run a command.

Turns go in, frames and what turns print come out. Every frame comes from the guest and is parsed as hostile. What it
sends between turns is thrown away unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from belljar.backends.agent_frames import read_frame
from belljar.backends.base import Box, Emit
from belljar.backends.session_agents import agent_for, folder_of
from belljar.backends.turn import AGENT_FOLDER, TurnRecord, TurnRequest
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.plan import Command, Plan
from belljar.core.result import EventKind, Result, Status, StreamName
from belljar.core.values import MIB

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

_START_SECONDS = 20.0
_GRACE_SECONDS = 1.0  # that a turn has after its timeout to end by itself, before the interpreter is ended
_INTERRUPT_SECONDS = 3.0  # that a turn has to end after it was interrupted; a call into a library may take its time
_SETTLE_SECONDS = 1.0  # that the rest of stderr may take after a turn's end
_WORDS = 300  # of what an agent said that did not start
# Between turns a guest is heard only so that its prints do not block it: at most this much, then a pause.
_UNHEARD_CHARACTERS = MIB
_PAUSE_SECONDS = 0.1
_FRAMES_AT_ONCE = 100  # small ones, before others get their turn in the event loop


class PipeInterpreter:
    """An `Interpreter` whose agent is a command of the box: turns go into its stdin, frames come out of its stdout."""

    def __init__(
        self, box: Box, plan: Plan, env: Mapping[str, str], lifetime: float, language: str = "python"
    ) -> None:  # fmt: skip
        self._box = box
        self._agent = agent = agent_for(language)
        folder = folder_of(plan.inputs)
        self._command = Command(
            argv=tuple(word.replace("{}", folder) if word.startswith("{}") else word for word in agent.argv),
            env={**agent.env, **env}, language=language,
            files={f"{AGENT_FOLDER}/{name}": content for name, content in agent.files.items()},
            limits=plan.limits.model_copy(update={"timeout": lifetime}),
        )  # fmt: skip
        self._early = ""  # what the agent said on stderr before it was ready
        self._unheard = 0  # characters that came since the last pause, and nobody waited for
        self._turn: TurnRecord | None = None
        self._clock = anyio.CancelScope()  # of the turn under way
        self.names: tuple[str, ...] = ()
        self._turn_over = anyio.Event()
        self._ready = anyio.Event()
        self._outcome: Result | None = None  # of the agent's command
        self._failure: BaseException | None = None
        self._scope = anyio.CancelScope()
        self._gone = anyio.Event()
        self._feed: MemoryObjectSendStream[bytes]
        self._control: Control
        self._emit: Emit

    @property
    def ended(self) -> str:
        """Says how the interpreter ended; empty while it lives."""
        if self._failure:
            return str(self._failure)
        return f"{self._outcome.status}, exit code {self._outcome.exit_code}" if self._outcome else ""

    async def open(self, tasks: TaskGroup, emit: Emit) -> None:
        self._emit = emit
        self._feed, receive = anyio.create_memory_object_stream[bytes](8)
        self._control = Control(feed=receive)
        tasks.start_soon(self._live, receive)
        try:
            with anyio.fail_after(_START_SECONDS):
                if begin := self._agent.begin():
                    await self._feed.send(begin)
                await self._ready.wait()
            if self.ended:
                said = f" ({neutralise(self._early.strip())})" if self._early.strip() else ""
                raise self._failure or errors.StartFailed(f"the session did not start: {self.ended}{said}")
        except TimeoutError:
            await self.close()
            raise errors.StartFailed(f"the session did not start within {_START_SECONDS:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def turn(self, request: TurnRequest, emit: Emit) -> Result:
        record, self._turn_over = TurnRecord(request, self._box.id, emit), anyio.Event()
        self.names = ()
        if request.complete and not self._agent.completes:
            return record.result()
        self._turn = record
        try:
            await self._feed.send(self._agent.turn(request))
            grace = _GRACE_SECONDS if self._agent.own_clock else 0
            with anyio.move_on_after(request.limits.timeout + grace) as self._clock:
                await self._turn_over.wait()
            if self._clock.cancelled_caught and not self._agent.own_clock and not record.interrupted:
                await self._end_late(record)
            if not (self._turn_over.is_set() or record.verdict or request.complete):  # for names nobody ends a session
                self.stop(Status.ABORTED if record.interrupted else Status.TIMEOUT)
                await self._turn_over.wait()
        finally:
            self._turn = None
        self.names = record.names
        if record.verdict is None and self._failure:
            raise self._failure
        return record.result(self._outcome.status, self._outcome.exit_code) if self._outcome else record.result()

    async def _end_late(self, record: TurnRecord) -> None:
        """Interrupts a turn that is over its time, for an agent that does not do it by itself."""
        if record.verdict is not None:
            return
        await self._feed.send(self._agent.interrupt(record.number))
        with anyio.move_on_after(_INTERRUPT_SECONDS) as self._clock:
            await self._turn_over.wait()
        if record.verdict:
            record.verdict = record.verdict._replace(ok=False, timed_out=True)

    def interrupt(self) -> bool:
        turn = self._turn
        if turn is None or turn.interrupted or self.ended:
            return False
        try:
            self._feed.send_nowait(self._agent.interrupt(turn.number))
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        turn.interrupted = True
        self._clock.deadline = min(self._clock.deadline, anyio.current_time() + _INTERRUPT_SECONDS)
        return True

    def stop(self, reason: Status) -> None:
        self._control.stop(reason)

    async def close(self) -> None:
        self._feed.close()
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._gone.wait()

    async def _live(self, receive: MemoryObjectReceiveStream[bytes]) -> None:
        """Runs the agent for as long as the session lives; however it ends, nobody is left waiting."""
        try:
            with receive, self._scope:
                self._outcome = await self._box.run(self._command, self._hear, self._control)
        except errors.BelljarError as error:
            self._failure = error
        except Exception as error:  # whatever the guest's frames did to us, the user gets a sentence
            self._failure = errors.ExecutionFailed(f"the conversation with the session broke: {error!r}")
        finally:
            self._ready.set()
            self._turn_over.set()
            self._gone.set()

    async def _hear(self, kind: EventKind, text: str) -> None:
        """Takes an event of the agent's command."""
        if kind == "denied":  # to a turn, or to a thread that one left behind
            await (self._turn.deny(text) if self._turn else self._emit(kind, text))
        elif kind in ("stdout", "stderr") and (self._turn or not self._ready.is_set()):
            try:
                await self._read(kind, text)
            except OverflowError:
                self.stop(Status.OUTPUT_LIMIT)
        elif kind in ("stdout", "stderr"):
            await self._leave_unread(kind, text)

    async def _leave_unread(self, stream: StreamName, text: str) -> None:
        """Throws away what came between turns; a guest that says much has to wait."""
        self._agent.skip(stream, text)
        self._unheard += len(text)
        if self._unheard > _UNHEARD_CHARACTERS:
            self._unheard = 0
            await anyio.sleep(_PAUSE_SECONDS)

    async def _read(self, stream: StreamName, text: str) -> None:
        """Takes what came during a turn.

        Raises:
            OverflowError: it is more than a turn may say.
        """
        pieces = self._agent.feed(stream, text)
        if self._turn:
            self._turn.spend(len(text), len(pieces))
        for number, (piece, framed) in enumerate(pieces, 1):
            if framed:
                await self._take(piece)
            elif self._turn:
                await self._turn.write(stream, piece.encode("utf-8", "replace"))
            elif stream == "stderr":
                self._early = (self._early + piece)[-_WORDS:]
            if number % _FRAMES_AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()

    async def _take(self, line: str) -> None:
        try:
            frame = await read_frame(line)
        except OverflowError:
            frame = None
            if self._turn:
                self._turn.drop()
        if frame is None:
            return  # the guest wrote into the pipe itself: noise, to be ignored
        if frame.get("ready"):
            self._ready.set()
        elif self._turn:
            await self._turn.hear(frame, len(line))
            if self._turn and self._turn.verdict and (self._agent.own_clock or self._turn.settled):
                self._turn_over.set()
            elif self._turn and self._turn.verdict:
                self._clock.deadline = min(self._clock.deadline, anyio.current_time() + _SETTLE_SECONDS)
