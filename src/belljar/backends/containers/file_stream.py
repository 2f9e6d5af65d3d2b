"""The content of one file as the program inside (`guest/shell/files/read.sh`) tells it: its size, then its bytes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable

from belljar.core import errors

_MAX_HEAD_BYTES = 64
More = Callable[[], Awaitable[bytes]]  # what comes next; empty at the end


async def opened(more: More, path: str) -> AsyncIterator[bytes]:
    """Hears how the program begins; returns the pieces that follow, as many bytes as it promised.

    Raises:
        OSError: the error that the program names instead.
        ExecutionFailed: it makes no sense.
    """
    said = b""
    while b"\n" not in said and len(said) < _MAX_HEAD_BYTES and (piece := await more()):
        said += piece
    head, _, begun = said.partition(b"\n")
    if not head.removeprefix(b"-").isdigit():
        raise errors.ExecutionFailed("the file could not be opened: the sandbox says nothing of it")
    if (size := int(head)) < 0:
        raise OSError(-size, os.strerror(-size), path)
    return _pieces(more, begun, size)


async def _pieces(more: More, piece: bytes, left: int) -> AsyncIterator[bytes]:
    """Counts, and waits for no end: gVisor's engine at times forgets to hang up after its program has ended.

    Raises:
        ExecutionFailed: fewer bytes came than were promised: a part of a file must not pass for all of it.
    """
    while left > 0:
        if piece:
            yield piece[:left]
            left -= len(piece)
        if left > 0 and not (piece := await more()):
            raise errors.ExecutionFailed("the file became shorter while it was read, or the engine hung up")
