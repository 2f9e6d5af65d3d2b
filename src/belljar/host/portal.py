"""Runs async code for blocking callers: in one thread with an event loop, made on first use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from belljar.core import errors

T = TypeVar("T")
_CLEANUP_SECONDS = 10.0


class _LoopThread:
    """The thread, and the portal through which other threads start tasks in its loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        self.thread: threading.Thread | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        """A forked child has no loop thread; waiting for its parent's, even to close it, would never end."""
        self._lock = threading.Lock()
        self._portal = self.thread = None

    def portal(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                opened: Future[BlockingPortal] = Future()
                self.thread = threading.Thread(target=_run_loop, args=(opened,), daemon=True, name="belljar")
                self.thread.start()
                self._portal = opened.result()
            return self._portal

    def close(self) -> None:
        with self._lock:
            portal, self._portal = self._portal, None
            if portal and self.thread:
                portal.call(portal.stop, True)  # cancels what is still running
                self.thread.join(_CLEANUP_SECONDS)


def _run_loop(opened: Future[BlockingPortal]) -> None:
    async def serve() -> None:
        async with BlockingPortal() as portal:
            opened.set_result(portal)
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve)
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        raise


_loop_thread = _LoopThread()


def call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Runs an async function to its end. Ctrl-C cancels it, and waits for its cleanup before it is raised."""
    if threading.current_thread() is _loop_thread.thread:
        raise errors.InvalidRequest(
            "the blocking API was called from a callback, whose return it would wait for",
            fix="let the callback be async and await belljar.arun",
        )
    done = threading.Event()

    async def tracked() -> T:
        try:
            return await function(*args)
        finally:
            done.set()

    future: Future[T] = _loop_thread.portal().start_task_soon(tracked)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            done.wait(_CLEANUP_SECONDS)
        raise


def enter(context: Any) -> AbstractContextManager[Any]:
    """An async context manager as a blocking one."""
    return _loop_thread.portal().wrap_async_context_manager(context)


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
