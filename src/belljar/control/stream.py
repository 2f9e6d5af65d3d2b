"""A run as an iterator of its events, async and blocking."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import anyio

from belljar.control.control import Control
from belljar.core.result import Event, Result
from belljar.host import portal
from belljar.host.loops import lone_errors

_EVENTS_AHEAD = 64  # events that may wait for the reader before the guest does


class AsyncStream:
    """A running command: an async iterator of its events.

    Attributes:
        result: the outcome, once the command has ended; None before.
    """

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[Event](_EVENTS_AHEAD)
        self._control = Control()
        self.result: Result | None = None

    def cancel(self) -> None:
        """Ends the guest and all it started; the iteration goes on to the end of what it had printed."""
        self._control.stop()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._receive.__aiter__()


class Stream:
    """The blocking twin of `AsyncStream`: a running command as an iterator of its events."""

    def __init__(self, core: AsyncStream) -> None:
        self._core = core

    @property
    def result(self) -> Result | None:
        """The outcome, once the command has ended; None before."""
        return self._core.result

    def cancel(self) -> None:
        """Ends the guest and all it started; the iteration goes on to the end of what it had printed."""

        async def stop() -> None:
            self._core.cancel()

        portal.call(stop)

    def __iter__(self) -> Iterator[Event]:
        events = aiter(self._core)

        async def following() -> Event | None:
            return await anext(events, None)

        while (event := portal.call(following)) is not None:
            yield event


@asynccontextmanager
async def streaming(run: Callable[..., Awaitable[Result]]) -> AsyncIterator[AsyncStream]:
    """Starts `run` with a listener and a control; leaving the block ends it."""
    handle = AsyncStream()

    async def work() -> None:
        async with handle._send:
            handle.result = await run(listener=handle._send.send, control=handle._control)

    with lone_errors():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            with handle._receive:
                yield handle
            tasks.cancel_scope.cancel()


@contextmanager
def blocking(opening: AbstractAsyncContextManager[AsyncStream]) -> Iterator[Stream]:
    """Opens a stream for blocking code."""
    with portal.enter(opening) as handle:
        yield Stream(handle)
