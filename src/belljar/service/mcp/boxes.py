"""The sessions and living sandboxes that models hold open: opened with what the operator grants, found by their ids.

A caller finds only their own. Whatever a model forgets to close ends by itself: soon after its last call, and at the
latest when its lifetime is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

from belljar.core import errors
from belljar.living.process import AsyncProcess
from belljar.protocol.records import Caller, SessionRecord
from belljar.sandbox import AsyncSandbox
from belljar.service.mcp.calls import Calls, Ctx
from belljar.service.sessions import Held

Kind = Literal["session", "sandbox"]
SESSION_SECONDS = (600.0, 3600.0)  # without a call, and in all
LIVING_SECONDS = (1800.0, 8 * 3600.0)  # the same of a living sandbox: it works while its model thinks
_CALLS_AT_ONCE = 32  # in one sandbox


class UsedBox(NamedTuple):
    """A living sandbox while a call uses it."""

    id: str
    box: AsyncSandbox


class Boxes:
    """Opens sessions and sandboxes for models, and finds them again."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._sessions = calls.sessions

    async def open(
        self, ctx: Ctx, caller: Caller, kind: Kind, *, net: list[str] | None = None, backend: str = "auto",
        language: str = "",
    ) -> SessionRecord:  # fmt: skip
        """Opens a session or a sandbox, with the folders and packages of the operator.

        A sandbox lives on where a backend here has living ones. Elsewhere it keeps its files only.

        Raises:
            PolicyDenied: a host was asked for that nobody granted, or no backend can do what is asked.
        """
        hosts = self._calls.net(net)
        options: dict[str, Any] = {"net": hosts, "backend": backend, **self._calls.folders}
        if language:
            options["language"] = language
        idle, lifetime = SESSION_SECONDS
        async with self._calls.telling(ctx, f"opening a {kind}"):  # which waits for packages, or an image
            if kind == "sandbox" and await self._can_live(backend):
                (idle, lifetime), options["living"] = LIVING_SECONDS, True
            record = await self._sessions.open(caller, kind, idle=idle, lifetime=lifetime, **options)
        return record  # noqa: RET504  (for mypy, the block above may swallow what is raised)

    async def _can_live(self, backend: str) -> bool:
        engine = self._calls.service.engine
        for name in engine.known if backend == "auto" else {backend} & {*engine.known}:
            found = await engine.capabilities(name)
            if found.available and found.living is not None:
                return True
        return False

    def lives(self, id: str, caller: Caller) -> bool:
        """Tells whether it is a living sandbox.

        Raises:
            NotFound: this caller has none of that name.
        """
        return _living(self._sessions.get(id, caller)) is not None

    @asynccontextmanager
    async def used(self, id: str, caller: Caller) -> AsyncIterator[UsedBox]:
        """Gives a living sandbox, which does not end for want of use meanwhile.

        Raises:
            NotFound: this caller has none of that name.
            InvalidRequest: it is not a living one.
        """
        held = self._sessions.get(id, caller)
        box = _living(held)
        if box is None:
            what = "a session" if held.record.kind == "session" else f"a sandbox of {held.record.backend}"
            raise errors.InvalidRequest(
                f"session_id: {id[:80]!r} is {what}, in which nothing goes on between two calls",
                fix='open one with session_open(kind="sandbox"), on native, docker or podman',
            )
        if held.busy >= _CALLS_AT_ONCE:
            raise errors.Busy("as many calls of this sandbox wait as may", retry_after=5)
        async with held.used():
            yield UsedBox(id, box)

    @asynccontextmanager
    async def process(
        self, name: str, session_id: str | None, caller: Caller
    ) -> AsyncIterator[tuple[UsedBox, AsyncProcess]]:
        """Gives a process that was started in a living sandbox, and that sandbox.

        Args:
            name: the process's id.
            session_id: of the sandbox; None: the only one of the caller's that has such a process.
            caller: who asks.

        Raises:
            NotFound: there is none.
            InvalidRequest: several sandboxes have one of that name.
        """
        async with self.used(session_id or self._holder(name, caller), caller) as used:
            yield used, used.box.process(name)

    def _holder(self, name: str, caller: Caller) -> str:
        ids = [id for id, box in self.own(caller) if any(one.id == name for one in box.started)]
        if not ids:
            raise errors.NotFound(f"you have no process {name[:80]!r}", fix="list_processes lists those that you have")
        if len(ids) > 1:
            raise errors.InvalidRequest(
                f"session_id: {' and '.join(ids[:8])} each have a process {name[:80]!r}", fix="name one of them"
            )
        return ids[0]

    def own(self, caller: Caller) -> Iterator[UsedBox]:
        """Yields the caller's living sandboxes that are open, and nobody else's, even if they may see those."""
        for record in self._sessions.of(caller):
            box = _living(self._sessions.get(record.id, caller)) if record.caller == caller.name else None
            if box is not None and _is_open(box):
                yield UsedBox(record.id, box)


def _is_open(box: AsyncSandbox) -> bool:
    try:
        return not box.ended
    except errors.InvalidRequest:  # it is being opened, or closed
        return False


def _living(held: Held) -> AsyncSandbox | None:
    return held.handle if isinstance(held.handle, AsyncSandbox) and held.handle.living else None
