"""The one door from blocking code into the async core: a thread with an event loop, made on first use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")
_CLEANUP_SECONDS = 10.0


class _Door:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._context: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None

    def portal(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None or self._pid != os.getpid():  # a forked child has no loop thread
                self._context = start_blocking_portal("asyncio")
                self._portal = self._context.__enter__()
                self._pid = os.getpid()
                atexit.register(self.close)
            return self._portal

    def close(self) -> None:
        with self._lock:
            context, self._context, self._portal = self._context, None, None
            if context and self._pid == os.getpid():
                context.__exit__(SystemExit, SystemExit(), None)  # cancels what is still running


_door = _Door()


def call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Runs an async function to its end. Ctrl-C cancels it, and waits for its cleanup before it is raised."""
    done = threading.Event()

    async def tracked() -> T:
        try:
            return await function(*args)
        finally:
            done.set()

    future: Future[T] = _door.portal().start_task_soon(tracked)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            done.wait(_CLEANUP_SECONDS)
        raise


def enter(context: Any) -> AbstractContextManager[Any]:
    """An async context manager as a blocking one."""
    return _door.portal().wrap_async_context_manager(context)


class Twinned(Generic[T]):
    """An async context manager that `with` opens too: what is entered then is its blocking twin."""

    _blocking: AbstractContextManager[Any]

    def twin(self) -> T:
        raise AssertionError("every twinned class has its own")

    def __enter__(self) -> T:
        self._blocking = enter(self)
        self._blocking.__enter__()
        return self.twin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocking.__exit__(kind, error, trace)
