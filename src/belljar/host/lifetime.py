"""Objects that are opened and closed: by a block (`async with x`), or by `await x` and `await x.close()`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

import anyio
import anyio.lowlevel

from belljar.core import errors

_tasks: set[Any] = set()  # an event loop holds its tasks only weakly


class Openable(ABC):
    """Something with a lifetime. A subclass says in `_living` what is held while it is open."""

    _kind: ClassVar[str]
    _block: AbstractAsyncContextManager[None] | None = None
    _lifetime_task: LifetimeTask | None = None
    _entered = False

    @abstractmethod
    def _living(self) -> AbstractAsyncContextManager[None]:
        """Returns a context in which this object is open; a new one for each time."""

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._open_outside_a_block().__await__()

    async def _open_outside_a_block(self) -> Self:
        self._require_closed()
        self._lifetime_task = task = LifetimeTask(self._living())
        try:
            await task.open()
        except BaseException:
            self._lifetime_task = None
            raise
        return self

    async def close(self) -> None:
        """Ends it, and returns when nothing of it is left. Closing twice does no harm."""
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        if self._lifetime_task is None or self._entered:
            self._require_closed()
            self._block = block = self._living()
            try:
                await block.__aenter__()
            except BaseException:
                self._block = None
                raise
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, block = self._lifetime_task, self._block
        self._lifetime_task, self._block, self._entered = None, None, False
        if task is not None:
            await task.close()
        elif block is not None:
            await block.__aexit__(kind, error, trace)

    def _require_closed(self) -> None:
        if self._block is not None or self._lifetime_task is not None:
            raise errors.InvalidRequest(f"this {self._kind} is already open", fix="make a second one")


class LifetimeTask:
    """Holds a context open in a task of its own: what was entered in a task has to be left in the same one, and
    `close` may be called in any."""

    def __init__(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._context = context
        self._opened = anyio.Event()
        self._closing = anyio.Event()
        self._over = anyio.Event()
        self._scope = anyio.CancelScope()
        self._error: Exception | None = None

    async def open(self) -> None:
        """Enters the context. Who is cancelled meanwhile leaves nothing behind."""
        _start_soon(self._hold)
        try:
            await self._opened.wait()
        except BaseException:
            self._scope.cancel()
            await self._wait()
            raise
        self._raise()

    def end(self) -> None:
        """Has the context left soon; who waits for that calls `close`."""
        self._closing.set()

    async def close(self) -> None:
        """Leaves the context, and raises what went wrong in it since."""
        self._closing.set()
        await self._wait()
        self._raise()

    async def _hold(self) -> None:
        try:
            with self._scope:
                async with self._context:
                    self._opened.set()
                    await self._closing.wait()
        except Exception as error:
            self._error = error
        finally:
            self._over.set()
            self._opened.set()

    async def _wait(self) -> None:
        with anyio.CancelScope(shield=True):  # every cleanup has a deadline of its own
            await self._over.wait()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _start_soon(function: Callable[[], Awaitable[None]]) -> None:
    """Starts a task without a parent. The event loop cancels it at its end, and so its context is left then."""
    loop: Any = anyio.lowlevel.current_token().native_token
    if hasattr(loop, "create_task"):
        task = loop.create_task(function())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
    else:
        import_module("trio").lowlevel.spawn_system_task(function)
