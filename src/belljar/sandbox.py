"""The user's handle: `run`, `stream`, `Sandbox`. Async, each with a blocking twin over the same code."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import anyio

from belljar.backends.base import Backend
from belljar.backends.control import Control
from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.options import request
from belljar.core.request import RunRequest
from belljar.core.result import Entry, Event, File, Result
from belljar.core.values import guest_path
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease, Listener
from belljar.host import portal
from belljar.host.loops import in_this_loop, lone_errors

_engine: Engine | None = None
_engines: WeakKeyDictionary[Backend, Engine] = WeakKeyDictionary()


def default_engine() -> Engine:
    """The engine of the module-level functions, with the settings of this process."""
    global _engine
    if _engine is None:
        _engine = Engine()
    return _engine


def _engine_for(backend: str | Backend, engine: Engine | None) -> tuple[Engine, str]:
    """The engine to use and the name to ask it for; a backend object gets one engine for all its runs."""
    base = engine or default_engine()
    if isinstance(backend, str):
        return base, backend
    if not hasattr(backend, "probe"):
        raise errors.InvalidRequest(f"backend: {backend!r} is neither a name nor a backend", fix='write backend="auto"')
    if backend not in _engines:
        _engines[backend] = Engine(base.settings, extra=(backend,))
    return _engines[backend], backend.name


class Cancel:
    """A handle to stop a run from any thread or task: the run returns, `aborted`, with its partial output."""

    def __init__(self) -> None:
        self.cancelled = False
        self._hooks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        self.cancelled = True
        for hook in self._hooks:
            hook()

    def attach(self, control: Control) -> None:
        """Called in the run's event loop, which is where the control must be touched."""
        self._hooks.append(in_this_loop(control.stop))
        if self.cancelled:
            control.stop()


