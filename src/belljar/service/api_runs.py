"""Routes of runs, their logs and figures, and of what this server is and can do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Query, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import Headers

from belljar import errors
from belljar.models import Capabilities, Result
from belljar.service import catalogue
from belljar.service.bodies import Execute, Executed, Figures, LogPage
from belljar.service.observe import CONTENT_TYPE
from belljar.service.records import LogLine, RunRecord, State
from belljar.service.routes import Parsed, Reader, Runner, TheService, headers_of
from belljar.service.run import Run
from belljar.values import MIB

router = APIRouter(prefix="/api/sandbox", tags=["runs"], route_class=Parsed)
about = APIRouter(tags=["about"])

After = Annotated[int, Query(ge=0, le=2**62, description="the last number you have")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
_BEAT = 15.0  # seconds after which a quiet stream says that it is alive


@router.post("/execute", responses={202: {"model": RunRecord, "description": "with wait=false: taken in"}})
async def execute(
    body: Execute, request: Request, service: TheService, caller: Runner, idempotency_key: Key = None
) -> Executed:
    """Run a snippet or a command in a sandbox of its own. A guest that fails is an answer like any other."""
    run = await service.submit(body.request(), caller, key=idempotency_key or "", cached=body.cached)
    if not body.wait:
        return JSONResponse(run.record.model_dump(mode="json"), 202)  # type: ignore[return-value]
    result = await _result(run, request, stop=not idempotency_key)
    return Response(_with_id(result, run.id), media_type="application/json")  # type: ignore[return-value]


async def _result(run: Run, request: Request, *, stop: bool) -> Result:
    """The result; a client that goes away ends what only it wanted."""

    async def watch() -> None:
        while not run.done.is_set():
            if (await request.receive())["type"] == "http.disconnect":
                run.stop()
                return

    if stop and not run.done.is_set():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await run.done.wait()
            tasks.cancel_scope.cancel()
    return await run.result()


def _with_id(result: Result, id: str) -> bytes:
    text = result.model_dump_json()
    return f'{{"id":"{id}",{text[1:]}'.encode()


@router.get("/runs")
async def list_runs(
    service: TheService, caller: Reader, state: State | None = None, language: str | None = None,
    before: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> list[RunRecord]:  # fmt: skip
    """Your runs, the newest first, without their results."""
    return await service.history(caller, state=state, language=language, before=before, limit=limit)


@router.get("/runs/{id}")
async def inspect_run(id: str, service: TheService, caller: Reader) -> RunRecord:
    """One run, with its result or its problem when it is over."""
    return await service.record(id, caller)


@router.post("/runs/{id}/cancel")
async def cancel_run(id: str, service: TheService, caller: Runner) -> RunRecord:
    """End it and everything it started; what it had printed is kept."""
    return await service.cancel(id, caller)


@router.get("/{id}/logs", response_model=LogPage, responses={200: {"content": {"text/event-stream": {}}}})
async def read_logs(
    id: str, request: Request, service: TheService, caller: Reader, after: After = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", pattern=r"^\d{1,18}$")] = None,
) -> Any:  # fmt: skip
    """The lines after a number. Asked for `text/event-stream`, the answer goes on to the end of the run."""
    record = await service.record(id, caller)
    if "text/event-stream" in request.headers.get("accept", ""):
        lines = _while_known(service, request.headers, service.follow(id, caller, max(after, int(last_event_id or 0))))
        stack = ExitStack()
        stack.enter_context(service.listening(caller))
        return _Stream(_events(service, id, lines, caller), stack)
    await service.store.flush(id)
    return LogPage(lines=tuple(await service.store.lines(id, after, limit, room=8 * MIB)), state=record.state)


class _Stream(StreamingResponse):
    """Gives its place back however it ends, even before the first line."""

    def __init__(self, events: AsyncIterator[str], stack: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._stack:
            await super().__call__(scope, receive, send)


async def _events(
    service: TheService, id: str, batches: AsyncIterator[list[LogLine]], caller: Reader
) -> AsyncIterator[str]:
    async for batch in _beating(batches):
        if not batch:
            yield ": alive\n\n"
        yield "".join(f"id: {line.number}\ndata: {line.model_dump_json()}\n\n" for line in batch)
    record = await service.record(id, caller)
    if record.final:  # else we go away, and another tells the rest
        yield f"event: end\ndata: {record.state}\n\n"


async def _while_known(
    service: TheService, headers: Headers, batches: AsyncIterator[list[LogLine]]
) -> AsyncIterator[list[LogLine]]:
    """A key that was revoked meanwhile ends a stream, too."""
    async for batch in batches:
        try:
            await service.access.caller(headers, "read")
        except errors.BelljarError:
            return
        yield batch


async def _beating(batches: AsyncIterator[list[LogLine]]) -> AsyncIterator[list[LogLine]]:
    """The same, with an empty one whenever there was nothing for a while: a proxy must not think us dead."""
    send, receive = anyio.create_memory_object_stream[list[LogLine]](1)

    async def pump() -> None:
        async with send:
            async for batch in batches:
                await send.send(batch)

    async with anyio.create_task_group() as tasks, receive:
        tasks.start_soon(pump)
        while True:
            batch: list[LogLine] = []
            try:
                with anyio.move_on_after(_BEAT):
                    batch = await receive.receive()
            except anyio.EndOfStream:
                return
            yield batch


@router.websocket("/{id}/logs")
async def watch_logs(socket: WebSocket, id: str, service: TheService, after: After = 0) -> None:
    """One line a message; the socket is closed with the run's state as the reason when it is over."""
    headers = headers_of(socket)
    caller = await service.access.caller(headers, "read")
    await service.record(id, caller)
    with service.listening(caller), suppress(WebSocketDisconnect):
        await socket.accept(subprotocol=service.access.subprotocol(headers))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_gone, socket, tasks.cancel_scope)
            async for batch in _while_known(service, headers, service.follow(id, caller, after)):
                for line in batch:
                    await socket.send_text(line.model_dump_json())
            record = await service.record(id, caller)
            await socket.close(1000 if record.final else 1012, record.state)  # 1012: we go away, another tells the rest
            tasks.cancel_scope.cancel()


