"""Finds living sandboxes again that an earlier server left running, or was killed beside."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import anyio

from belljar.core import errors
from belljar.core.lasting import BoxMark, Lasting
from belljar.core.model import Model
from belljar.core.request import RunRequest
from belljar.protocol.living import SandboxRecord
from belljar.protocol.records import SessionRecord
from belljar.sandbox import AsyncSandbox
from belljar.service import projects
from belljar.service.sandboxes.ended import LOST, EndedSandboxes

if TYPE_CHECKING:
    from belljar.service.service import Service

_DISCARD_SECONDS = 20.0
_log = logging.getLogger("belljar")


class Again(Model):
    """What a server writes down of a sandbox beside its record, so that the next one can go on with it."""

    request: RunRequest
    mark: BoxMark
    latest: float
    """When the longest life that it may have is over, in seconds since 1970."""
    absence: float
    """Seconds that it goes on without a server, at least; twice that at most."""
    folder: str | None = None
    """The folder of the host that it was granted."""
    writable: bool = False
    memory: int = 0
    idle: float | None = None


def sandbox(service: Service, record: SandboxRecord, again: Again) -> AsyncSandbox:
    """Returns the sandbox, not open yet: opening it takes it over.

    Raises:
        PolicyDenied: it was granted a folder that nobody may have any more.
        SessionEnded: nothing is to go on without its server any more.
    """
    absence = service.settings.service.living_absence
    if not absence:
        raise errors.SessionEnded("the settings let nothing go on without its server", fix="open a new one")
    changed = {} if again.mark.egress is None else {"egress": again.mark.egress}
    asked = again.request.model_copy(update={"backend": record.backend} | changed)
    box = AsyncSandbox(engine=service.engine, id=record.id)
    box._request = projects.check(asked, service.settings.service.projects)
    box.lasting = Lasting(absence, again.latest, again.mark)
    return box


def session_of(record: SandboxRecord, again: Again) -> SessionRecord:
    """Returns it as it is told among sessions."""
    return SessionRecord(
        id=record.id, kind="sandbox", caller=record.caller, backend=record.backend, created=record.created,
        expires=again.latest,
    )  # fmt: skip


def is_over(again: Again) -> bool:
    """Whether its time was over while no server ran."""
    ends, life = again.mark.ends, again.request.living
    pauses = life is not None and life.on_expire == "pause"
    return again.latest <= time.time() or (ends is not None and ends <= time.time() and not pauses)


async def give_up(service: Service, ended: EndedSandboxes, record: SandboxRecord, again: Again, why: str) -> None:
    """Removes one that nobody goes on with, and has it told how it ended; `why`: empty, if its time was over."""
    with anyio.move_on_after(_DISCARD_SECONDS, shield=True):
        try:
            await service.engine.discard(record.backend, record.id, again.mark.place)
        except (errors.BelljarError, OSError) as error:
            _log.warning("sandbox %s could not be removed: %s", record.id, error)
    state, reason = ("lost", f"{LOST}: {why}") if why else ("ended", "its time was over")
    await service.engine.record("lost" if why else "expired", run=record.id, message=reason)
    gone = {"state": state, "reason": reason, "expires": None, "features": (), "interpreters": ()}
    await ended.ended(record.model_copy(update=gone))
