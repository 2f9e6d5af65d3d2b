"""Runs the async core for blocking code: in one thread with an event loop, which is started on first use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal

from belljar.core import errors
from belljar.host.lifetime import Openable
from belljar.host.loops import asking_thread

T = TypeVar("T")
OpenableT = TypeVar("OpenableT", bound=Openable)
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


_loop = _LoopThread()


def _refuse_callbacks() -> None:
    if threading.current_thread() is _loop.thread:
        raise errors.InvalidRequest(
            "the blocking API was called from a callback, whose return it would wait for",
            fix="let the callback be async and await belljar.arun",
        )


def call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Runs an async function to its end. Ctrl-C cancels it, and waits for its cleanup before it is raised."""
    _refuse_callbacks()
    done = threading.Event()

    async def tracked() -> T:
        try:
            return await function(*args)
        finally:
            done.set()

    with _asking():
        future: Future[T] = _loop.portal().start_task_soon(tracked)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            done.wait(_CLEANUP_SECONDS)
        raise


def enter(context: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
    """Returns an async context manager as a blocking one."""
    _refuse_callbacks()
    return _Entered(_loop.portal().wrap_async_context_manager(context))


class _Entered(AbstractContextManager[T]):
    """A context of the loop, entered on behalf of the thread that enters it."""

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context = context

    def __enter__(self) -> T:
        with _asking():
            return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)


@contextmanager
def _asking() -> Iterator[None]:
    """What is started in the loop meanwhile knows for which thread it is done."""
    token = asking_thread.set(threading.get_ident())
    try:
        yield
    finally:
        asking_thread.reset(token)


@contextmanager
def reading(context: AbstractAsyncContextManager[AsyncIterator[bytes]]) -> Iterator[Iterator[bytes]]:
    """Opens what gives pieces of bytes, and gives them to blocking code."""

    async def following() -> bytes:
        return await anext(pieces, b"")

    with enter(context) as pieces:
        yield iter(lambda: call(following), b"")


def iterating(items: AsyncIterator[T]) -> Iterator[T]:
    """Gives what an async iterator gives to blocking code."""
    nothing: Any = object()

    async def following() -> T:
        return await anext(items, nothing)

    while (item := call(following)) is not nothing:
        yield item


async def in_threads(items: Iterator[T]) -> AsyncIterator[T]:
    """Gives what an iterator gives to async code; each step may block, as it is done in a thread."""
    nothing: Any = object()
    while (item := await anyio.to_thread.run_sync(next, items, nothing)) is not nothing:
        yield item


class Blocking(Generic[OpenableT]):
    """The blocking twin of an `Openable`: `with x`, or a classmethod `open` and `x.close()`."""

    def __init__(self, core: OpenableT) -> None:
        self._core = core
        self._context: AbstractContextManager[Any] | None = None
        self._entered = False

    @classmethod
    def _of(cls, core: OpenableT) -> Self:
        """Returns the twin of an object that exists already."""
        twin = cls.__new__(cls)
        Blocking.__init__(twin, core)
        return twin

    def _open(self) -> Self:
        if self._context is None:
            context = enter(self._core)
            context.__enter__()
            self._context = context
        return self

    def close(self) -> None:
        """Ends it, and returns when nothing of it is left. Closing twice does no harm."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        if self._entered:
            raise errors.InvalidRequest(f"this {self._core._kind} is already open", fix="make a second one")
        self._open()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context, self._context, self._entered = self._context, None, False
        if context is not None:
            context.__exit__(kind, error, trace)
