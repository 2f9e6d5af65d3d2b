"""What the tests of the store put into it, and how they wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio

from belljar.protocol.records import LogLine, RunRecord, new_id


def a_run(**fields: Any) -> RunRecord:
    return RunRecord(**{"id": new_id(), "caller": "ann", "instance": "one", "created": time.time()} | fields)


def a_line(id: str, number: int, message: str = "hello") -> LogLine:
    return LogLine(container_id=id, number=number, timestamp=time.time(), stream="stdout", message=message)


async def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The condition's first true value; it may be a coroutine function's."""
    with anyio.fail_after(seconds):
        while True:
            value = condition()
            value = await value if hasattr(value, "__await__") else value
            if value:
                return value
            await anyio.sleep(0.01)
