"""The living sandboxes of a server: opened, found by id or by label, used, paused, given more time and closed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.lasting import Lasting
from belljar.core.options import request
from belljar.living import snapshots
from belljar.protocol.living import ForkSandbox, MakeSnapshot, OpenSandbox, SandboxRecord
from belljar.protocol.records import Caller, SessionRecord, new_id, now
from belljar.sandbox import AsyncSandbox
from belljar.service.auth.access import LOCAL_USER
from belljar.service.queries import sees
from belljar.service.sandboxes.again import Again, give_up, is_over, session_of
from belljar.service.sandboxes.again import sandbox as found_sandbox
from belljar.service.sandboxes.ended import LOST, EndedSandboxes
from belljar.service.sandboxes.held import HeldSandbox, over_lifetime
from belljar.service.sandboxes.links import Links
from belljar.service.sandboxes.places import Places
from belljar.service.service import Service
from belljar.service.sessions import NO_GRANT, Sessions

_FIND_SECONDS = 120.0  # for each that is found again: its backend is proved first
_log = logging.getLogger("belljar")


class Sandboxes:
    """Those that are open are among the server's sessions, whose places they take."""

    def __init__(self, service: Service, sessions: Sessions, *, lasting: bool = False) -> None:
        """`lasting`: they may go on where this server ends, and it takes over what an earlier one left."""
        self.service: Service = service
        self._absence = service.settings.service.living_absence if lasting else 0.0
        self._sessions = sessions
        self._finding: dict[str, SandboxRecord] = {}  # those of an earlier server that are being taken over
        self._ended: EndedSandboxes = service.ended
        self._longest = service.settings.service.living_lifetime
        self.links: Links = Links(Path(service.settings.data_dir), service.access)
        self.attached: Places = Places("WebSockets of yours", each=256, total=2048)
        self.watchers: Places = Places("watchers of this sandbox", each=16, total=512)
        self.listings: Places = Places("listings of yours", each=4, total=8)  # each may be a hundred megabytes
        self.changes: Places = Places("copies and removals of yours", each=4, total=8)  # each holds one of our threads
        self._copies: Places = Places("snapshots and forks of yours", each=2, total=4)
        self.uploads: Places = Places("uploads of yours", each=6, total=12)  # each holds one of our threads

    async def open(self, caller: Caller, body: OpenSandbox) -> SandboxRecord:
        """Opens one, which lives on until its time is over or it is closed.

        Raises:
            PolicyDenied: the caller may not have what it asks for; Busy: not now.
        """
        expires = self._longest if body.expires is None else body.expires
        if "expires" in body.model_fields_set and expires > self._longest:
            raise over_lifetime(expires, self._longest)
        options = body.options() | {"expires": min(expires, self._longest)}
        if body.snapshot:
            await snapshots.find(self.service.engine, body.snapshot, owner=owner_for(caller))
        wanted = await self.service.check(request(**options), caller)
        record, folder = self._new_record(caller), wanted.workspace
        asked = options | {"engine": self.service.engine, "id": record.id, "workspace": folder}
        grant = (folder.path, folder.write) if folder else NO_GRANT
        memory = self.service.demand(wanted, kept=True).memory
        environment = wanted.packages if isinstance(wanted.packages, str) else None
        asked |= {"packages": environment} if environment else {}
        box = self._lasting(AsyncSandbox(**asked), record)
        held = HeldSandbox(box, record, grant, memory, idle=body.idle, ended=self._ended)
        held.environment = environment
        return await self._hold(caller, held)

    async def fork(self, held: HeldSandbox, caller: Caller, body: ForkSandbox) -> SandboxRecord:
        """Opens a second one with the files of one that is open, as they are now.

        Raises:
            PolicyDenied: it would live longer than it may; Busy: not now.
        """
        machine = held.machine
        expires = min(self._longest, machine.asked.expires or self._longest) if body.expires is None else body.expires
        if expires > self._longest:
            raise over_lifetime(expires, self._longest)
        record = self._new_record(caller)
        other = self._lasting(held.box.another(record.id), record)
        snapshots.prepare_fork(machine, other, body.labels, expires)
        copy = HeldSandbox(other, record, held.grant, held.memory, idle=held.idle_seconds, ended=self._ended)
        copy.environment = held.environment
        with self._copies.taken(caller.name):
            told = await self._hold(caller, copy)
        await snapshots.tell_fork(machine, other)
        return told

    async def snapshot(self, held: HeldSandbox, caller: Caller, body: MakeSnapshot) -> BoxSnapshot:
        """Keeps the files of one that is open. A caller who may not be the only one leaves some room for others.

        Raises:
            Busy: the caller has as many as one may have.
        """
        most = self.service.settings.living.snapshots
        mine = await snapshots.listed(self.service.engine, owner=caller.name)
        if caller.name != LOCAL_USER and len(mine) >= max(1, most - most // 4):
            raise errors.Busy(f"you have {len(mine)} snapshots", retry_after=60, fix="remove some")
        with self._copies.taken(caller.name):
            return await held.box.snapshot(labels=body.labels, owner=caller.name)

    async def _hold(self, caller: Caller, held: HeldSandbox) -> SandboxRecord:
        held.key = caller.key
        await self._sessions.hold(caller, held)
        await held.note()
        return held.told()

    def _lasting(self, box: AsyncSandbox, record: SessionRecord) -> AsyncSandbox:
        """The same, going on where this server ends, if its backend can do that."""
        if self._absence:
            box.lasting = Lasting(self._absence, record.expires)
        return box

    async def find_again(self) -> None:
        """Begins to take over what an earlier server left, or was killed beside; what cannot be is removed."""
        for record, said in await anyio.to_thread.run_sync(self._ended.claim):
            self._finding[record.id] = record
            self.service.start_soon(self._find, record, said)

    async def _find(self, record: SandboxRecord, said: Mapping[str, Any]) -> None:
        try:
            await self._take_over_or_remove(record, said)
        except BaseException:
            with anyio.CancelScope(shield=True):  # we are to end already: the next server takes it
                await self._ended.began(record, said, left=True)
            raise
        finally:
            self._finding.pop(record.id, None)

    async def _take_over_or_remove(self, record: SandboxRecord, said: Mapping[str, Any]) -> None:
        try:
            again = Again.model_validate(said)
        except ValueError as error:  # of another version of Belljar: its container ends by itself
            _log.warning("sandbox %s was written down in words that nobody knows: %s", record.id, error)
            await self._ended.ended(record.model_copy(update={"state": "lost", "reason": LOST, "expires": None}))
            return
        why = ""
        if not is_over(again):
            try:
                with anyio.fail_after(_FIND_SECONDS):
                    await self._take_over(record, again)
                return
            except (errors.BelljarError, OSError) as error:
                why = getattr(error, "message", "") or str(error) or type(error).__name__
        await give_up(self.service, self._ended, record, again, why)

    def _require_found(self, records: Iterable[SandboxRecord]) -> None:
        """Raises Busy while one of these is being found again."""
        if any(True for _ in records):
            raise errors.Busy(
                "the service was just started, and is finding its sandboxes again", retry_after=1, status=503,
                fix="ask again",
            )  # fmt: skip

    async def _take_over(self, record: SandboxRecord, again: Again) -> None:
        box = found_sandbox(self.service, record, again)
        grant = (again.folder, again.writable) if again.folder else NO_GRANT
        session = session_of(record, again)
        held = HeldSandbox(box, session, grant, again.memory, idle=again.idle, ended=self._ended)
        packages = again.request.packages
        held.environment = packages if isinstance(packages, str) else None
        await self._sessions.take_over(held)
        await held.note()

    def _new_record(self, caller: Caller) -> SessionRecord:
        began = now()
        return SessionRecord(
            id=new_id("bs"), kind="sandbox", caller=caller.name, backend="", created=began,
            expires=began + self._longest,
        )  # fmt: skip

    # --- what there is ---

    def list(self, caller: Caller, labels: Iterable[str]) -> list[SandboxRecord]:
        """Returns a caller's that live and have all of these labels, each `name:value`, or a name alone."""
        self._require_found(one for one in self._finding.values() if sees(caller, one.caller))
        wanted = tuple(labels)
        mine = (held.told() for held in self._sessions.all(caller) if isinstance(held, HeldSandbox) and held.began)
        return [told for told in mine if labelled(told.labels, wanted)]

    def look(self, id: str, caller: Caller) -> SandboxRecord:
        """Returns one that lives, or that has ended not long ago.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        held = self._sessions.find(id, caller)
        if isinstance(held, HeldSandbox) and held.began:
            return held.told()
        self._require_found(one for one in self._finding.values() if one.id == id and sees(caller, one.caller))
        if record := self._ended.find(id, caller):
            return record
        raise errors.NotFound(f"there is no living sandbox {id[:80]!r}", fix="GET /api/sandboxes lists yours")

    def get(self, id: str, caller: Caller) -> HeldSandbox:
        """Returns one that lives.

        Raises:
            NotFound: there is none, or it is somebody else's.
            SessionEnded: it has ended.
        """
        held = self._sessions.find(id, caller)
        if isinstance(held, HeldSandbox) and not held.ended:
            return held
        record = self.look(id, caller)
        raise errors.SessionEnded(f"this sandbox has ended: {record.reason}", fix="open a new one")

    @asynccontextmanager
    async def used(self, id: str, caller: Caller) -> AsyncIterator[HeldSandbox]:
        """Gives one that lives, and counts as use of it while the block runs."""
        held = self.get(id, caller)
        async with held.used():
            yield held

    async def close(self, id: str, caller: Caller) -> None:
        """Ends one, with all that runs in it."""
        held = self._sessions.find(id, caller)
        if isinstance(held, HeldSandbox):
            held.reason = "it was closed"
            await self._sessions.close(id, caller)
        else:
            self.look(id, caller)


def owner_for(caller: Caller) -> str | None:
    """Returns whose snapshots a caller may know of; None: everybody's."""
    return None if caller.may("admin") else caller.name


def labelled(labels: Mapping[str, str], wanted: Iterable[str]) -> bool:
    """Whether labels have all that is wanted, each `name:value`, or a name alone."""
    for one in wanted:
        name, colon, value = one.partition(":")
        if name not in labels or (colon and labels[name] != value):
            return False
    return True
