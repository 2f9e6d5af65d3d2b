"""Routes of living sandboxes as wholes: opened, found, given more time, paused, run in and closed."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from belljar.core.net_change import NetworkRecord
from belljar.protocol.living import ChangeNetwork, Extend, OpenSandbox, SandboxRecord, SandboxTurn
from belljar.protocol.responses import Executed
from belljar.service.http.dependencies import (
    ACCEPTED,
    BoundedRoute,
    Key,
    SessionHolder,
    TheRequest,
    TheSessions,
    answer,
)
from belljar.service.http.sandboxes.box import PREFIX, Labels, TheBox, TheSandboxes

router: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"], route_class=BoundedRoute)


@router.post("", status_code=201)
async def open_sandbox(
    body: OpenSandbox, sandboxes: TheSandboxes, caller: SessionHolder, sent: TheRequest
) -> SandboxRecord:
    """One machine for all its commands; what they leave running lives on."""
    return await sent.once(lambda: sandboxes.open(caller, body), lambda record: record.id)


@router.get("")
async def list_sandboxes(sandboxes: TheSandboxes, caller: SessionHolder, labels: Labels = []) -> list[SandboxRecord]:  # noqa: B006
    """Yours that live."""
    return sandboxes.list(caller, labels)


@router.get("/{id}")
async def inspect_sandbox(id: str, sandboxes: TheSandboxes, caller: SessionHolder) -> SandboxRecord:
    """One that lives, or how it ended: that is told for a day."""
    return sandboxes.look(id, caller)


@router.delete("/{id}", status_code=204)
async def close_sandbox(id: str, sandboxes: TheSandboxes, caller: SessionHolder) -> None:
    """Ends it with all that runs in it."""
    await sandboxes.close(id, caller)


@router.post("/{id}/extend")
async def extend_sandbox(body: Extend, box: TheBox) -> SandboxRecord:
    """Moves the end of its time."""
    async with box.held() as held:
        held.extend(body.seconds)
        return held.told()


@router.post("/{id}/pause")
async def pause_sandbox(box: TheBox) -> SandboxRecord:
    """Stops all its processes where they are. Pausing twice does no harm."""
    async with box.held() as held:
        await held.box.pause()
        return held.told()


@router.post("/{id}/resume")
async def resume_sandbox(box: TheBox) -> SandboxRecord:
    """Lets them go on."""
    async with box.held() as held:
        await held.box.resume()
        return held.told()


@router.get("/{id}/network")
async def tell_network(box: TheBox) -> NetworkRecord:
    """What it may reach now."""
    async with box.used() as one:
        return await one.network.show()


@router.put("/{id}/network")
async def change_network(body: ChangeNetwork, box: TheBox) -> NetworkRecord:
    """Changes what it may reach, at once: open connections to hosts that are no longer allowed are cut."""
    async with box.used() as one:
        return await one._change_network(box.may_reach(body.change()))


@router.post("/{id}/run", response_model=Executed, responses=ACCEPTED)
async def run_in_sandbox(
    id: str, body: SandboxTurn, request: Request, sessions: TheSessions, box: TheBox, idempotency_key: Key = None
) -> Response:
    """One command or snippet, beside whatever runs there."""
    box.sandboxes.get(id, box.caller)
    run = await sessions.run(
        id, box.caller, code=body.code, command=list(body.command) if body.command else None, path=body.path,
        key=idempotency_key or "", **body.options(),
    )  # fmt: skip
    return await answer(run, request, wait=body.wait, key=idempotency_key)
