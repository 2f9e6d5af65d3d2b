"""Gives one interpreter its turns, one after the other, and ends it when it is idle for too long or too old."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from belljar.backends.base import Emit, Interpreter
from belljar.backends.turn import TurnRequest
from belljar.control.callbacks import Cancel
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.result import EventKind, Result, Status

_COMPLETE_SECONDS = 2.0  # that names may take; on wasm a guest that takes longer has ended its session
_COMPLETE_CHARACTERS = 200
_LOOK_SECONDS = 0.05  # between two looks at a session whose turn takes longer than it may be idle


async def _unheard(kind: EventKind, text: str) -> None:
    """Takes the output of threads that go on between turns: nobody waits for it."""


class Conversation:
    """The turns of one interpreter."""

    def __init__(self, interpreter: Interpreter, box: str, *, idle: float, lifetime: float, turns: int) -> None:
        """`turns`: how many the session has had; a copy goes on counting, so that no turn's name is used twice."""
        self.turns: int = turns
        self.busy: bool = False  # a turn is under way
        self._interpreter = interpreter
        self._box = box
        self._idle = idle
        self._lifetime = lifetime
        self._one_at_a_time = anyio.Lock()
        self._closed = False
        self._scope = anyio.CancelScope()
        self._last_used = time.monotonic()

    @property
    def ended(self) -> str:
        """Says how the interpreter ended; empty while it lives."""
        return self._interpreter.ended

    async def open(self, tasks: TaskGroup, emit: Emit) -> None:
        """Starts the interpreter. The tasks are the session's; `emit` hears what happens between turns."""
        await self._interpreter.open(tasks, emit)
        self._last_used = time.monotonic()
        tasks.start_soon(self._watch)

    async def close(self) -> None:
        """Ends the interpreter, and returns when nothing of it is left."""
        self._closed = True
        self._scope.cancel()
        await self._interpreter.close()

    async def _watch(self) -> None:
        """Ends the interpreter when its time is over."""
        end = time.monotonic() + self._lifetime
        with self._scope:
            while not self.ended:
                now = time.monotonic()
                idle_left = _LOOK_SECONDS if self.busy else self._last_used + self._idle - now
                if (left := min(idle_left, end - now)) <= 0:
                    self._interpreter.stop(Status.TIMEOUT)
                    return
                await anyio.sleep(left)

    @asynccontextmanager
    async def between_turns(self) -> AsyncIterator[None]:
        """Holds the interpreter while no turn is under way."""
        async with self._one_at_a_time:
            self._require_life()
            yield
            self._last_used = time.monotonic()

    async def turn(self, code: str, limits: Limits, emit: Emit, cancel: Cancel) -> Result:
        """Waits for the turns before it, then runs the code.

        Raises:
            SessionEnded: the interpreter is gone.
            ExecutionFailed: the conversation was closed meanwhile, or broke.
        """
        asked = Control()
        cancel.attach(asked)
        with anyio.CancelScope() as waiting:  # whoever gives up here is no concern of those before
            asked.on_stop(lambda _: waiting.cancel())
            await self._one_at_a_time.acquire()
        if waiting.cancelled_caught:
            reason = "it was cancelled before its turn came"
            return Result(status=Status.ABORTED, container_id=self._box, warnings=(reason,))
        try:
            self._require_life()
            return await self._take_turn(code, limits, emit, asked)
        finally:
            self._one_at_a_time.release()

    async def complete(self, text: str, limits: Limits) -> tuple[str, ...]:
        """Returns the names that a half-typed one may become, as the guest says; it runs none of its code."""
        with anyio.CancelScope(shield=True):  # an interpreter that is left in the middle of something is lost
            async with self.between_turns():
                await self._interpreter.turn(TurnRequest(0, text, limits, complete=True), _unheard)
        return self._interpreter.names

    def interrupt(self) -> bool:
        """Asks the turn under way to end, and keeps the interpreter; False where that cannot be done."""
        return self.busy and self._interpreter.interrupt()

    async def _take_turn(self, code: str, limits: Limits, emit: Emit, asked: Control) -> Result:
        self.turns += 1
        self.busy = True
        number = self.turns
        # A cancellation that comes late would end the next turn: it must still be this one.
        asked.on_stop(lambda _: self._interpreter.stop(Status.ABORTED) if self.busy and self.turns == number else None)
        try:
            return await self._interpreter.turn(TurnRequest(number, code, limits), emit)
        except BaseException:  # a cancelled turn leaves the interpreter in the middle of something
            self._interpreter.stop(Status.ABORTED)
            raise
        finally:
            self.busy = False
            self._last_used = time.monotonic()

    def _require_life(self) -> None:
        if self._closed:
            raise errors.ExecutionFailed("the session was closed or rolled back meanwhile", fix="run it again")
        if self.ended:
            raise errors.SessionEnded(f"the session has ended: {self.ended}", fix="open a new one")


async def named_alike(conversation: Conversation, text: str, limits: Limits) -> tuple[str, ...]:
    """Returns the names that a half-typed one may become; for what is not a dotted name there are none."""
    if len(text) > _COMPLETE_CHARACTERS or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.?", text):
        return ()
    brief = limits.model_copy(update={"timeout": _COMPLETE_SECONDS})
    last = text.rpartition(".")[2]
    return tuple(name for name in await conversation.complete(text, brief) if name.startswith(last))
