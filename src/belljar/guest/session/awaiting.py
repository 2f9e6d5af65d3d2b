"""Part of the session's agent: the event loop of turns that `await`. It stays, so that tasks go on in later turns."""

import asyncio
import inspect
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType
    from typing import Any

_loops: "list[asyncio.AbstractEventLoop]" = []


def run(codes: "Sequence[CodeType]", scope: "dict[str, Any]") -> "Any":
    """Runs a turn in the loop, and returns its last value; one that is interrupted is cancelled, and the loop stays."""
    if not _loops or _loops[0].is_closed():
        _loops[:] = [_new_loop()]
    loop = _loops[0]
    asyncio.set_event_loop(loop)
    task = loop.create_task(_run(codes, scope))
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        raise


async def _run(codes: "Sequence[CodeType]", scope: "dict[str, Any]") -> "Any":
    value = None
    for code in codes:
        value = eval(code, scope)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _new_loop() -> asyncio.AbstractEventLoop:
    return SleepingLoop() if sys.platform == "wasi" else asyncio.new_event_loop()


class Nothing:
    """Waits for the clock only: on wasm there is nothing else to wait for."""

    def select(self, timeout: "float | None") -> "list[Any]":
        if timeout is None:
            raise RuntimeError("nothing is left that could end this wait")
        time.sleep(timeout)
        return []

    def close(self) -> None:
        """Has nothing to close."""


class SleepingLoop(asyncio.base_events.BaseEventLoop):
    """An event loop without sockets, which asyncio's own cannot do without."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = Nothing()

    def _process_events(self, events: "list[Any]") -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody can wake it: there are no threads."""
