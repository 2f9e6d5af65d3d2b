"""One program on the wasm backend, from request to verdict."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

from belljar.backends.base import Emit
from belljar.backends.control import Control
from belljar.backends.outcome import hear
from belljar.backends.wasm.worker_process import Worker
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status, Stream
from belljar.core.values import MIB
from belljar.host.capture import Capture

GRACE = 0.5  # seconds between the guest's own deadline and the end of its worker


class WasmRun:
    """One program, from request to verdict."""

    def __init__(self, worker: Worker, box: str, limits: Limits, emit: Emit) -> None:
        self._worker = worker
        self._id = box
        self._emit = emit
        self.limits = limits
        self._streams: dict[Stream, Capture] = {name: Capture(limits.output) for name in STREAMS}
        self._verdict: Status | None = None
        self._done: dict[str, Any] = {}
        self._started = time.perf_counter()

    async def go(self, request: dict[str, Any], control: Control, fds: Sequence[int]) -> Result:
        await self._emit("started", self._id)
        startup = (time.perf_counter() - self._started) * 1000
        control.on_stop(self._end)
        try:
            async for frame in self._worker.ask(request, self.limits.timeout + GRACE, fds):
                if "done" in frame:
                    self._done = frame
                elif "stream" in frame:
                    await self._hear(frame)
        except TimeoutError:
            self._end(Status.TIMEOUT)
        for name, capture in self._streams.items():
            await hear(capture, name, b"", self._emit)
        return self._result(startup)

    @property
    def turned_away(self) -> bool:
        return "unclean" in self._done

    async def _hear(self, frame: dict[str, Any]) -> None:
        for name in STREAMS:
            if frame["stream"] == name and isinstance(data := frame.get("data"), str):
                capture = self._streams[name]
                try:
                    written = base64.b64decode(data)
                except ValueError:  # not our worker's words
                    return
                await hear(capture, name, written, self._emit)
                if capture.flooded:
                    self._end(Status.OUTPUT_LIMIT)

    def _end(self, verdict: Status) -> None:
        if self._verdict is None and not self._done:
            self._verdict = verdict
            self._worker.kill()

    def _result(self, startup: float) -> Result:
        out, err = self._streams["stdout"], self._streams["stderr"]
        code, cut = self._done.get("exit_code"), bool(out.cut or err.cut)
        trap = str(self._done.get("trap", ""))
        if trap and judge_trap(trap) is Status.ERROR:
            err.feed(f"the interpreter was stopped: {trap.splitlines()[-1].strip()}\n".encode())
        memory, fuel, cpu = (self._done.get(name) for name in ("memory", "fuel", "cpu_ms"))
        return Result(
            status=self._judge(code, trap, err.text, cut), exit_code=code, stdout=out.text, stderr=err.text,
            truncated=cut, duration_ms=round((time.perf_counter() - self._started) * 1000, 3),
            startup_ms=round(startup, 3), memory_used_mb=round(memory / MIB, 3) if memory else None,
            cpu_ms=cpu, fuel_consumed=fuel, container_id=self._id,
        )  # fmt: skip

    def _judge(self, code: int | None, trap: str, stderr: str, cut: bool) -> Status:
        if self._verdict:
            return self._verdict
        if not self._done:
            return self._worker.ending()
        if (ended := judge_trap(trap)) and ended is not Status.ERROR:
            return ended
        if code == 0:
            return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
        if "MemoryError" in stderr[-2000:] or "memory minimum size" in trap:
            return Status.OOM_KILLED
        return Status.DISK_LIMIT if "No space left on device" in stderr[-2000:] else Status.ERROR


def judge_trap(trap: str) -> Status | None:
    """Why wasmtime stopped a guest; None if it did not."""
    if not trap:
        return None
    if "interrupt" in trap:
        return Status.TIMEOUT
    if "out of memory" in trap:
        return Status.OOM_KILLED
    return Status.FUEL_EXHAUSTED if "fuel" in trap else Status.ERROR
