"""The previews of a server: started, found, extended and stopped; and what the hosts of previews lead to."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
from anyio.abc import ByteStream

from belljar.core import errors
from belljar.core.options import request
from belljar.core.result import Event
from belljar.preview.backend import ApiBackend
from belljar.preview.connections import Idle
from belljar.preview.proxy import Glance
from belljar.preview.server import PreviewServer
from belljar.protocol.previews import PreviewFinding, PreviewRecord, StartPreview
from belljar.protocol.records import Caller, SessionRecord, new_id, now
from belljar.sandbox import AsyncSandbox
from belljar.service import projects
from belljar.service.auth.access import LOCAL_USER
from belljar.service.previews import labels
from belljar.service.previews.labels import Named
from belljar.service.queries import sees
from belljar.service.sandboxes.held import HeldSandbox
from belljar.service.sandboxes.sandboxes import Sandboxes
from belljar.service.service import Service
from belljar.service.sessions import NO_GRANT, Sessions

_KEPT_ENDED = 256  # that have ended and are still told of
_STOP_SECONDS = 30.0


class HeldPreview(HeldSandbox):
    """The living sandbox of a preview.

    Attributes:
        server: what runs in it.
        label: under which it is seen.
        local: where it is seen without a service; empty: not yet.
    """

    server: PreviewServer
    label: str = ""
    local: str = ""

    def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now.

        Raises:
            PolicyDenied: that is beyond the longest life that it may have.
        """
        left = self.end - time.time()
        if seconds > left:
            raise over_preview(seconds, left)
        self.box.extend(seconds)


class Exposed:
    """A port of a living sandbox that is seen through the proxy."""

    backend: ApiBackend | None = None

    def __init__(self, held: HeldSandbox, port: int) -> None:
        """Is made when the port is first asked for."""
        self.open: int = 0
        self.idle: Idle = Idle()
        self._held = held
        self._port = port
        self._glance = Glance("running", f"port {port} of a sandbox")

    async def dial(self) -> ByteStream:
        """Connects to it."""
        async with self._held.used():
            return await self._held.box.dial(self._port)

    def glance(self) -> Glance:
        """Tells that it is there, whether something listens or not."""
        return self._glance


