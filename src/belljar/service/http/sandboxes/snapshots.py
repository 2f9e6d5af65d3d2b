"""Routes of snapshots of living sandboxes, and of forks."""

from __future__ import annotations

from fastapi import APIRouter

from belljar.core.box_snapshot import BoxSnapshot
from belljar.living import snapshots
from belljar.protocol.living import ForkSandbox, MakeSnapshot, SandboxRecord
from belljar.service.http.dependencies import BoundedRoute, SessionHolder, TheRequest
from belljar.service.http.sandboxes.box import PREFIX, Labels, TheBox, TheSandboxes
from belljar.service.sandboxes.sandboxes import labelled, owner_for

router: APIRouter = APIRouter(tags=["sandboxes"], route_class=BoundedRoute)
_NO_LABELS, _AS_IT_IS = MakeSnapshot(), ForkSandbox()  # without a body


@router.post(PREFIX + "/{id}/snapshots", status_code=201)
async def make_snapshot(box: TheBox, sent: TheRequest, body: MakeSnapshot = _NO_LABELS) -> BoxSnapshot:
    """Keeps its files, for another sandbox to begin with."""
    async with box.held() as held:
        return await sent.once(lambda: box.sandboxes.snapshot(held, box.caller, body), lambda _: box.id)


@router.post(PREFIX + "/{id}/fork", status_code=201)
async def fork_sandbox(box: TheBox, sent: TheRequest, body: ForkSandbox = _AS_IT_IS) -> SandboxRecord:
    """A second one with its files as they are now, and none of its processes."""
    async with box.held() as held:
        return await sent.once(lambda: box.sandboxes.fork(held, box.caller, body), lambda record: record.id)


@router.get("/api/snapshots")
async def list_snapshots(sandboxes: TheSandboxes, caller: SessionHolder, labels: Labels = []) -> list[BoxSnapshot]:  # noqa: B006
    """Yours, the newest first."""
    found = await snapshots.listed(sandboxes.service.engine, owner=owner_for(caller))
    return [one for one in found if labelled(one.labels, labels)]


@router.delete("/api/snapshots/{snapshot}", status_code=204)
async def remove_snapshot(snapshot: str, sandboxes: TheSandboxes, caller: SessionHolder) -> None:
    """Sandboxes that began with it keep their files."""
    await snapshots.removed(sandboxes.service.engine, snapshot, owner_for(caller))
