"""The sessions and living sandboxes that models hold open: opened with what the operator grants, found by their ids.

A caller finds only their own. Whatever a model forgets to close ends by itself: when nobody has used it for a while,
and at the latest when its lifetime is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import anyio

from belljar.core import errors
from belljar.living.process import AsyncProcess
from belljar.protocol.living import ForkSandbox, InterpreterTurn, OpenInterpreter, OpenSandbox, SandboxRecord
from belljar.protocol.records import Caller, SessionRecord
from belljar.sandbox import AsyncSandbox
from belljar.service.mcp.calls import Calls, Ctx
from belljar.service.run_lifecycle import Run
from belljar.service.sandboxes import interpreters
from belljar.service.sandboxes.held import HeldSandbox
from belljar.service.sandboxes.sandboxes import Sandboxes
from belljar.service.sessions import Held

Kind = Literal["session", "sandbox"]
SESSION_SECONDS = (600.0, 3600.0)  # without use, and in all
LIVING_SECONDS = (1800.0, 8 * 3600.0)  # the same of a living sandbox
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
        self._sandboxes = Sandboxes(calls.service, calls.sessions)
        self._interpreters: WeakKeyDictionary[HeldSandbox, _ModelInterpreter] = WeakKeyDictionary()

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
        async with self._calls.telling(ctx, f"opening a {kind}"):  # which waits for packages, or an image
            if kind == "sandbox" and await self._can_live(backend):
                record = await self._open_living(caller, hosts, backend)
            else:
                options: dict[str, Any] = {"language": language} if language else {}
                options |= {"net": hosts, "backend": backend, **self._calls.folders}
                idle, lifetime = SESSION_SECONDS
                record = await self._sessions.open(caller, kind, idle=idle, lifetime=lifetime, **options)
        return record

    async def _open_living(self, caller: Caller, hosts: list[str], backend: str) -> SessionRecord:
        """Opens one of the server's living sandboxes, which its owner finds on every surface."""
        longest = self._calls.service.settings.service.living_lifetime
        idle, lifetime = LIVING_SECONDS
        folders = self._calls.folders
        body = OpenSandbox(
            net=tuple(hosts), backend=backend, project_path=folders.get("workspace"), write=folders.get("write", False),
            packages=folders.get("packages"), expires=min(lifetime, longest), idle=idle,
        )  # fmt: skip
        return self._record(await self._sandboxes.open(caller, body), caller)

    async def close(self, id: str, caller: Caller) -> None:
        """Ends a session or a sandbox."""
        if self.lives(id, caller):
            await self._sandboxes.close(id, caller)
        else:
            await self._sessions.close(id, caller)

    async def fork(self, ctx: Ctx, caller: Caller, id: str) -> SessionRecord:
        """Opens a copy of a session, with its memory, or of a living sandbox, with its files but not its processes."""
        if not self.lives(id, caller):
            return await self._sessions.fork(id, caller, None)
        async with self._calls.telling(ctx, "copying its files"), self.used(id, caller):
            told = await self._sandboxes.fork(self._sandboxes.get(id, caller), caller, ForkSandbox())
        return self._record(told, caller)

    def _record(self, told: SandboxRecord, caller: Caller) -> SessionRecord:
        record = self._sessions.get(told.id, caller).record
        return record.model_copy(update={"expires": told.expires or record.expires})

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
            SessionEnded: it has ended.
        """
        return isinstance(self._held(id, caller), HeldSandbox)

    def _held(self, id: str, caller: Caller) -> Held:
        ended = None if self._sessions.find(id, caller) else self._calls.service.ended.find(id, caller)
        if ended is not None:
            raise errors.SessionEnded(
                f"this sandbox has ended: {ended.reason}", fix='session_open(kind="sandbox") opens another'
            )
        return self._sessions.get(id, caller)

    @contextmanager
    def listing(self, caller: Caller) -> Iterator[None]:
        """Takes one of a caller's places for listings of folders while the block runs.

        Raises:
            Busy: they have none left.
        """
        with self._sandboxes.listings.taken(caller.name):
            yield

    def make_room(self, id: str, caller: Caller) -> None:
        """Forgets processes of a sandbox that have ended, until there is room for the output of one more.

        Raises:
            Busy: those that run have taken it.
        """
        self._sandboxes.get(id, caller).make_room(self._calls.service.settings.service.output_memory)

    @asynccontextmanager
    async def used(self, id: str, caller: Caller) -> AsyncIterator[UsedBox]:
        """Gives a living sandbox, which does not end for want of use meanwhile.

        Raises:
            NotFound: this caller has none of that name.
            SessionEnded: it has ended.
            InvalidRequest: it is not a living one.
        """
        held = self._held(id, caller)
        if not isinstance(held, HeldSandbox):
            what = "a session" if held.record.kind == "session" else f"a sandbox of {held.record.backend}"
            raise errors.InvalidRequest(
                f"session_id: {id[:80]!r} is {what}, in which nothing goes on between two calls",
                fix='open one with session_open(kind="sandbox"), on native, docker or podman',
            )
        if held.busy >= _CALLS_AT_ONCE:
            raise errors.Busy("as many calls of this sandbox wait as may", retry_after=5)
        async with held.used():
            yield UsedBox(id, held.box)

    def living(self, id: str, caller: Caller) -> HeldSandbox:
        """Returns a living sandbox of a caller's.

        Raises:
            NotFound: this caller has none of that name.
            SessionEnded: it has ended.
            InvalidRequest: it is not a living one.
        """
        if not self.lives(id, caller):
            raise errors.InvalidRequest(
                f"session_id: {id[:80]!r} is no living sandbox", fix='open one with session_open(kind="sandbox")'
            )
        return self._sandboxes.get(id, caller)

    async def turn(self, id: str, caller: Caller, code: str, seconds: float | None) -> Run:
        """Starts a turn of the interpreter of Python that a living sandbox keeps for its model.

        It is opened with the first turn.

        Raises:
            SessionEnded: it has ended meanwhile. The next turn opens another.
        """
        async with self.used(id, caller):
            held = self._sandboxes.get(id, caller)
            mine = self._interpreters.setdefault(held, _ModelInterpreter())
            async with mine.lock:
                found = held.interpreters.get(mine.id)
                if found is not None and found.ended:
                    await interpreters.close(held, mine.id)
                    raise errors.SessionEnded(
                        f"the interpreter of this sandbox has ended: {found.ended}",
                        fix="call session_run again: another starts, without its variables; files and processes stay",
                    )
                if found is None:
                    mine.id = (await interpreters.open_one(held, OpenInterpreter())).id
            body = InterpreterTurn(code=code, timeout_seconds=seconds)
            return await interpreters.take(self._calls.service, held, mine.id, caller, body)

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
        for held in self._sessions.all(caller):
            if isinstance(held, HeldSandbox) and held.record.caller == caller.name and _is_open(held.box):
                yield UsedBox(held.record.id, held.box)


class _ModelInterpreter:
    """Which interpreter of a living sandbox is its model's."""

    def __init__(self) -> None:
        self.id: str = ""
        self.lock: anyio.Lock = anyio.Lock()


def _is_open(box: AsyncSandbox) -> bool:
    try:
        return not box.ended
    except errors.InvalidRequest:  # it is being opened, or closed
        return False
