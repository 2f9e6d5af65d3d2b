"""Routes of previews: started, looked at, given more time and stopped; and links to ports of living sandboxes."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request
from starlette.requests import HTTPConnection

from belljar.protocol.previews import ExposedPort, ExposePort, ExtendPreview, PreviewRecord, StartPreview
from belljar.service.http.dependencies import BoundedRoute, SessionHolder, TheRequest
from belljar.service.http.preview_hosts import addresses
from belljar.service.http.request_log import note
from belljar.service.http.sandboxes.box import TheBox
from belljar.service.http.sandboxes.ports import Port
from belljar.service.previews.previews import HeldPreview, Previews

router: APIRouter = APIRouter(tags=["previews"], route_class=BoundedRoute)


async def _previews(connection: HTTPConnection) -> Previews:
    return cast(Previews, connection.app.state.previews)


ThePreviews = Annotated[Previews, Depends(_previews)]


@router.post("/api/sandbox/preview", status_code=201)
async def start_preview(
    body: StartPreview, request: Request, previews: ThePreviews, caller: SessionHolder, sent: TheRequest
) -> PreviewRecord:
    """A project's server in a sandbox, seen in a browser."""

    async def start() -> PreviewRecord:
        return _told(request, previews, await previews.start(caller, body))

    told = await sent.once(start, lambda record: record.container_id)
    note(request.scope, run=told.container_id)
    return told


@router.get("/api/sandbox/preview/{id}")
async def inspect_preview(id: str, request: Request, previews: ThePreviews, caller: SessionHolder) -> PreviewRecord:
    """How it is, and the last lines that it wrote; also after its end."""
    return _told(request, previews, previews.find(id, caller))


@router.delete("/api/sandbox/preview/{id}", status_code=204)
async def stop_preview(id: str, previews: ThePreviews, caller: SessionHolder) -> None:
    """Ends it: SIGTERM to its command, SIGKILL after its grace."""
    await previews.stop(id, caller)


@router.post("/api/sandbox/preview/{id}/extend")
async def extend_preview(
    id: str, body: ExtendPreview, request: Request, previews: ThePreviews, caller: SessionHolder
) -> PreviewRecord:
    """Moves the end of its time."""
    return _told(request, previews, previews.extend(id, caller, body.seconds))


@router.post("/api/sandboxes/{id}/ports/{port}/expose", status_code=201)
async def expose_port(
    body: ExposePort, request: Request, box: TheBox, port: Port, previews: ThePreviews
) -> ExposedPort:
    """A link by which whoever has it sees a port of a living sandbox in a browser."""
    async with box.held() as held:
        label, until = await previews.expose(held, port, body.seconds)
    await box.sandboxes.service.engine.record("link", run=box.id, path=f"port {port}", method="ANY")
    url, path = addresses(request, label)
    return ExposedPort(url=url, path_url=path, port=port, expires=until)


def _told(request: Request, previews: Previews, held: HeldPreview) -> PreviewRecord:
    return previews.told(held, *addresses(request, held.label))
