"""What every tool needs: who calls, what people granted, and a run that is carried out while its caller waits.

The network is granted by people. A model, which may be repeating what some web page told it to, can ask for no host but
those that whoever started the server listed; with none listed, its code can send nothing anywhere. The same holds for
folders and packages: every sandbox of a model has those of the server's operator, and no others.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, NamedTuple

import anyio
from anyio.abc import TaskGroup
from mcp.server.mcpserver import Context
from pydantic import Field, TypeAdapter, ValidationError

from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.net_entries import NetEntryText, covered
from belljar.core.result import Result
from belljar.engine import audit
from belljar.host.loops import lone_errors
from belljar.protocol.records import Caller, Scope
from belljar.service.auth import gate
from belljar.service.run_lifecycle import Run
from belljar.service.service import Service
from belljar.service.sessions import Sessions

Ctx = Context[Any, Any]
CallerOf = Callable[[Ctx], Caller]
ENDING_SECONDS = 10.0  # that a run has to end when its caller does not want it any more
_TAKING_SECONDS = 60.0  # that taking a run in may last
_BEAT_SECONDS = 1.0
_HOSTS = TypeAdapter(tuple[NetEntryText, ...])

# Arguments of several tools.
CommandLine = Annotated[
    str | list[str], Field(description='a line of shell, or a program with its arguments: ["ls", "-la"]')
]
Folder = Annotated[str | None, Field(description="the folder to start in; /workspace if left out")]
Stdin = Annotated[str, Field(description="what the program reads from stdin")]
Timeout = Annotated[float | None, Field(description="seconds of wall clock; 30 unless configured otherwise", gt=0)]
Net = Annotated[list[str] | None, Field(description="hosts that the code may reach over https; none if left out")]
Backend = Annotated[str, Field(description="leave it at auto unless the user names one: wasm, native, docker, podman")]
Session = Annotated[str, Field(description="the session_id that session_open or another tool answered")]


class OperatorGrants(NamedTuple):
    """What whoever started the server lets models' code have.

    Attributes:
        hosts: what it may reach, if the model asks for it.
        workspace: a folder of the host that all of it finds at /workspace.
        write: whether it may change that folder.
        packages: names of packages that it finds installed, or a Python environment of the host, read-only.
    """

    hosts: tuple[str, ...] = ()
    workspace: str | None = None
    write: bool = False
    packages: str | tuple[str, ...] | None = None

    def folders(self) -> dict[str, Any]:
        """Returns the folders as options of a run."""
        named = {"workspace": self.workspace, "write": self.write or None, "packages": self.packages}
        return {name: value for name, value in named.items() if value is not None}


class Calls:
    """The service as tools ask it, for whoever calls them.

    Attributes:
        service: what runs things.
        sessions: what callers hold open.
        hosts: patterns of the hosts that may be asked for.
        folders: options with the folders that every sandbox gets.
    """

    def __init__(
        self, service: Service, sessions: Sessions, caller_of: CallerOf, grants: OperatorGrants | None = None
    ) -> None:
        grants = grants or OperatorGrants()
        self.service = service
        self.sessions = sessions
        self.hosts: tuple[str, ...] = granted(grants.hosts)
        self.folders: dict[str, Any] = grants.folders()
        self._caller_of = caller_of

    async def caller(self, ctx: Ctx, *scopes: Scope) -> Caller:
        """Returns who calls, who must have one of the scopes."""
        caller = self._caller_of(ctx)
        audit.caller.set(caller.name)
        await gate.require(self.service, caller, *scopes)
        return caller

    def net(self, asked: list[str] | None) -> list[str]:
        """Returns what was asked, if people granted it.

        Raises:
            PolicyDenied: one of the hosts was not granted.
        """
        for host in granted(tuple(asked or ())):
            if not covered(host, self.hosts):
                raise errors.PolicyDenied(
                    f"{host!r} may not be reached from here: {listed(self.hosts)}",
                    fix="do without, or ask the user to allow it where this server is started: belljar mcp --net HOST",
                    context={"host": host},
                )
        return asked or []

    @asynccontextmanager
    async def telling(self, ctx: Ctx, words: str) -> AsyncIterator[TaskGroup]:
        """Tells progress while the block runs, to clients that asked for it. What it gives ends with the block."""
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_report_progress, ctx, lambda: words)
                yield tasks
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def waiting(self, ctx: Ctx, seconds: float) -> AsyncIterator[None]:
        """Bounds a wait: the block is left when the seconds are over, or the server is about to leave."""

        async def leave() -> None:
            await self.service.drain.draining.wait()
            tasks.cancel_scope.cancel()

        with anyio.move_on_after(seconds):
            async with self.telling(ctx, "waiting") as tasks:
                tasks.start_soon(leave)
                yield

    async def carry_out(self, ctx: Ctx, take: Callable[[], Awaitable[Run]]) -> tuple[Run, Result]:
        """Takes a run in and waits for its end, telling how it goes; a caller who goes away ends it."""
        try:
            with anyio.fail_after(_TAKING_SECONDS, shield=True):  # what is half taken in cannot be stopped
                run = await take()
        except TimeoutError:
            raise errors.BackendTimeout("the run could not be taken in", fix="try again in a while") from None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_report_progress, ctx, lambda: _latest(run))
                await run.done.wait()
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            run.stop()
            with anyio.move_on_after(ENDING_SECONDS, shield=True):
                await run.done.wait()
            raise
        return run, await run.result()


async def _report_progress(ctx: Ctx, latest: Callable[[], str]) -> None:
    """Progress in seconds, to clients that asked for it. How many it will take nobody knows, so there is no total."""
    began = time.monotonic()
    while True:
        await anyio.sleep(_BEAT_SECONDS)
        seconds = round(time.monotonic() - began, 1)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # who is gone is noticed elsewhere
            await ctx.report_progress(seconds, None, f"{seconds:.0f} s: {latest()}")


def _latest(run: Run) -> str:
    if run.record.position is not None:
        return f"waiting, {run.record.position}. in the queue"
    line = run.live.latest  # following it would mean to read all of a flood, for the sake of one line a second
    return neutralise(line.message[:200]) if line else "running"


def granted(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns patterns of hosts, or raises InvalidRequest for what is none."""
    try:
        return _HOSTS.validate_python(hosts)
    except ValidationError as error:
        raise errors.from_validation(error, "net") from None


def listed(hosts: tuple[str, ...]) -> str:
    """Says which hosts may be reached."""
    return f"only {', '.join(hosts)} may" if hosts else "no host may"


def own_of_session() -> errors.InvalidRequest:
    """Returns what is said to a call that asks an open session for another network or place."""
    return errors.InvalidRequest(
        "net, backend: are a session's own", fix="leave them out, or give them to session_open"
    )