async def _until_gone(socket: WebSocket, scope: anyio.CancelScope) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
    scope.cancel()


@router.get("/{id}/metrics")
async def read_metrics(id: str, service: TheService, caller: Reader, after: float = 0) -> Figures:
    """What a sandbox used, second by second, and what was alarming about it."""
    await service.record(id, caller)
    await service.store.flush(id)
    samples = await service.store.samples(id, after)
    latest = service.sampler.latest(id) or (samples[-1] if samples else None)
    return Figures(container_id=id, latest=latest, samples=tuple(samples), alerts=tuple(await service.store.alerts(id)))


# --- about the server ---


@about.get("/api/languages")
async def languages(service: TheService, caller: Reader) -> list[dict[str, Any]]:
    """What can be run here, and by which backend."""
    available = [offer.backend for offer in await service.engine.offers() if offer.available]
    rows = [(name, row) for name in available for row in await service.engine.spoken(name)]
    return [{"backend": name, **row.model_dump(mode="json")} for name, row in rows]


@about.get("/api/backends")
async def backends(service: TheService, caller: Reader) -> list[Capabilities]:
    """Every backend: does it work here, why not, and what it guarantees."""
    return [offer.model_copy(update={"modules": None}) for offer in await service.engine.offers()]


@about.get("/api/images")
async def images(service: TheService, caller: Reader) -> list[dict[str, Any]]:
    """Images of this server's container engines, as last seen."""
    return await catalogue.images(service.engine, service.store)


@about.get("/healthz")
async def alive() -> dict[str, str]:
    """This process answers."""
    return {"status": "alive"}


@about.get("/readyz", responses={503: {"description": "it cannot run anything now"}})
async def ready(request: Request, response: Response) -> dict[str, Any]:
    """A real tiny run on the default backend, not older than some seconds."""
    told: dict[str, Any] = await request.app.state.health.look()
    response.status_code = 200 if told["ready"] else 503
    return told


@about.get("/metrics", response_class=PlainTextResponse)
async def prometheus(service: TheService, caller: Reader) -> Response:
    """For Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)
