"""What users call: `run`, `stream` and `Sandbox`, each with an async twin (`arun`, `astream`, `AsyncSandbox`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack
from weakref import WeakKeyDictionary

from belljar.backends.base import Backend
from belljar.control.callbacks import Cancel, Listener, OutputCallback, control_for, listening
from belljar.control.stream import AsyncStream, Stream, blocking, streaming
from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.capabilities import Capabilities
from belljar.core.options import CommandOptions, RunOptions, SandboxOptions, StrPath, TestRunOptions, request
from belljar.core.process import words
from belljar.core.request import Life, Limits, RunRequest
from belljar.core.result import Entry, File, Result
from belljar.core.values import guest_path
from belljar.engine.engine import Engine
from belljar.engine.lease import Lease
from belljar.host import portal
from belljar.host.source import with_code, with_named_files
from belljar.living.blocking import LivingPart
from belljar.living.part import AsyncLivingPart

if TYPE_CHECKING:
    from belljar.core.lasting import Lasting
    from belljar.core.test_results.model import TestReport
    from belljar.test_runs.runs import TestListener

_OF_THE_MACHINE = frozenset(Limits.model_fields) - {"timeout", "grace", "output"}  # limits of a living sandbox
_engine: Engine | None = None
_engines: WeakKeyDictionary[Backend, Engine] = WeakKeyDictionary()


def default_engine() -> Engine:
    """Returns the engine of the module-level functions, with the settings of this process."""
    global _engine
    if _engine is None:
        _engine = Engine()
    return _engine


def _engine_for(backend: str | Backend, engine: Engine | None) -> tuple[Engine, str]:
    """Returns the engine to use and the name to ask it for; a backend object gets one engine for all its runs."""
    base = engine or default_engine()
    if isinstance(backend, str):
        return base, backend
    if not hasattr(backend, "probe"):
        raise errors.InvalidRequest(f"backend: {backend!r} is neither a name nor a backend", fix='write backend="auto"')
    if backend not in _engines:
        _engines[backend] = Engine(base.settings, extra=(backend,))
    return _engines[backend], backend.name


async def arun(
    code: str | None = None, *, path: StrPath | None = None, backend: str | Backend = "auto",
    engine: Engine | None = None, on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
    on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, **options: Unpack[RunOptions],
) -> Result:  # fmt: skip
    """Runs code, a file or a command in a sandbox of its own. `run` is the same for blocking code.

    Args:
        code: the snippet to run.
        path: a file to run instead; its extension tells the language, unless `language` is given.
        backend: "auto", a backend's name, or a backend object.
        engine: an engine with settings of its own.
        on_event: called with each event, in order; a plain or an async function, like the next two.
        on_stdout: called with each piece of standard output.
        on_stderr: called with each piece of standard error.
        cancel: a handle that stops the run.
        **options: language, command, files, stdin, env, net, limits by name (timeout=5, memory="256M") and more: see
            `RunOptions`.

    Returns:
        What happened. A guest that fails is a result too; look at `result.ok`, `result.status` and `result.error`.

    Raises:
        InvalidRequest: what was asked for makes no sense.
        PolicyDenied: it is not allowed, or no backend here can do it.
        BackendError: Belljar or a backend failed, not the guest.
    """
    engine, name = _engine_for(backend, engine)
    asked = request(backend=name, **await with_code(code, path, await with_named_files(options), engine.languages))
    return await engine.run(
        asked, listener=listening(on_event, on_stdout, on_stderr), control=control_for(cancel)
    )  # fmt: skip


def run(
    code: str | None = None, *, path: StrPath | None = None, backend: str | Backend = "auto",
    engine: Engine | None = None, on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
    on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, **options: Unpack[RunOptions],
) -> Result:  # fmt: skip
    """Runs code, a file or a command in a sandbox of its own, and returns when it has ended.

    Callbacks are called from another thread, one at a time.

    Args:
        code: the snippet to run.
        path: a file to run instead; its extension tells the language, unless `language` is given.
        backend: "auto", a backend's name, or a backend object.
        engine: an engine with settings of its own.
        on_event: called with each event, in order; a plain or an async function, like the next two.
        on_stdout: called with each piece of standard output.
        on_stderr: called with each piece of standard error.
        cancel: a handle that stops the run from another thread.
        **options: language, command, files, stdin, env, net, limits by name (timeout=5, memory="256M") and more: see
            `RunOptions`.

    Returns:
        What happened. A guest that fails is a result too; look at `result.ok`, `result.status` and `result.error`.

    Raises:
        InvalidRequest: what was asked for makes no sense.
        PolicyDenied: it is not allowed, or no backend here can do it.
        BackendError: Belljar or a backend failed, not the guest.
    """
    return portal.call(
        lambda: arun(
            code, path=path, backend=backend, engine=engine, on_event=on_event, on_stdout=on_stdout,
            on_stderr=on_stderr, cancel=cancel, **options,
        )
    )  # fmt: skip


@asynccontextmanager
async def astream(
    code: str | None = None, *, path: StrPath | None = None, backend: str | Backend = "auto",
    engine: Engine | None = None, **options: Unpack[RunOptions],
) -> AsyncIterator[AsyncStream]:  # fmt: skip
    """Runs code and tells its events as they come: `async with belljar.astream(code) as run: async for event in run:`.

    Leaving the block early ends the guest. Takes what `arun` takes.
    """
    engine, name = _engine_for(backend, engine)
    asked = request(backend=name, **await with_code(code, path, await with_named_files(options), engine.languages))
    async with streaming(partial(engine.run, asked)) as handle:
        yield handle


def stream(
    code: str | None = None, *, path: StrPath | None = None, backend: str | Backend = "auto",
    engine: Engine | None = None, **options: Unpack[RunOptions],
) -> AbstractContextManager[Stream]:  # fmt: skip
    """Runs code and tells its events as they come: `with belljar.stream(code) as run: for event in run: ...`.

    Leaving the block early ends the guest. Takes what `run` takes.
    """
    return blocking(astream(code, path=path, backend=backend, engine=engine, **options))


async def alist_backends(*, engine: Engine | None = None) -> tuple[Capabilities, ...]:
    """Tells of every backend what it can do here, or why it does not work and how to fix it."""
    return tuple(await (engine or default_engine()).backends())


def list_backends(*, engine: Engine | None = None) -> tuple[Capabilities, ...]:
    """Tells of every backend what it can do here, or why it does not work and how to fix it."""
    return portal.call(lambda: alist_backends(engine=engine))


async def alist_snapshots(
    labels: Mapping[str, str] | None = None, *, owner: str | None = None, engine: Engine | None = None
) -> tuple[BoxSnapshot, ...]:  # fmt: skip
    """Lists the snapshots of living sandboxes, the newest first.

    Args:
        labels: only those that have all of these.
        owner: only this one's, where a service keeps those of several callers.
        engine: an engine with settings of its own.
    """
    from belljar.living.snapshots import listed

    return await listed(engine or default_engine(), labels, owner)


def list_snapshots(
    labels: Mapping[str, str] | None = None, *, owner: str | None = None, engine: Engine | None = None
) -> tuple[BoxSnapshot, ...]:  # fmt: skip
    """Lists the snapshots of living sandboxes, the newest first: see `alist_snapshots`."""
    return portal.call(lambda: alist_snapshots(labels, owner=owner, engine=engine))


async def aremove_snapshot(id: str, *, owner: str | None = None, engine: Engine | None = None) -> None:
    """Removes a snapshot. Sandboxes that began with it keep their files.

    Args:
        id: its name.
        owner: whose it must be, where a service keeps those of several callers.
        engine: an engine with settings of its own.

    Raises:
        NotFound: there is none.
    """
    from belljar.living.snapshots import removed

    await removed(engine or default_engine(), id, owner)


def remove_snapshot(id: str, *, owner: str | None = None, engine: Engine | None = None) -> None:
    """Removes a snapshot: see `aremove_snapshot`."""
    portal.call(lambda: aremove_snapshot(id, owner=owner, engine=engine))


async def asupported_languages(*, backend: str = "auto", engine: Engine | None = None) -> tuple[str, ...]:
    """Returns the languages that can be run here now: on any backend, or on the one that is named."""
    engine = engine or default_engine()
    able = [one.backend for one in await engine.backends() if one.available and backend in ("auto", one.backend)]
    found = [support for name in able for support in await engine.languages_of(name)]
    return tuple(dict.fromkeys(support.name for support in found if support.available))


def supported_languages(*, backend: str = "auto", engine: Engine | None = None) -> tuple[str, ...]:
    """Returns the languages that can be run here now: on any backend, or on the one that is named."""
    return portal.call(lambda: asupported_languages(backend=backend, engine=engine))


class AsyncSandbox(AsyncLivingPart):
    """One sandbox for several commands: files stay, processes do not outlive their command.

    With `living=True` it is one machine for all of them: any number at once, and what they leave running lives on.

    `async with AsyncSandbox() as box: await box.run(...)`; or `await AsyncSandbox.open()`, and `await box.close()`.
    """

    _kind: ClassVar[str] = "sandbox"

    def __init__(
        self, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        **options: Unpack[SandboxOptions],
    ) -> None:  # fmt: skip
        """Checks what is asked for; nothing is started before it is opened.

        Args:
            backend: "auto", a backend's name, or a backend object.
            engine: an engine with settings of its own.
            id: the name under which it is recorded; a new one unless given.
            **options: see `SandboxOptions`. Limits and variables hold for each run that gives none of its own.
        """
        self._engine, name = _engine_for(backend, engine)
        self._request = request(backend=name, **options)
        self._id = id
        self._lease: Lease | None = None
        self.for_session = False  # it is to hold one Python interpreter, and `auto` may choose by that
        self.lasting: Lasting | None = None  # a living one is to go on where this process ends, or was found again

    @classmethod
    async def open(
        cls, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        **options: Unpack[SandboxOptions],
    ) -> Self:  # fmt: skip
        """Makes a sandbox and opens it; `close` it when you are done. Takes what the class takes."""
        return await cls(backend=backend, engine=engine, id=id, **options)

    @property
    def lease(self) -> Lease:
        """The open box with the decisions that led to it.

        Raises:
            InvalidRequest: the sandbox is not open.
        """
        if self._machine is not None:
            return self._machine.lease
        if self._lease is None:
            raise self._not_open()
        return self._lease

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, id: str = "", **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a snippet, or the file of the host at `path`, in this sandbox.

        Args:
            code: the snippet to run.
            path: a file of this machine to run instead; its extension tells the language.
            on_event: called with each event, in order.
            on_stdout: called with each piece of standard output.
            on_stderr: called with each piece of standard error.
            cancel: a handle that stops the run.
            id: the name under which the run is recorded; the sandbox's unless given.
            **options: see `CommandOptions`.
        """
        asked = self._asked(**await with_code(code, path, options, self._engine.languages))
        return await self._run(asked, listening(on_event, on_stdout, on_stderr), cancel, id)

    async def exec(
        self, command: str | Iterable[str], *, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, id: str = "",
        **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command with its arguments in this sandbox; otherwise as `run`.

        In a living sandbox it may be text as well: a line of shell.
        """
        asked = self._asked(command=words(command) if self.living else command, **options)
        return await self._run(asked, listening(on_event, on_stdout, on_stderr), cancel, id)

    async def _run(self, asked: RunRequest, listener: Listener | None, cancel: Cancel | None, id: str) -> Result:
        if self._machine is None:
            return await self.lease.run(asked, listener=listener, control=control_for(cancel), id=id)
        with self._machine.in_use():
            await self._machine.check_folder(asked.workdir)
            return await self.lease.run(asked, listener=listener, control=control_for(cancel), id=id)

    async def test(
        self, command: str | Iterable[str] | None = None, *, on_event: Listener | None = None,
        on_test: TestListener | None = None, cancel: Cancel | None = None, **options: Unpack[TestRunOptions],
    ) -> TestReport:  # fmt: skip
        """Runs the tests of the project in /workspace of a living sandbox, and returns their report.

        Args:
            command: a line of shell, or a program with its arguments; found by the project's files unless given.
            on_event: called with each event; what is printed, and each test as one of kind "display".
            on_test: called with each test when it has ended.
            cancel: a handle that stops them.
            **options: see `TestRunOptions`.
        """
        from belljar.core.test_results.asked import test_options
        from belljar.test_runs.runs import run_tests

        self._alive()
        asked = test_options(command=command, **options)
        return (await run_tests(self, asked, on_event=on_event, on_test=on_test, cancel=cancel))[0]

    async def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        """Writes a file of the sandbox, with the guest's rights. One that was there keeps its permissions.

        Args:
            path: its name, below /workspace.
            content: text, or bytes.
            executable: whether it may be run.

        Raises:
            OSError: what the guest would get: PermissionError for what is read-only, IsADirectoryError, and so on.
        """
        if not isinstance(content, bytes | str):
            raise errors.InvalidRequest(f"content: must be bytes or text, not {type(content).__name__}")
        data = content.encode() if isinstance(content, str) else content
        await self.lease.box.put([File(path=_name(path), content=data, executable=executable)])

    async def read(self, path: str) -> bytes:
        """Returns the content of a file of the sandbox, read with the guest's rights. No link is followed.

        Raises:
            OSError: what the guest would get: FileNotFoundError, PermissionError, IsADirectoryError, and so on.
        """
        async with self.reading(path) as pieces:
            return b"".join([piece async for piece in pieces])

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file as `read` does, for one that is too large to be held: `async with box.reading("big") as pieces`.

        Args:
            path: its name, below /workspace.
        """
        return self.lease.box.reading(_name(path))

    async def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        return await self.lease.box.list()

    def _asked(self, **options: Any) -> RunRequest:
        mine = self._request
        if mine.living and (own := sorted(_OF_THE_MACHINE & {name for name in options if options[name] is not None})):
            raise errors.InvalidRequest(
                f"{own[0]}: is a limit of the whole sandbox here", fix="give it when you open the sandbox"
            )
        env = {**mine.env, **options.pop("env", {})}
        limits = {**mine.limits.named(), **options.pop("limits", {})}
        if self.living:
            options["home"] = self.home  # as any word of a living sandbox, it makes the command one of such
        options.setdefault("deterministic", mine.deterministic)
        return request(env=env, limits=limits, backend=mine.backend, **options)

    def another(self, id: str = "") -> Self:
        """Returns a new sandbox, not yet open, asked for in the same words and on the backend that took this one."""
        backend = self.lease.capabilities.backend
        other = type(self)(backend=backend, engine=self._engine, id=id)
        other._request = self._request.model_copy(update={"backend": backend})
        other.for_session = self.for_session
        return other

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        opening = self._engine.open(
            self._request, keep_files=True, session=self.for_session, id=self._id, lasting=self.lasting
        )
        if self._request.living is not None:
            async with self._living_on(opening, self._request.living):
                yield
            return
        async with opening as lease:
            self._lease = lease
            try:
                yield
            finally:
                self._lease, self._was_closed = None, True

    @asynccontextmanager
    async def _living_on(self, opening: AbstractAsyncContextManager[Lease], asked: Life) -> AsyncIterator[None]:
        from belljar.living.machine import LivingMachine  # here: most sandboxes are not living

        beginning = self._beginning
        if beginning is None and asked.snapshot and not (self.lasting and self.lasting.found):
            from belljar.living.snapshots import beginning_with

            beginning = await beginning_with(self._engine, asked.snapshot)
        machine = LivingMachine(opening, asked, beginning, self.lasting.found if self.lasting else None)
        async with machine.opened():
            self._machine = machine
            try:
                yield
            finally:
                self._machine, self._was_closed = None, True


def _name(path: str) -> str:
    try:
        return guest_path(path)
    except ValueError as error:
        raise errors.InvalidRequest(f"path: {error}") from None


class Sandbox(LivingPart[AsyncSandbox]):
    """One sandbox for several commands: files stay, processes do not outlive their command.

    With `living=True` it is one machine for all of them: any number at once, and what they leave running lives on.

    `with Sandbox() as box: box.run(...)`; or `box = Sandbox.open()` and `box.close()`.
    """

    def __init__(
        self, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        **options: Unpack[SandboxOptions],
    ) -> None:  # fmt: skip
        """Checks what is asked for; nothing is started before it is opened.

        Args:
            backend: "auto", a backend's name, or a backend object.
            engine: an engine with settings of its own.
            id: the name under which it is recorded; a new one unless given.
            **options: see `SandboxOptions`. Limits and variables hold for each run that gives none of its own.
        """
        super().__init__(AsyncSandbox(backend=backend, engine=engine, id=id, **options))

    @classmethod
    def open(
        cls, *, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
        **options: Unpack[SandboxOptions],
    ) -> Self:  # fmt: skip
        """Makes a sandbox and opens it; `close` it when you are done. Takes what the class takes."""
        return cls(backend=backend, engine=engine, id=id, **options)._open()

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, id: str = "", **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a snippet, or the file of the host at `path`, in this sandbox: see `AsyncSandbox.run`."""
        return portal.call(
            lambda: self._core.run(
                code, path=path, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr, cancel=cancel, id=id,
                **options,
            )
        )  # fmt: skip

    def exec(
        self, command: str | Iterable[str], *, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, id: str = "",
        **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command with its arguments, or a line of shell in a living one; otherwise as `run`."""
        return portal.call(
            lambda: self._core.exec(
                command, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr, cancel=cancel, id=id, **options
            )
        )

    def test(
        self, command: str | Iterable[str] | None = None, *, on_event: Listener | None = None,
        on_test: TestListener | None = None, cancel: Cancel | None = None, **options: Unpack[TestRunOptions],
    ) -> TestReport:  # fmt: skip
        """Runs the tests of the project in /workspace of a living sandbox: see `AsyncSandbox.test`."""
        return portal.call(
            lambda: self._core.test(command, on_event=on_event, on_test=on_test, cancel=cancel, **options)
        )

    def snapshot(self, *, labels: Mapping[str, str] | None = None, owner: str = "") -> BoxSnapshot:
        """Keeps its files as they are now, and no process: see `AsyncSandbox.snapshot`."""
        return portal.call(partial(self._core.snapshot, labels=labels, owner=owner))

    def fork(self, *, labels: Mapping[str, str] | None = None, expires: float | None = None, id: str = "") -> Self:
        """Opens a second sandbox with its files as they are now, and none of its processes: see `AsyncSandbox.fork`."""
        return self._of(portal.call(partial(self._core.fork, labels=labels, expires=expires, id=id)))._open()
