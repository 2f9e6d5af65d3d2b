"""Routes of runs, their logs and figures, and of what this server is and can do."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response, WebSocket
from fastapi.responses import PlainTextResponse

from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.values import MIB, Moment
from belljar.protocol.records import RunRecord, SandboxMetrics, State
from belljar.protocol.responses import Alive, BackendLanguage, LogPage, Readiness, SeenImage
from belljar.service import image_list
from belljar.service.auth import gate
from belljar.service.http import streams
from belljar.service.http.dependencies import (
    BoundedRoute,
    Reader,
    Runner,
    TheService,
    TheSessions,
    headers_of,
    record_answer,
)
from belljar.service.telemetry.log_lines import with_gaps
from belljar.service.telemetry.metrics import CONTENT_TYPE

router: APIRouter = APIRouter(prefix="/api/sandbox", tags=["runs"], route_class=BoundedRoute)
about: APIRouter = APIRouter(tags=["about"])

After = Annotated[int, Query(ge=0, le=2**62, description="the last number you have")]


@router.get("/runs")
async def list_runs(
    service: TheService, caller: Reader, state: State | None = None, language: str | None = None,
    before: Annotated[Moment | None, Query(allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> list[RunRecord]:  # fmt: skip
    """Your runs, the newest first, without their results."""
    return await service.queries.history(caller, state=state, language=language, before=before, limit=limit)


@router.get("/runs/{id}", response_model=RunRecord)
async def inspect_run(id: str, service: TheService, caller: Reader) -> Response:
    """One run, with its result or its problem when it is over."""
    return record_answer(*await service.queries.inspect(id, caller))


@router.post("/runs/{id}/cancel", response_model=RunRecord)
async def cancel_run(id: str, service: TheService, caller: Runner) -> Response:
    """End it and everything it started; what it had printed is kept."""
    await service.cancel(id, caller)
    return record_answer(*await service.queries.inspect(id, caller))


@router.get("/{id}/logs", response_model=LogPage, responses={200: {"content": {"text/event-stream": {}}}})
async def read_logs(
    id: str, request: Request, service: TheService, caller: Reader, after: After = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", pattern=r"^\d{1,18}$")] = None,
) -> Any:  # fmt: skip
    """The lines after a number. Asked for `text/event-stream`, the answer goes on to the end of the run."""
    record = await service.queries.record(id, caller)
    if "text/event-stream" in request.headers.get("accept", ""):
        return streams.Listener(service, id, caller, request.headers, max(after, int(last_event_id or 0)))
    await service.store.flush(id)
    lines = await service.store.lines(id, after, limit, room=8 * MIB)
    return LogPage(lines=tuple(with_gaps(after, lines)), state=record.state)


@router.websocket("/{id}/logs")
async def watch_logs(socket: WebSocket, id: str, service: TheService, after: After = 0) -> None:
    """One line a message; the socket is closed with the run's state as the reason when it is over."""
    headers = headers_of(socket)
    caller = await gate.admit(service, headers, "read")
    await service.queries.record(id, caller)
    await streams.watch(service, id, caller, headers, after, socket)


@router.get("/{id}/metrics")
async def read_metrics(
    id: str,
    service: TheService,
    sessions: TheSessions,
    caller: Reader,
    after: Annotated[Moment, Query(allow_inf_nan=False)] = 0,
) -> SandboxMetrics:
    """What a sandbox used, second by second, and what was alarming about it: of a run, or of an open session."""
    id = id if sessions.holds(id, caller) else (await service.queries.record(id, caller)).box
    await service.store.flush(id)
    samples = await service.store.samples(id, after)
    latest = service.sampler.latest(id) or (samples[-1] if samples else None)
    return SandboxMetrics.of(id, latest, samples, await service.store.alerts(id))


# --- about the server ---


@about.get("/api/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def watch_events(request: Request, service: TheService, sessions: TheSessions, caller: Reader) -> Response:
    """What happens to your runs from now on, as server-sent events: running, started, limit, denied, alert, ended."""
    if "text/event-stream" not in request.headers.get("accept", ""):
        raise errors.InvalidRequest("events: they are told as they come", fix="send Accept: text/event-stream")
    return streams.EventListener(service, sessions, caller, request.headers)


@about.get("/api/languages")
async def languages(service: TheService, caller: Reader) -> list[BackendLanguage]:
    """What can be run here, and by which backend."""
    return [
        BackendLanguage(backend=name, **row.model_dump()) for name, row in await service.engine.supported_languages()
    ]


@about.get("/api/backends")
async def backends(service: TheService, caller: Reader) -> list[Capabilities]:
    """Every backend: does it work here, why not, and what it guarantees."""
    return [offer.model_copy(update={"modules": None}) for offer in await service.engine.backends()]


@about.get("/api/images")
async def images(service: TheService, caller: Reader) -> list[SeenImage]:
    """Images of this server's container engines, as last seen."""
    return await image_list.images(service.engine, service.store)


@about.get("/healthz")
async def alive() -> Alive:
    """This process answers."""
    return Alive()


@about.get("/readyz", responses={503: {"description": "it cannot run anything now"}})
async def ready(request: Request, response: Response) -> Readiness:
    """A real tiny run on the default backend, not older than some seconds."""
    told: Readiness = await request.app.state.health.look()
    response.status_code = 200 if told.ready else 503
    return told


@about.get("/metrics", response_class=PlainTextResponse)
async def prometheus(service: TheService, caller: Reader) -> Response:
    """For Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)
