"""A session's interpreter on the wasm backend: an instance that stays in the worker, one request for each turn."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from belljar.backends.agent_frames import read_frame
from belljar.backends.base import Emit
from belljar.backends.turn import AGENT_ENV, TurnRecord, TurnRequest, agent_source
from belljar.backends.wasm.run import GRACE, judge_trap
from belljar.backends.wasm.worker.messages import SessionTurn
from belljar.core import errors
from belljar.core.plan import Command
from belljar.core.result import Result, Status

if TYPE_CHECKING:
    from belljar.backends.wasm.box import WasmBox

_START_SECONDS = 10.0


class WasmInterpreter:
    """An `Interpreter` that the worker itself holds. The agent's frames come as they are, without a pipe."""

    def __init__(self, box: WasmBox, env: Mapping[str, str]) -> None:
        self._box = box
        self._command = Command(argv=("python3",), env=AGENT_ENV | dict(env), language="python")
        self.names: tuple[str, ...] = ()
        self._ended: Status | None = None
        self._closed = False
        self._turn = anyio.CancelScope()  # of the turn under way

    @property
    def ended(self) -> str:
        """Says how the interpreter ended; empty while it lives."""
        return str(self._ended) if self._ended else ""

    async def open(self, tasks: TaskGroup, emit: Emit) -> None:
        box = self._box
        async with box.one_at_a_time:
            box.holds_session = box.session_is_open = True
            if not box.restored:
                await self._start()
            box.restored = False

    async def _start(self) -> None:
        box = self._box
        box.folder.write_inputs(box.plan.files, self._command)
        request = box.request(self._command, box.plan.limits)
        request |= {"do": "open", "agent": agent_source().decode(), "fuel": None, "timeout": _START_SECONDS}
        fds = box.use_profile(request) if box.profile and not box.plan.workspace else ()
        try:
            answer = await box.worker.answer(request, _START_SECONDS + GRACE, fds)
        except TimeoutError:
            raise errors.StartFailed(f"the session did not start within {_START_SECONDS:g} s") from None
        if problem := answer.get("trap") or answer.get("exit_code"):
            raise errors.StartFailed(f"the session did not start: {problem}")

    async def turn(self, request: TurnRequest, emit: Emit) -> Result:
        record = TurnRecord(request, self._box.id, emit)
        with anyio.CancelScope() as self._turn:
            async with self._box.one_at_a_time:
                await self._take(request, record)
                self.names = record.names
                return record.result(self._ended or Status.KILLED)
        return record.result(self._ended or Status.KILLED)

    async def _take(self, request: TurnRequest, record: TurnRecord) -> None:
        """Has the worker run the turn, and notes if the interpreter cannot go on after it."""
        timeout, limits, worker = request.limits.timeout, self._box.plan.limits, self._box.worker
        asked: SessionTurn = {"do": "turn", "timeout": timeout, "memory": limits.memory, "fuel": limits.fuel}
        done: dict[str, Any] = {}
        try:
            async for frame in worker.ask(asked, timeout + GRACE, payload=request.message()):
                if type(frame.get("fuel")) is int:
                    record.fuel = frame["fuel"]
                if "done" in frame:
                    done = frame
                else:
                    await self._hear(frame, record)
        except TimeoutError:
            self.stop(Status.TIMEOUT)
        except OverflowError:
            self.stop(Status.OUTPUT_LIMIT)
        if not done:
            self._ended = self._ended or worker.ending()
        elif done.get("ended") or done.get("exit_code") or not record.verdict:  # the agent itself is gone
            self._ended = self._ended or judge_trap(str(done.get("trap", ""))) or Status.ERROR
            record.verdict = None

    async def _hear(self, frame: Mapping[str, Any], record: TurnRecord) -> None:
        payload, data = frame.get("payload"), frame.get("data")
        if isinstance(payload, bytes):
            record.spend(len(payload), 1)
            await self._hear_agent(payload, record)
        elif isinstance(data, str):
            record.spend(len(data), 1)
            with suppress(ValueError):  # not what our worker writes
                await record.write(frame.get("stream"), base64.b64decode(data))
        elif type(size := frame.get("dropped")) is int:
            record.spend(max(size, 0), 1)
            record.drop()

    async def _hear_agent(self, payload: bytes, record: TurnRecord) -> None:
        try:
            said = await read_frame(payload)
            if said is not None:  # else the guest called the host by itself: noise, to be ignored
                await record.hear(said, len(payload))
        except OverflowError:
            record.drop()

    def interrupt(self) -> bool:
        """It cannot: an instance that is stopped in the middle does not go on."""
        return False

    def stop(self, reason: Status) -> None:
        if self._closed or self._ended:
            return
        self._ended = reason
        self._box.worker.kill()
        self._turn.cancel()

    async def close(self) -> None:
        """The instance stays in the worker until the next session, or the box's end."""
        self._closed = True
        self._turn.cancel()
        with anyio.CancelScope(shield=True):
            async with self._box.one_at_a_time:
                self._box.session_is_open = False