class Previews:
    """Each is a living sandbox among the server's sessions, and so takes a place of theirs."""

    def __init__(self, service: Service, sessions: Sessions, sandboxes: Sandboxes) -> None:
        self._service = service
        self._sessions = sessions
        self._sandboxes = sandboxes
        self._settings = service.settings.service.preview
        self._all: OrderedDict[str, HeldPreview] = OrderedDict()
        self._exposed: dict[tuple[str, int], Exposed] = {}
        self._backends = frozenset(ApiBackend.parse(text) for text in self._settings.backends)

    # --- for callers ---

    async def start(self, caller: Caller, body: StartPreview) -> HeldPreview:
        """Starts one; returns when it runs, has failed, or the caller's time to wait is over.

        Raises:
            PolicyDenied: the caller may not have what it asks for; Busy: not now.
        """
        backend = await self._backend(body.api)
        held = await self._open(caller, body)
        held.server = PreviewServer(
            held.box, body.command if isinstance(body.command, str) else list(body.command), body.port,
            copied=None if body.live or body.write else held.grant[0], backend=backend, seconds=self._settings.start,
            told=partial(self._tell, held.record.id),
        )  # fmt: skip
        until = int(held.end) + 1
        held.label = await labels.make(self._sandboxes.links, Named(held.record.id, body.port, until), held.owner)
        self._all[held.record.id] = held
        try:
            await held.server.begin()
        except errors.BelljarError:
            await self._drop(held)
            raise
        self._service.start_soon(self._follow, held)
        with anyio.move_on_after(body.wait_seconds):
            await held.server.settled.wait()
        return held

    def find(self, id: str, caller: Caller) -> HeldPreview:
        """Returns one that runs, or that has ended not long ago.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        held = self._all.get(id)
        if held is None or not sees(caller, held.record.caller):
            raise errors.NotFound(f"there is no preview {id[:80]!r}", fix="start one: POST /api/sandbox/preview")
        return held

    def extend(self, id: str, caller: Caller, seconds: float) -> HeldPreview:
        """Moves the end of one.

        Raises:
            PolicyDenied: that is beyond the longest life that it may have.
        """
        held = self.find(id, caller)
        if held.server.status == "error":
            raise errors.SessionEnded(f"this preview has ended: {held.server.reason}", fix="start another")
        held.extend(seconds)
        return held

    async def stop(self, id: str, caller: Caller) -> None:
        """Ends one: SIGTERM to its command, SIGKILL after its grace. Stopping twice does no harm."""
        await self._drop(self.find(id, caller))

    def told(self, held: HeldPreview, url: str, path: str) -> PreviewRecord:
        """Returns one as its caller is told of it."""
        server = held.server
        ended = server.status == "error"
        return PreviewRecord(
            container_id=held.record.id, url=url, path_url=path, status=server.status, reason=server.reason,
            suggestion=server.suggestion, logs=server.lines, port=server.port, findings=server.findings,
            expires=None if ended else held._expires(),
        )  # fmt: skip

    async def local_url(self, held: HeldPreview) -> str:
        """Returns where one is seen at a port of this machine, for a program whose service listens nowhere."""
        from belljar.preview.serving import LocalPreview, listening

        if not held.local and not held.closed.is_set():
            shown = LocalPreview(held.server, held.server.port, listening(0))
            held.local = shown.url
            self._service.start_soon(_until, held.closed, shown.serve)
        return held.local

    async def expose(self, held: HeldSandbox, port: int, seconds: float) -> tuple[str, int]:
        """Returns a label for a port of a living sandbox, and when it ends."""
        until = int(min(time.time() + seconds, held.end)) + 1
        return await labels.make(self._sandboxes.links, Named(held.record.id, port, until), held.owner), until

    # --- for whoever has a label ---

    async def place(self, label: str) -> tuple[PreviewServer | Exposed, int]:
        """Returns what a label leads to, and its port.

        Raises:
            NotFound: it is no label of ours, its time is over, or there is no such sandbox; which, it does not say.
        """
        named = labels.read(label)
        if named is not None and not named.over:
            preview = self._all.get(named.id)
            held: HeldSandbox | None = preview or self._living(named.id)
            if held is not None and await self._may(held) and await labels.is_genuine(
                self._sandboxes.links, label, held.owner
            ):  # fmt: skip
                if preview is not None and preview.server.port == named.port:
                    return preview.server, named.port
                return await self._exposed_port(held, named.port), named.port
        raise errors.NotFound("there is no preview here, or not any more", fix="ask for a new link")

    async def _may(self, held: HeldSandbox) -> bool:
        """Whether the credential counts by which a sandbox was opened."""
        try:
            if held.key:
                await self._service.access.holder(held.key)
                return True
            return held.record.caller != LOCAL_USER or not await self._service.access.required()
        except errors.Unauthorized:
            return False

    def _living(self, id: str) -> HeldSandbox | None:
        held = self._sessions.lives(id)
        return held if isinstance(held, HeldSandbox) else None

    async def _exposed_port(self, held: HeldSandbox, port: int) -> Exposed:
        key = (held.record.id, port)
        if key not in self._exposed:
            for gone in [one for one in self._exposed if self._living(one[0]) is None]:
                await self._exposed.pop(gone).idle.close()
            self._exposed[key] = Exposed(held, port)
        return self._exposed[key]

    # --- beneath ---

    async def _backend(self, url: str) -> ApiBackend | None:
        if not url:
            return None
        wanted = ApiBackend.parse(url)
        if wanted in self._backends:
            return wanted
        refusal = errors.PolicyDenied(
            f"api: {wanted.url} is none of the backends that previews may use",
            fix="have the administrator list it in service.preview.backends",
            context={"setting": "service.preview.backends"},
        )
        await self._service.refusals.record(refusal)
        raise refusal

    async def _open(self, caller: Caller, body: StartPreview) -> HeldPreview:
        service, longest = self._service, self._settings.lifetime
        options = body.options()
        usual = service.settings.container.types["preview"].timeout or longest
        expires = min(usual, longest) if body.expires is None else body.expires
        if expires > longest:
            raise over_preview(expires, longest)
        wanted = await service.check(request(**options, expires=expires), caller)
        copied = projects.check_path(body.project_path, service.settings.service.projects)
        folder = wanted.workspace
        began = now()
        record = SessionRecord(
            id=new_id("bs"), kind="sandbox", caller=caller.name, backend="", created=began, expires=began + longest
        )
        asked = options | {"engine": service.engine, "id": record.id, "workspace": folder, "expires": expires}
        asked |= {"packages": wanted.packages} if isinstance(wanted.packages, str) else {}
        grant = (folder.path, folder.write) if folder else (copied, False) if copied else NO_GRANT
        held = HeldPreview(
            AsyncSandbox(**asked), record, grant, service.demand(wanted, kept=True).memory, idle=None,
            ended=service.ended,
        )  # fmt: skip
        held.key = caller.key
        held.environment = wanted.packages if isinstance(wanted.packages, str) else None
        await self._sessions.hold(caller, held)
        await service.ended.began(held.told())
        return held

    async def _follow(self, held: HeldPreview) -> None:
        """Waits for the end of its command or of its sandbox; either ends the other."""
        async with anyio.create_task_group() as tasks:

            async def until(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(until, held.server.over)
            tasks.start_soon(until, held.closed)
        if not held.closed.is_set():
            held.reason = held.server.reason
            held.over.set()
        held.server.fail(held.reason or held.ended or "its sandbox has ended")
        self._forget_old()

    async def _drop(self, held: HeldPreview) -> None:
        held.reason = held.reason or "it was stopped"
        held.server.fail(held.reason)
        held.over.set()
        with anyio.move_on_after(_STOP_SECONDS):
            await held.closed.wait()
        self._all.pop(held.record.id, None)

    def _forget_old(self) -> None:
        ended = [id for id, one in self._all.items() if one.closed.is_set()]
        for id in ended[: max(0, len(ended) - _KEPT_ENDED)]:
            del self._all[id]

    async def _tell(self, id: str, found: PreviewFinding) -> None:
        await self._service.engine.publish(
            Event(run=id, seq=0, kind="finding", text=f"{found.message}: {found.suggestion}"), None
        )


async def _until(event: anyio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Works until an event is set."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await event.wait()
        tasks.cancel_scope.cancel()


def over_preview(seconds: float, left: float) -> errors.PolicyDenied:
    """Returns the refusal of a time beyond the longest life that a preview may have."""
    return errors.PolicyDenied(
        f"expires: {seconds:g} seconds are over what is left of the longest life, {max(0.0, left):.0f}",
        fix="ask for less, or have the administrator raise service.preview.lifetime",
        context={"setting": "service.preview.lifetime"},
    )
