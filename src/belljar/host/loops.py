"""Small pieces of event-loop plumbing: errors out of task groups, and calls from other threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel

# The thread for which a blocking call does what is done; None: this is async code.
asking_thread: ContextVar[int | None] = ContextVar("asking_thread", default=None)
_ROUNDS = 4  # of the event loop, for everybody else, between two turns of those that give way
_giving_way: anyio.lowlevel.RunVar[anyio.Lock] = anyio.lowlevel.RunVar("giving_way")


async def give_way() -> None:
    """Waits while others have their turn in this event loop; whoever has much to do there calls it after each part.

    Of all that call it one goes on at a time, after a few rounds of the loop: so many floods at once take no more of
    the loop than one does. Where nobody else has anything to do, it takes some microseconds.
    """
    lock = _giving_way.get(None)
    if lock is None:
        lock = anyio.Lock()
        _giving_way.set(lock)
    async with lock:
        for _ in range(_ROUNDS):
            await anyio.lowlevel.checkpoint()


@contextmanager
def lone_errors() -> Iterator[None]:
    """Raises a task group's only exception as itself, not in a group: callers catch what was raised."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__


def in_this_loop(function: Callable[[], object]) -> Callable[[], None]:
    """Wraps a function so that any thread may call it: it then runs in the event loop that this was called in."""
    loop: Any = anyio.lowlevel.current_token().native_token
    thread = threading.get_ident()
    from_outside = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon  # asyncio's, or trio's

    def call() -> None:
        function() if threading.get_ident() == thread else from_outside(function)

    return call


async def accepted(listener: socket.socket, pause_seconds: float) -> socket.socket:
    """Waits for the next connection; while no descriptor is free, it looks again after the pause."""
    while True:
        await anyio.wait_readable(listener)
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionError):
            continue
        except OSError:  # no descriptor is free
            await anyio.sleep(pause_seconds)
