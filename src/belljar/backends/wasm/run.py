"""One program on the wasm backend, from its request to its result."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from belljar.backends.base import Emit
from belljar.backends.outcome import Ending, Outcome
from belljar.backends.wasm.worker.messages import Request
from belljar.backends.wasm.worker_process import WorkerProcess
from belljar.control.control import Control
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status

GRACE = 0.5  # seconds between the guest's own deadline and the end of its worker


class WasmRun:
    """Asks a worker to run one program, and hears what it prints."""

    def __init__(self, worker: WorkerProcess, box: str, limits: Limits, emit: Emit) -> None:
        self._worker = worker
        self.limits = limits
        self._outcome = Outcome(box, limits, emit)
        self._done: dict[str, Any] = {}  # the worker's last answer
        self._fuel: int | None = None  # that it had used when its time was up, if it could not be interrupted at once

    async def go(self, request: Request, control: Control, fds: Sequence[int]) -> Result:
        """Runs the program to its end, or until it is ended; then the worker is gone too."""
        await self._outcome.begin()
        control.on_stop(self._end)
        try:
            async for frame in self._worker.ask(request, self.limits.timeout + GRACE, fds):
                if "done" in frame:
                    self._done = frame
                elif "stream" in frame:
                    await self._hear(frame)
                elif type(fuel := frame.get("fuel")) is int:
                    self._fuel = fuel
        except TimeoutError:
            self._end(Status.TIMEOUT)
        await self._outcome.close_streams()
        return self._result()

    @property
    def turned_away(self) -> bool:
        """Whether the worker did not begin, because the guest before left what it could not remove."""
        return "unclean" in self._done

    async def _hear(self, frame: dict[str, Any]) -> None:
        for name in STREAMS:
            if frame["stream"] == name and isinstance(data := frame.get("data"), str):
                try:
                    written = base64.b64decode(data)
                except ValueError:  # not our worker's words
                    return
                if await self._outcome.take(name, written):
                    self._end(Status.OUTPUT_LIMIT)

    def _end(self, verdict: Status) -> None:
        if not self._done and self._outcome.end(verdict):
            self._worker.kill()

    def _result(self) -> Result:
        trap = str(self._done.get("trap", ""))
        if trap and judge_trap(trap) is Status.ERROR:
            self._outcome.complain(f"the interpreter was stopped: {trap.splitlines()[-1].strip()}")
        code, cpu = self._done.get("exit_code"), self._done.get("cpu_ms")
        fuel = self._done.get("fuel", self._fuel)
        status = None if self._outcome.verdict else self._status(code, trap)
        peak = self._done.get("memory") or None
        return self._outcome.result(Ending(code, status=status, memory_peak=peak, cpu_ms=cpu, fuel=fuel))

    def _status(self, code: int | None, trap: str) -> Status | None:
        """What the worker's end or wasmtime's words say; None: the exit code and the output have to."""
        if not self._done:
            return self._worker.ending()
        if (ended := judge_trap(trap)) and ended is not Status.ERROR:
            return ended
        out_of_memory = "MemoryError" in self._outcome.stderr[-2000:] or "memory minimum size" in trap
        return Status.OOM_KILLED if code != 0 and out_of_memory else None


def judge_trap(trap: str) -> Status | None:
    """Why wasmtime stopped a guest; None if it did not."""
    if not trap:
        return None
    if "interrupt" in trap:
        return Status.TIMEOUT
    if "out of memory" in trap:
        return Status.OOM_KILLED
    return Status.FUEL_EXHAUSTED if "fuel" in trap else Status.ERROR
