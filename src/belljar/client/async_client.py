"""`AsyncClient`: a server's sandboxes from async code, called as the library's own.

What is asked for is checked here, by the same code as for a run on this machine, before anything is sent. Results,
events and errors come back as the classes that the library has.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from belljar.client.living.sandbox import SANDBOXES, SNAPSHOTS, AsyncRemoteLivingSandbox, labelled
from belljar.client.log_stream import LogFollower
from belljar.client.previews import AsyncRemotePreview, started
from belljar.client.runs import EXECUTE, RUNS, Sending, conduct, execution, look, parse, path_part, stop, watch
from belljar.client.sessions import AsyncRemoteSandbox, AsyncRemoteSession
from belljar.client.transport import Transport
from belljar.control.callbacks import Cancel, Listener, OutputCallback, control_for, listening
from belljar.control.control import Control
from belljar.control.stream import AsyncStream, streaming
from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.languages import Languages
from belljar.core.options import (
    IDLE_SECONDS,
    LIFETIME_SECONDS,
    RemoteLivingOptions,
    RemoteOptions,
    RunOptions,
    StrPath,
    TestRunOptions,
    request,
)
from belljar.core.request import RunRequest
from belljar.core.result import Result, SandboxHealth
from belljar.core.test_results.asked import test_options
from belljar.core.test_results.model import TestReport, report_in
from belljar.host.source import with_code
from belljar.protocol.living import SandboxRecord
from belljar.protocol.previews import PREVIEW_PORT
from belljar.protocol.records import LogLine, RunRecord, SandboxMetrics, SessionRecord
from belljar.protocol.responses import BackendLanguage, Readiness

TIMEOUT_SECONDS, RETRIES = 30.0, 5
TEST = "/api/sandbox/test"
_LANGUAGES = Languages()


class AsyncClient:
    """Runs code on a server: `async with AsyncClient(url, key) as client: await client.run("print(1)")`.

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
        self._transport = Transport(url, key, timeout=timeout, retries=retries, insecure=insecure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """The server's address."""
        return self._transport.url

    # --- running ---

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, backend: str = "auto",
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, cached: bool = False,
        **options: Unpack[RunOptions],
    ) -> Result:  # fmt: skip
        """Runs code, a file or a command in a sandbox of the server, and returns what happened.

        Args:
            code: the snippet to run.
            path: a file of this machine to run instead; its extension tells the language.
            backend: "auto", or the name of one of the server's backends.
            on_event: called with each event, in order.
            on_stdout: called with each piece of standard output.
            on_stderr: called with each piece of standard error.
            cancel: a handle that stops the run.
            cached: whether the kept result of the same deterministic run will do, if there was one.
            **options: see `RunOptions`; `workspace` is a folder of the server.

        Raises:
            BelljarError: as `belljar.run` does, and `Unauthorized` or `Busy` where the server says so.
        """
        options, names = _without_names(options)
        asked = request(backend=backend, **await with_code(code, path, options, _LANGUAGES))
        control = control_for(cancel) if cancel else None
        return await self.execute(
            asked, listener=listening(on_event, on_stdout, on_stderr), control=control, cached=cached, names=names
        )

    async def execute(
        self, asked: RunRequest, *, listener: Listener | None = None, control: Control | None = None,
        cached: bool = False, names: Sequence[str] = (),
    ) -> Result:  # fmt: skip
        """Runs a checked request, as `Engine.run` does. `names`: files of the workspace, which the server reads."""
        body = execution(asked) | ({"cached": True} if cached else {})
        body |= {"context_files": list(names)} if names else {}
        return await conduct(
            self._transport, EXECUTE, body, seconds=asked.limits.timeout, listener=listener, control=control
        )

    async def execute_file(
        self, path: StrPath, *, backend: str = "auto", cached: bool = False, **options: Unpack[RunOptions]
    ) -> Result:
        """Runs a file of this machine in a sandbox of the server: `run(path=...)`."""
        return await self.run(path=path, backend=backend, cached=cached, **options)

    async def test(
        self, path: StrPath, command: str | Iterable[str] | None = None, *, keep: bool = False, install: bool = False,
        backend: str = "auto", on_event: Listener | None = None, cancel: Cancel | None = None, net: Iterable[str] = (),
        packages: str | Iterable[str] | None = None, image: str | None = None, runtime: str | None = None,
        memory: int | str | None = None, cpus: float | None = None, pids: int | None = None,
        disk: int | str | None = None, **options: Unpack[TestRunOptions],
    ) -> TestReport:  # fmt: skip
        """Runs the tests of a folder of the server in a sandbox of its own.

        Args:
            path: the project: a folder of the server, below one of its project roots.
            command: a line of shell, or a program with its arguments; found by the project's files unless given.
            keep: whether to keep the files as the tests left them, as a snapshot.
            install: whether to install beforehand the packages that the project's files list.
            backend: "auto", or the name of one of the server's backends.
            on_event: called with each event; what is printed, and each test as one of kind "display".
            cancel: a handle that stops it.
            net: hosts that the tests may reach.
            packages: names of packages to be there, or a Python environment of the server.
            image: of a container.
            runtime: of containers.
            memory: of the sandbox, like the next three.
            cpus: processors.
            pids: processes and threads at once.
            disk: the size of /workspace and of /tmp, each.
            **options: see `TestRunOptions`.

        Raises:
            BelljarError: as `belljar.test` does, and `Unauthorized` or `Busy` where the server says so.
        """
        asked = test_options(command=command, **options)
        said = asked.model_dump(mode="json", exclude_unset=True, exclude={"command", "timeout"})
        body = {
            "project_path": os.fspath(path),
            "test_command": asked.command,
            "keep": keep,
            "install": install,
            **said,
        }
        limits = {"memory": memory, "cpus": cpus, "pids": pids, "disk": disk}
        body["limits"] = {name: value for name, value in limits.items() if value is not None} or None
        body["timeout_seconds"] = asked.timeout if options.get("timeout") is not None else None
        body |= {"net": sorted(net), "backend": backend, "image": image, "runtime": runtime}
        body["packages"] = packages if isinstance(packages, str | None) else list(packages)
        body = {name: value for name, value in body.items() if value is not None}
        id = await Sending(self._transport, body, TEST).submit()
        result = await watch(self._transport, id, on_event, control_for(cancel))
        report = report_in(result)
        if report is None:
            raise errors.NotAvailable("this server's answer has no report of tests in it", fix="is it as new as this?")
        return report

    async def check_sandbox_health(self) -> SandboxHealth:
        """Tells what came of a real snippet that the server ran, some seconds ago at most. It never raises."""
        try:
            told = parse(Readiness, await self._transport.ask("GET", "/readyz"))
        except errors.BelljarError as error:
            return SandboxHealth(healthy=False, problem=error.message, fix=error.fix)
        return SandboxHealth(
            healthy=told.ready, backend=told.backend, duration_ms=told.run_ms, problem=told.problem
        )  # fmt: skip

    @asynccontextmanager
    async def stream(
        self, code: str | None = None, *, path: StrPath | None = None, backend: str = "auto",
        **options: Unpack[RunOptions],
    ) -> AsyncIterator[AsyncStream]:  # fmt: skip
        """Tells the events of a run as they come: `async with client.stream(code) as run: async for event in run: ...`.

        Leaving the block early ends the guest.
        """
        options, names = _without_names(options)
        asked = request(backend=backend, **await with_code(code, path, options, _LANGUAGES))
        async with streaming(partial(self.execute, asked, names=names)) as handle:
            yield handle

    # --- what stays open ---

    def session(
        self, *, backend: str = "auto", idle: float = IDLE_SECONDS, lifetime: float = LIFETIME_SECONDS,
        **options: Unpack[RemoteOptions],
    ) -> AsyncRemoteSession:  # fmt: skip
        """Returns one interpreter across calls: `async with client.session() as s`, or `s = await client.session()`.

        Args:
            backend: "auto", or the name of one of the server's backends.
            idle: seconds without a turn after which the server ends it.
            lifetime: seconds after which the server ends it in any case.
            **options: see `RemoteOptions`.
        """
        return AsyncRemoteSession(self._transport, request(backend=backend, **options), idle, lifetime)

    @overload
    def sandbox(self, id: str, /) -> AsyncRemoteLivingSandbox: ...

    @overload
    def sandbox(
        self, *, living: Literal[True], backend: str = "auto", idle: float | None = None,
        **options: Unpack[RemoteLivingOptions],
    ) -> AsyncRemoteLivingSandbox: ...  # fmt: skip

    @overload
    def sandbox(
        self, *, backend: str = "auto", idle: float | None = None, lifetime: float = LIFETIME_SECONDS,
        **options: Unpack[RemoteOptions],
    ) -> AsyncRemoteSandbox: ...  # fmt: skip

    def sandbox(  # type: ignore[misc]  # which does not know that `Any` takes them all
        self, id: str | None = None, /, *, backend: str = "auto", idle: float | None = None,
        lifetime: float | None = None, **options: Any,
    ) -> AsyncRemoteSandbox | AsyncRemoteLivingSandbox:  # fmt: skip
        """Returns a sandbox for several commands: `async with client.sandbox() as box`; otherwise as `session`.

        With `living=True` it is one machine for all of them, which lives on when we go; `client.sandbox(id)` is one
        that lives already, opened from wherever.

        Args:
            id: of a living sandbox that is there; then nothing else is given.
            backend: "auto", or the name of one of the server's backends.
            idle: seconds without use after which the server ends it; 600 unless it is living.
            lifetime: seconds after which the server ends it in any case; a living one has `expires`.
            **options: see `RemoteOptions` and `LivingOptions`.
        """
        return self._sandbox(id, backend, idle, lifetime, options)

    def _sandbox(
        self, id: str | None, backend: str, idle: float | None, lifetime: float | None, options: Mapping[str, Any]
    ) -> AsyncRemoteSandbox | AsyncRemoteLivingSandbox:
        if id is not None:
            if options or lifetime is not None or idle is not None or backend != "auto":
                raise errors.InvalidRequest("id: is of a sandbox that is there", fix="give nothing else")
            return AsyncRemoteLivingSandbox(self._transport, None, id=id)
        asked = request(backend=backend, **options)
        if asked.living is None:
            seconds = LIFETIME_SECONDS if lifetime is None else lifetime
            return AsyncRemoteSandbox(self._transport, asked, IDLE_SECONDS if idle is None else idle, seconds)
        if lifetime is not None:
            raise errors.InvalidRequest("lifetime: a living sandbox has none", fix="give expires")
        asked = asked if idle is None else request(backend=backend, idle=idle, **options)
        return AsyncRemoteLivingSandbox(self._transport, asked)

    async def sandboxes(self, labels: Mapping[str, str] | None = None) -> list[SandboxRecord]:
        """Lists your living sandboxes.

        Args:
            labels: only those that have all of these.
        """
        return parse(list[SandboxRecord], await self._transport.ask("GET", SANDBOXES, params=labelled(labels)))

    async def preview(
        self, project_path: StrPath, command: str | Iterable[str], port: int = PREVIEW_PORT, *,
        env: Mapping[str, str] | None = None, live: bool = False, write: bool = False, api: str = "",
        expires: float | None = None, wait: float = 10.0, backend: str = "auto", image: str | None = None,
        net: Iterable[str] = (),
    ) -> AsyncRemotePreview:  # fmt: skip
        """Starts a project's server in a sandbox of the server, and returns when it runs, has failed, or after `wait`.

        Args:
            project_path: the project, a folder of the server below one of its project roots.
            command: what serves it: a line of shell, or a program with its arguments.
            port: at which it listens inside.
            env: variables that it finds.
            live: the folder itself, read-only, and no copy of it.
            write: the folder itself, and it may be changed.
            api: the backend that answers /api; one that the administrator listed.
            expires: seconds until it ends; 30 minutes unless given.
            wait: seconds to wait until it listens.
            backend: "auto", or the name of one of the server's backends.
            image: of a container.
            net: hosts that it may reach.
        """
        return await started(
            self._transport, project_path, command, port, env=env, live=live, write=write, api=api, expires=expires,
            wait=wait, backend=backend, image=image, net=list(net),
        )  # fmt: skip

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> list[BoxSnapshot]:
        """Lists the snapshots of your living sandboxes, the newest first.

        Args:
            labels: only those that have all of these.
        """
        return parse(list[BoxSnapshot], await self._transport.ask("GET", SNAPSHOTS, params=labelled(labels)))

    async def remove_snapshot(self, id: str) -> None:
        """Removes a snapshot; sandboxes that began with it keep their files.

        Raises:
            NotFound: there is none.
        """
        await self._transport.ask("DELETE", f"{SNAPSHOTS}/{path_part(id)}", again=False)

    async def sessions(self) -> list[SessionRecord]:
        """Lists your sessions and sandboxes that are open."""
        return parse(list[SessionRecord], await self._transport.ask("GET", "/api/sandbox/sessions"))

    # --- what is known of runs ---

    async def runs(
        self, *, state: str | None = None, language: str | None = None, before: float | None = None, limit: int = 50
    ) -> list[RunRecord]:
        """Lists your runs, the newest first, without their results.

        Args:
            state: only those in this state, such as "running".
            language: only those of this language.
            before: only those that were sent before this time (seconds since 1970).
            limit: the most to list.
        """
        asked = {"state": state, "language": language, "before": before, "limit": limit}
        params = {name: value for name, value in asked.items() if value is not None}
        return parse(list[RunRecord], await self._transport.ask("GET", RUNS, params=params))

    async def inspect(self, id: str) -> RunRecord:
        """Returns one run, with its result or its problem when it is over."""
        return await look(self._transport, id)

    async def cancel(self, id: str) -> RunRecord:
        """Ends a run and everything it started; what it had printed is kept."""
        return await stop(self._transport, id)

    async def logs(self, id: str, after: int = 0) -> AsyncGenerator[LogLine, None]:
        """Yields the lines of a run after the one of that number, to the run's end: as they come while it runs."""
        async with aclosing(LogFollower(self._transport, path_part(id), after).each()) as lines:
            async for line in lines:
                yield line

    def stream_container_logs(self, id: str, after: int = 0) -> AsyncGenerator[LogLine, None]:
        """Follows the lines of a run to its end: `logs`, under the name that the specification has for it."""
        return self.logs(id, after)

    async def metrics(self, id: str, after: float = 0) -> SandboxMetrics:
        """Returns what a sandbox used, second by second, since a time (seconds since 1970)."""
        path = f"/api/sandbox/{path_part(id)}/metrics"
        return parse(SandboxMetrics, await self._transport.ask("GET", path, params={"after": after}))

    # --- what the server can do ---

    async def languages(self) -> list[tuple[str, LanguageSupport]]:
        """Lists each backend of the server with each language that it knows, and whether that works."""
        rows = parse(list[BackendLanguage], await self._transport.ask("GET", "/api/languages"))
        return [(row.backend, LanguageSupport(**row.model_dump(exclude={"backend"}))) for row in rows]

    async def supported_languages(self, *, backend: str = "auto") -> tuple[str, ...]:
        """Returns the languages that the server can run now: on any backend, or on the one that is named."""
        rows = [row for name, row in await self.languages() if backend in ("auto", name)]
        return tuple(dict.fromkeys(row.name for row in rows if row.available))

    async def backends(self) -> tuple[Capabilities, ...]:
        """Tells of every backend of the server what it can do, or why it does not work."""
        return parse(tuple[Capabilities, ...], await self._transport.ask("GET", "/api/backends"))

    # --- the end ---

    async def close(self) -> None:
        """Closes the connections of this event loop. The next request opens new ones."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _without_names(options: RunOptions) -> tuple[RunOptions, tuple[str, ...]]:
    """Returns the options without a list of files, and the list: they lie on the server, which reads them."""
    names = options.get("files")
    if names is None or isinstance(names, Mapping | str | bytes):
        return options, ()
    rest = options.copy()
    rest.pop("files", None)
    return rest, tuple(map(os.fspath, names))