async def arun(
    code: str | None = None, *, backend: str | Backend = "auto", engine: Engine | None = None,
    on_event: Listener | None = None, on_stdout: Callable[[str], Any] | None = None,
    on_stderr: Callable[[str], Any] | None = None, cancel: Cancel | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Runs a snippet (or `command=[...]`) in a sandbox of its own and returns what happened."""
    return await _run(code, backend, engine, listening(on_event, on_stdout, on_stderr), cancel, options)


def run(
    code: str | None = None, *, backend: str | Backend = "auto", engine: Engine | None = None,
    on_event: Listener | None = None, on_stdout: Callable[[str], Any] | None = None,
    on_stderr: Callable[[str], Any] | None = None, cancel: Cancel | None = None, **options: Any,
) -> Result:  # fmt: skip
    """`arun` for blocking code; callbacks are called from another thread, one at a time."""
    listener = listening(on_event, on_stdout, on_stderr)
    return portal.call(_run, code, backend, engine, listener, cancel, options)


async def _run(
    code: str | None, backend: str | Backend, engine: Engine | None, listener: Listener | None,
    cancel: Cancel | None, options: dict[str, Any],
) -> Result:  # fmt: skip
    engine, name = _engine_for(backend, engine)
    control = Control()
    if cancel:
        cancel.attach(control)
    return await engine.run(request(code, backend=name, **options), listener=listener, control=control)


def listening(
    on_event: Listener | None, on_stdout: Callable[[str], Any] | None, on_stderr: Callable[[str], Any] | None
) -> Listener | None:
    """One listener from the three callbacks; each may be a plain function or an async one."""
    by_kind = {kind: call for kind, call in (("stdout", on_stdout), ("stderr", on_stderr)) if call}
    if not by_kind:
        return on_event

    async def hear(event: Event) -> None:
        for call, value in ((by_kind.get(event.kind), event.text), (on_event, event)):
            if call is not None and inspect.isawaitable(answer := call(value)):  # type: ignore[arg-type]
                await answer

    return hear


def offers(*, engine: Engine | None = None) -> tuple[Capabilities, ...]:
    """What each backend can do here, and why not: `belljar doctor` as data."""
    return portal.call((engine or default_engine()).backends)


def supported_languages(*, backend: str = "auto", engine: Engine | None = None) -> tuple[str, ...]:
    """The languages that this installation can run now."""

    async def ask() -> tuple[str, ...]:
        chosen = engine or default_engine()
        offers = [offer for offer in await chosen.backends() if offer.available and backend in ("auto", offer.backend)]
        spoken = [support for offer in offers for support in await chosen.languages_of(offer.backend)]
        return tuple(dict.fromkeys(support.name for support in spoken if support.available))

    return portal.call(ask)


class Stream:
    """A running command: an async iterator of its events. `result` is set when it has ended."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[Event](64)
        self._control = Control()
        self.result: Result | None = None

    def cancel(self) -> None:
        """Ends the guest and all it started; the iteration goes on to the end of what it had printed."""
        self._control.stop()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._receive.__aiter__()


def stream(
    code: str | None = None, *, backend: str | Backend = "auto", engine: Engine | None = None, **options: Any
) -> AbstractAsyncContextManager[Stream]:
    """`async with belljar.stream(code) as run: async for event in run: ...`; leaving early ends the guest."""
    engine, name = _engine_for(backend, engine)
    return streaming(partial(engine.run, request(code, backend=name, **options)))


@asynccontextmanager
async def streaming(run: Callable[..., Awaitable[Result]]) -> AsyncIterator[Stream]:
    """`run` takes a listener and a control, and is ended when the block is left."""
    handle = Stream()

    async def work() -> None:
        async with handle._send:
            handle.result = await run(listener=handle._send.send, control=handle._control)

    with lone_errors():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            with handle._receive:
                yield handle
            tasks.cancel_scope.cancel()


class Sandbox(portal.Twinned["SyncSandbox"]):
    """One sandbox for several commands: files stay, processes do not outlive their command.

    `async with Sandbox() as box: await box.run(...)`, or `with Sandbox() as box: box.run(...)`.
    """

    def __init__(
        self, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "", **options: Any
    ) -> None:
        self._engine, name = _engine_for(backend, engine)
        self._request = request(backend=name, **options)
        self._id = id  # under which it is recorded; empty: a new one
        self._stack = AsyncExitStack()
        self._lease: Lease | None = None

    @property
    def lease(self) -> Lease:
        if self._lease is None:
            raise errors.InvalidRequest("this sandbox is not open", fix="use it inside `async with` or `with`")
        return self._lease

    async def run(
        self, code: str, *, on_event: Listener | None = None, on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None, cancel: Cancel | None = None, id: str = "", **options: Any,
    ) -> Result:  # fmt: skip
        """Runs a snippet here; its files are those of the box."""
        return await self._run(self._asked(code=code, **options), listening(on_event, on_stdout, on_stderr), cancel, id)

    async def exec(
        self, command: Iterable[str], *, on_event: Listener | None = None,
        on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None, id: str = "", **options: Any,
    ) -> Result:  # fmt: skip
        """Runs a command here."""
        asked = self._asked(command=command, **options)
        return await self._run(asked, listening(on_event, on_stdout, on_stderr), cancel, id)

    async def _run(self, asked: RunRequest, listener: Listener | None, cancel: Cancel | None, id: str) -> Result:
        control = Control()
        if cancel:
            cancel.attach(control)
        return await self.lease.run(asked, listener=listener, control=control, id=id)

    async def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        if not isinstance(content, bytes | str):
            raise errors.InvalidRequest(f"content: must be bytes or text, not {type(content).__name__}")
        data = content.encode() if isinstance(content, str) else content
        name = _name(path)
        await self.lease.box.put([File(path=name, content=data, executable=executable)])

    async def read(self, path: str) -> bytes:
        collected = await self.lease.box.get([_exactly(_name(path))])
        if not collected.files:
            why = f": {collected.left_out[0]}" if collected.left_out else ""
            raise FileNotFoundError(f"{path} is not a file of this sandbox{why}")
        return collected.files[0].content

    async def list(self) -> tuple[Entry, ...]:
        return await self.lease.box.list()

    def _asked(self, **options: Any) -> RunRequest:
        mine = self._request
        env = {**mine.env, **options.pop("env", {})}
        limits = {**mine.limits.named(), **options.pop("limits", {})}
        options.setdefault("deterministic", mine.deterministic)
        return request(env=env, limits=limits, backend=mine.backend, **options)

    def twice(self, id: str = "") -> Sandbox:
        """Another one, asked for in the same words, on the backend that took this one."""
        backend = self.lease.capabilities.backend
        other = Sandbox(backend=backend, engine=self._engine, id=id)
        other._request = self._request.model_copy(update={"backend": backend})
        return other

    async def __aenter__(self) -> Self:
        if self._lease is not None:
            raise errors.InvalidRequest("this sandbox is already open", fix="make a second Sandbox")
        opening = self._engine.open(self._request, keep_files=True, id=self._id)
        self._lease = await self._stack.enter_async_context(opening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease = None
        await self._stack.__aexit__(kind, error, trace)

    def twin(self) -> SyncSandbox:
        return SyncSandbox(self)


def _name(path: str) -> str:
    try:
        return guest_path(path)
    except ValueError as error:
        raise errors.InvalidRequest(f"path: {error}") from None


def _exactly(path: str) -> str:
    """A pattern that matches this path and no other."""
    return "./" + "".join(f"[{c}]" if c in "*?[" else c for c in path)


class SyncSandbox:
    """The blocking twin of an open `Sandbox`."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def run(self, code: str, **options: Any) -> Result:
        return portal.call(lambda: self._box.run(code, **options))

    def exec(self, command: Iterable[str], **options: Any) -> Result:
        return portal.call(lambda: self._box.exec(command, **options))

    def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        portal.call(lambda: self._box.write(path, content, executable=executable))

    def read(self, path: str) -> bytes:
        return portal.call(lambda: self._box.read(path))

    def list(self) -> tuple[Entry, ...]:
        return portal.call(self._box.list)
