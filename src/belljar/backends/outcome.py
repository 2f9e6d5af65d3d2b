"""What every run has, on whichever backend: its streams, its clock, what was denied, its verdict, its `Result`."""

from __future__ import annotations

from belljar.backends.base import Emit
from belljar.core.result import Stream
from belljar.host.capture import Capture


async def hear(capture: Capture, name: Stream, data: bytes, emit: Emit) -> None:
    """Takes what a guest wrote to a stream and tells it; past the limit that is told, once. Empty data: its end."""
    warned = capture.cut
    if text := capture.feed(data):
        await emit(name, text)
    if capture.cut and not warned:
        await emit("limit", f"output: {name} passed {capture.limit} bytes; from here on only its end is kept")
