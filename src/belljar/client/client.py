"""`Client`: a server's sandboxes from blocking code, the twin of `AsyncClient`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from belljar.client.async_client import RETRIES, TIMEOUT_SECONDS, AsyncClient
from belljar.client.living.blocking import RemoteLivingSandbox
from belljar.client.living.sandbox import AsyncRemoteLivingSandbox
from belljar.client.previews import RemotePreview
from belljar.client.sessions import RemoteSandbox, RemoteSession
from belljar.control.callbacks import Cancel, Listener, OutputCallback
from belljar.control.stream import Stream, blocking
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.options import (
    IDLE_SECONDS,
    LIFETIME_SECONDS,
    RemoteLivingOptions,
    RemoteOptions,
    RunOptions,
    StrPath,
    TestRunOptions,
)
from belljar.core.result import Result, SandboxHealth
from belljar.core.test_results.model import TestReport
from belljar.host import portal
from belljar.protocol.living import SandboxRecord
from belljar.protocol.previews import PREVIEW_PORT
from belljar.protocol.records import LogLine, RunRecord, SandboxMetrics, SessionRecord


class Client:
    """Runs code on a server: `with Client(url, key) as client: client.run("print(1)")`.

    It connects when it is first used, and may be used without a block; `close` gives its connections back.
    """

    def __init__(
        self, url: str, key: str | None = None, *, timeout: float = TIMEOUT_SECONDS, retries: int = RETRIES,
        insecure: bool = False,
    ) -> None:  # fmt: skip
        """Checks the address; nothing is sent yet.

        Args:
            url: the server's address, such as "https://belljar.example.org".
            key: an API key or token, where the server wants one.
            timeout: seconds to wait for an answer; a run may take longer.
            retries: how often a broken connection is opened again, and a request that got no answer sent again. A run
                is sent under a key of its own, so that it is not run twice.
            insecure: lets the key go in the clear to another machine.

        Raises:
            InvalidRequest: that is no address or no key.
            PolicyDenied: the key would travel in the clear.
            NotAvailable: the HTTP library is not installed.
        """
        self._core = AsyncClient(url, key, timeout=timeout, retries=retries, insecure=insecure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """The server's address."""
        return self._core.url

    # --- running ---

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, backend: str = "auto",
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, cached: bool = False,
        **options: Unpack[RunOptions],
    ) -> Result:  # fmt: skip
        """Runs code, a file or a command in a sandbox of the server, and returns what happened.

        Callbacks are called from another thread, one at a time.

        Args:
            code: the snippet to run.
            path: a file of this machine to run instead; its extension tells the language.
            backend: "auto", or the name of one of the server's backends.
            on_event: called with each event, in order.
            on_stdout: called with each piece of standard output.
            on_stderr: called with each piece of standard error.
            cancel: a handle that stops the run from another thread.
            cached: whether the kept result of the same deterministic run will do, if there was one.
            **options: see `RunOptions`; `workspace` is a folder of the server.

        Raises:
            BelljarError: as `belljar.run` does, and `Unauthorized` or `Busy` where the server says so.
        """
        return portal.call(
            lambda: self._core.run(
                code, path=path, backend=backend, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr,
                cancel=cancel, cached=cached, **options,
            )
        )  # fmt: skip

    def execute_file(
        self, path: StrPath, *, backend: str = "auto", cached: bool = False, **options: Unpack[RunOptions]
    ) -> Result:
        """Runs a file of this machine in a sandbox of the server: `run(path=...)`."""
        return portal.call(lambda: self._core.execute_file(path, backend=backend, cached=cached, **options))

    def test(
        self, path: StrPath, command: str | Iterable[str] | None = None, *, keep: bool = False, install: bool = False,
        backend: str = "auto", on_event: Listener | None = None, cancel: Cancel | None = None, net: Iterable[str] = (),
        packages: str | Iterable[str] | None = None, image: str | None = None, runtime: str | None = None,
        memory: int | str | None = None, cpus: float | None = None, pids: int | None = None,
        disk: int | str | None = None, **options: Unpack[TestRunOptions],
    ) -> TestReport:  # fmt: skip
        """Runs the tests of a folder of the server in a sandbox of its own: see `AsyncClient.test`."""
        return portal.call(
            lambda: self._core.test(
                path, command, keep=keep, install=install, backend=backend, on_event=on_event, cancel=cancel, net=net,
                packages=packages,
                image=image, runtime=runtime, memory=memory, cpus=cpus, pids=pids, disk=disk, **options,
            )
        )  # fmt: skip

    def check_sandbox_health(self) -> SandboxHealth:
        """Tells what came of a real snippet that the server ran, some seconds ago at most. It never raises."""
        return portal.call(self._core.check_sandbox_health)

    def stream(
        self, code: str | None = None, *, path: StrPath | None = None, backend: str = "auto",
        **options: Unpack[RunOptions],
    ) -> AbstractContextManager[Stream]:  # fmt: skip
        """Tells the events of a run as they come: `with client.stream(code) as run: for event in run: ...`.

        Leaving the block early ends the guest.
        """
        return blocking(self._core.stream(code, path=path, backend=backend, **options))

    # --- what stays open ---

    def session(
        self, *, backend: str = "auto", idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS,
        **options: Unpack[RemoteOptions],
    ) -> RemoteSession:  # fmt: skip
        """Opens one interpreter across calls: `with client.session() as s: s.run("x = 1")`, or `close` it later.

        Args:
            backend: "auto", or the name of one of the server's backends.
            idle: seconds without a turn after which the server ends it.
            lifetime: seconds after which the server ends it in any case.
            **options: see `RemoteOptions`.
        """
        core = self._core.session(backend=backend, idle=idle, lifetime=lifetime, **options)
        return RemoteSession(core)._open()

    @overload
    def sandbox(self, id: str, /) -> RemoteLivingSandbox: ...

    @overload
    def sandbox(
        self, *, living: Literal[True], backend: str = "auto", idle: float | None = None,
        **options: Unpack[RemoteLivingOptions],
    ) -> RemoteLivingSandbox: ...  # fmt: skip

    @overload
    def sandbox(
        self, *, backend: str = "auto", idle: float | None = None, lifetime: float = LIFETIME_SECONDS,
        **options: Unpack[RemoteOptions],
    ) -> RemoteSandbox: ...  # fmt: skip

    def sandbox(  # type: ignore[misc]  # which does not know that `Any` takes them all
        self, id: str | None = None, /, *, backend: str = "auto", idle: float | None = None,
        lifetime: float | None = None, **options: Any,
    ) -> RemoteSandbox | RemoteLivingSandbox:  # fmt: skip
        """Opens a sandbox for several commands: `with client.sandbox() as box`; otherwise as `session`.

        With `living=True` it is one machine for all of them, which lives on when we go; `client.sandbox(id)` is one
        that lives already, opened from wherever.

        Args:
            id: of a living sandbox that is there; then nothing else is given.
            backend: "auto", or the name of one of the server's backends.
            idle: seconds without use after which the server ends it; 600 unless it is living.
            lifetime: seconds after which the server ends it in any case; a living one has `expires`.
            **options: see `RemoteOptions` and `LivingOptions`.
        """
        core = self._core._sandbox(id, backend, idle, lifetime, options)
        if isinstance(core, AsyncRemoteLivingSandbox):
            return RemoteLivingSandbox(core)._open()
        return RemoteSandbox(core)._open()

    def sandboxes(self, labels: Mapping[str, str] | None = None) -> list[SandboxRecord]:
        """Lists your living sandboxes; with `labels`, only those that have all of them."""
        return portal.call(self._core.sandboxes, labels)

    def preview(
        self, project_path: StrPath, command: str | Iterable[str], port: int = PREVIEW_PORT, *,
        env: Mapping[str, str] | None = None, live: bool = False, write: bool = False, api: str = "",
        expires: float | None = None, wait: float = 10.0, backend: str = "auto", image: str | None = None,
        net: Iterable[str] = (),
    ) -> RemotePreview:  # fmt: skip
        """Starts a project's server in a sandbox of the server: see `AsyncClient.preview`."""
        return RemotePreview(
            portal.call(
                lambda: self._core.preview(
                    project_path, command, port, env=env, live=live, write=write, api=api, expires=expires, wait=wait,
                    backend=backend, image=image, net=net,
                )
            )
        )  # fmt: skip

    def snapshots(self, labels: Mapping[str, str] | None = None) -> list[BoxSnapshot]:
        """Lists the snapshots of your living sandboxes; with `labels`, only those that have all of them."""
        return portal.call(self._core.snapshots, labels)

    def remove_snapshot(self, id: str) -> None:
        """Removes a snapshot; sandboxes that began with it keep their files."""
        portal.call(self._core.remove_snapshot, id)

    def sessions(self) -> list[SessionRecord]:
        """Lists your sessions and sandboxes that are open."""
        return portal.call(self._core.sessions)

    # --- what is known of runs ---

    def runs(
        self, *, state: str | None = None, language: str | None = None, before: float | None = None, limit: int = 50
    ) -> list[RunRecord]:
        """Lists your runs, the newest first, without their results.

        Args:
            state: only those in this state, such as "running".
            language: only those of this language.
            before: only those that were sent before this time (seconds since 1970).
            limit: the most to list.
        """
        return portal.call(lambda: self._core.runs(state=state, language=language, before=before, limit=limit))

    def inspect(self, id: str) -> RunRecord:
        """Returns one run, with its result or its problem when it is over."""
        return portal.call(self._core.inspect, id)

    def cancel(self, id: str) -> RunRecord:
        """Ends a run and everything it started; what it had printed is kept."""
        return portal.call(self._core.cancel, id)

    def logs(self, id: str, after: int = 0) -> Iterator[LogLine]:
        """Yields the lines of a run after the one of that number, to the run's end: as they come while it runs."""
        lines = self._core.logs(id, after)

        async def following() -> LogLine | None:
            return await anext(lines, None)

        try:
            while (line := portal.call(following)) is not None:
                yield line
        finally:
            portal.call(lines.aclose)

    def stream_container_logs(self, id: str, after: int = 0) -> Iterator[LogLine]:
        """Follows the lines of a run to its end: `logs`, under the name that the specification has for it."""
        return self.logs(id, after)

    def metrics(self, id: str, after: float = 0) -> SandboxMetrics:
        """Returns what a sandbox used, second by second, since a time (seconds since 1970)."""
        return portal.call(self._core.metrics, id, after)

    # --- what the server can do ---

    def languages(self) -> list[tuple[str, LanguageSupport]]:
        """Lists each backend of the server with each language that it knows, and whether that works."""
        return portal.call(self._core.languages)

    def supported_languages(self, *, backend: str = "auto") -> tuple[str, ...]:
        """Returns the languages that the server can run now: on any backend, or on the one that is named."""
        return portal.call(lambda: self._core.supported_languages(backend=backend))

    def backends(self) -> tuple[Capabilities, ...]:
        """Tells of every backend of the server what it can do, or why it does not work."""
        return portal.call(self._core.backends)

    # --- the end ---

    def close(self) -> None:
        """Closes its connections. The next request opens new ones."""
        portal.call(self._core.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
