"""A server's sandboxes from Python, with the words of the library: `Client(url, key).run("print(1)")`.

What is asked is checked here, by the same code as for a run on this machine, before anything is sent. Results, events
and errors come back as the classes that the library has. Each verb has an async twin that begins with `a`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self

from pydantic import ConfigDict

from belljar.backends.control import Control
from belljar.client.log_stream import Line, Lines
from belljar.client.runs import GRACE, RUNS, Record, Sending, execution, look, parse, stop, watch, word
from belljar.client.sessions import Sandbox, Session
from belljar.client.transport import Wire
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.options import request
from belljar.core.request import RunRequest
from belljar.core.result import Result
from belljar.engine.lease import Listener
from belljar.host import portal
from belljar.protocol import records
from belljar.protocol.records import SessionRecord
from belljar.sandbox import Cancel, Stream, listening, streaming


class Figures(records.SandboxMetrics):
    """What a sandbox used, second by second, and what was alarming about it."""

    model_config = ConfigDict(extra="ignore")  # a server may be younger than its client


class Client:
    """`retries`: how often a broken connection is opened again, and a request that got no answer sent again. A run
    is sent under a key of its own, so that it is not run twice. `timeout` (seconds) is for answers, not for runs.

    It needs no closing, but `with` and `async with` close its connections.
    """

    def __init__(
        self, url: str, key: str | None = None, *, timeout: float = 30.0, retries: int = 5, insecure: bool = False
    ) -> None:
        self._wire = Wire(url, key, timeout=timeout, retries=retries, insecure=insecure)

    def __repr__(self) -> str:
        return f"Client({self._wire.url!r})"

    @property
    def url(self) -> str:
        return self._wire.url

    # --- running ---

    async def arun(
        self, code: str | None = None, *, on_event: Listener | None = None,
        on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None, cached: bool = False, **options: Any,
    ) -> Result:  # fmt: skip
        """Runs a snippet (or `command=[...]`) in a sandbox of the server's and returns what happened.

        `cached`: the kept result of the same deterministic run will do, if there was one.
        """
        return await self._run(request(code, **options), listening(on_event, on_stdout, on_stderr), cancel, cached)

    def run(
        self, code: str | None = None, *, on_event: Listener | None = None,
        on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None, cached: bool = False, **options: Any,
    ) -> Result:  # fmt: skip
        """`arun` for blocking code; callbacks are called from another thread, one at a time."""
        listener = listening(on_event, on_stdout, on_stderr)
        return portal.call(self._run, request(code, **options), listener, cancel, cached)

    async def _run(self, asked: RunRequest, listener: Listener | None, cancel: Cancel | None, cached: bool) -> Result:
        control = Control()
        if cancel:
            cancel.attach(control)
        return await self.execute(asked, listener=listener, control=control if cancel else None, cached=cached)

    async def execute(
        self, asked: RunRequest, *, listener: Listener | None = None, control: Control | None = None,
        cached: bool = False,
    ) -> Result:  # fmt: skip
        """A checked request, as `Engine.run` takes it."""
        sending = Sending(self._wire, execution(asked) | ({"cached": True} if cached else {}))
        if listener is None and control is None:
            result = await sending.wait(asked.limits.timeout + GRACE)
            if result is not None:
                return result
        return await watch(self._wire, await sending.submit(), listener, control or Control())

    def stream(self, code: str | None = None, **options: Any) -> AbstractAsyncContextManager[Stream]:
        """`async with client.stream(code) as run: async for event in run: ...`; leaving early ends the guest."""
        return streaming(partial(self.execute, request(code, **options)))

    # --- what stays open ---

    def session(
        self, *, backend: str = "auto", idle: float = 600.0, lifetime: float = 3600.0, **options: Any
    ) -> Session:  # fmt: skip
        """One interpreter across calls: `with client.session() as s: s.run("x = 1")`, or `async with`."""
        return Session(self._wire, request(backend=backend, **options), idle, lifetime)

    def sandbox(
        self, *, backend: str = "auto", idle: float = 600.0, lifetime: float = 3600.0, **options: Any
    ) -> Sandbox:  # fmt: skip
        """One box for several commands: `with client.sandbox() as box: box.exec(["ls"])`, or `async with`."""
        return Sandbox(self._wire, request(backend=backend, **options), idle, lifetime)

    async def asessions(self) -> list[SessionRecord]:
        return parse(list[SessionRecord], await self._wire.ask("GET", "/api/sandbox/sessions"))

    def sessions(self) -> list[SessionRecord]:
        """Yours that are open."""
        return portal.call(self.asessions)

    # --- what is known of runs ---

    async def aruns(
        self, *, state: str | None = None, language: str | None = None, before: float | None = None, limit: int = 50
    ) -> list[Record]:
        asked = {"state": state, "language": language, "before": before, "limit": limit}
        params = {name: value for name, value in asked.items() if value is not None}
        return parse(list[Record], await self._wire.ask("GET", RUNS, params=params))

    def runs(self, **asked: Any) -> list[Record]:
        """Your runs, the newest first, without their results; `state`, `language`, `before` and `limit` narrow it."""
        return portal.call(lambda: self.aruns(**asked))

    async def ainspect(self, id: str) -> Record:
        return await look(self._wire, id)

    def inspect(self, id: str) -> Record:
        """One run, with its result or its problem when it is over."""
        return portal.call(self.ainspect, id)

    async def acancel(self, id: str) -> Record:
        return await stop(self._wire, id)

    def cancel(self, id: str) -> Record:
        """Ends a run and everything it started; what it had printed is kept."""
        return portal.call(self.acancel, id)

    async def alogs(self, id: str, after: int = 0) -> AsyncGenerator[Line, None]:
        async with aclosing(Lines(self._wire, word(id), after).each()) as lines:
            async for line in lines:
                yield line

    def logs(self, id: str, after: int = 0) -> Iterator[Line]:
        """The numbered lines of a run after a number, to its end: those of a run under way as they come."""
        lines = self.alogs(id, after)

        async def following() -> Line | None:
            return await anext(lines, None)

        try:
            while (line := portal.call(following)) is not None:
                yield line
        finally:
            portal.call(lines.aclose)

    async def ametrics(self, id: str, after: float = 0) -> Figures:
        return parse(Figures, await self._wire.ask("GET", f"/api/sandbox/{word(id)}/metrics", params={"after": after}))

    def metrics(self, id: str, after: float = 0) -> Figures:
        """What a sandbox used, second by second."""
        return portal.call(self.ametrics, id, after)

    # --- what the server can do ---

    async def alanguages(self) -> list[tuple[str, LanguageSupport]]:
        rows = parse(list[dict[str, Any]], await self._wire.ask("GET", "/api/languages"))
        known = LanguageSupport.model_fields
        return [
            (str(row.get("backend")), LanguageSupport(**{k: v for k, v in row.items() if k in known})) for row in rows
        ]

    def languages(self) -> list[tuple[str, LanguageSupport]]:
        """What each backend of the server speaks."""
        return portal.call(self.alanguages)

    def supported_languages(self, *, backend: str = "auto") -> tuple[str, ...]:
        """The languages that the server can run now."""
        rows = [row for name, row in self.languages() if backend in ("auto", name)]
        return tuple(dict.fromkeys(row.name for row in rows if row.available))

    async def aoffers(self) -> tuple[Capabilities, ...]:
        return parse(tuple[Capabilities, ...], await self._wire.ask("GET", "/api/backends"))

    def offers(self) -> tuple[Capabilities, ...]:
        """What each backend can do there, and why not."""
        return portal.call(self.aoffers)

    # --- the end ---

    async def aclose(self) -> None:
        await self._wire.aclose()

    def close(self) -> None:
        portal.call(self._wire.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
