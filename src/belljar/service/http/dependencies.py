"""What every route needs: the service behind the application, and a caller who may ask."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from fastapi import Depends, Header, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from belljar.core import errors
from belljar.protocol.records import Caller, RunRecord, Scope
from belljar.service.auth import gate
from belljar.service.claims import SessionClaims
from belljar.service.http.request_log import note
from belljar.service.run_lifecycle import Run
from belljar.service.service import Service
from belljar.service.sessions import Sessions
from belljar.service.store.result_text import LargeText
from belljar.service.store.tables import as_json

T = TypeVar("T")


# Coroutines, though they wait for nothing: FastAPI sends plain functions to a thread, which takes a millisecond.
async def _service(connection: HTTPConnection) -> Service:
    return cast(Service, connection.app.state.service)


async def _sessions(connection: HTTPConnection) -> Sessions:
    return cast(Sessions, connection.app.state.sessions)


TheService = Annotated[Service, Depends(_service)]
TheSessions = Annotated[Sessions, Depends(_sessions)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]


def headers_of(connection: HTTPConnection) -> Headers:
    """All of them: what a WebSocket offers as its subprotocols, the server has taken out of its headers."""
    offered = ", ".join(connection.scope.get("subprotocols") or ())
    if not offered or "sec-websocket-protocol" in connection.headers:
        return connection.headers
    return Headers(raw=[*connection.headers.raw, (b"sec-websocket-protocol", offered.encode("latin-1"))])


_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRUCTURE_BYTES = 1 << 20  # of JSON besides its texts: each empty list is three bytes, and sixty as an object


async def read_body(request: Request) -> bytes:
    """Returns the body of a request that takes JSON.

    Raises:
        InvalidRequest: It holds more structure than any request has: 64 MB of brackets would be gigabytes of lists.
    """
    body = await request.body()
    if len(body) > _STRUCTURE_BYTES and len(_STRINGS.sub(b"", body)) > _STRUCTURE_BYTES:
        raise errors.InvalidRequest("the body is no request: more of it is structure than any has")
    return body


class Allowed:
    """A dependency of routes: returns who asks, if they have the scope."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def __call__(self, connection: HTTPConnection, service: TheService) -> Caller:
        caller = connection.scope.get("caller") or await gate.known(service, connection.headers)
        await gate.require(service, caller, self._scope)
        return cast(Caller, caller)


class BoundedRoute(APIRoute):
    """A route that takes JSON: asks whether the caller may, and looks at the body, before FastAPI parses it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns what Starlette calls for each request."""
        handle, checks = super().get_route_handler(), list(_checks(self.dependant))

        async def bounded(request: Request) -> Response:
            if request.method == "POST":
                for check in checks:
                    await check(request, request.app.state.service)
                await read_body(request)
            return await handle(request)

        return bounded


def _checks(dependant: Dependant) -> Iterator[Allowed]:
    """Yields what a route's parameters ask of its caller."""
    for part in dependant.dependencies:
        if isinstance(part.call, Allowed):
            yield part.call
        yield from _checks(part)


Runner = Annotated[Caller, Depends(Allowed("run"))]
Reader = Annotated[Caller, Depends(Allowed("read"))]
SessionHolder = Annotated[Caller, Depends(Allowed("sessions"))]
FileUser = Annotated[Caller, Depends(Allowed("files"))]


class Sent(NamedTuple):
    """A POST that makes something of a session: once, however often it comes with its idempotency key."""

    claims: SessionClaims
    caller: str
    key: str
    fingerprint: str

    async def once(self, work: Callable[[], Awaitable[T]], session: Callable[[T], str]) -> T:
        """What `work` returns; `session` tells from it whose answer that is."""
        if not self.key:
            return await work()
        return await self.claims.once(self.caller, self.key, self.fingerprint, work, session)


async def _sent(request: Request, sessions: TheSessions, caller: SessionHolder, idempotency_key: Key = None) -> Sent:
    key, path = idempotency_key or "", request.url.path.encode()
    fingerprint = hashlib.sha256(path + b"\0" + await request.body()).hexdigest() if key else ""
    return Sent(sessions.claims, caller.name, key, fingerprint)


TheRequest = Annotated[Sent, Depends(_sent)]


ACCEPTED: dict[int | str, dict[str, Any]] = {202: {"model": RunRecord, "description": "with wait=false: taken in"}}


async def answer(run: Run, request: Request, *, wait: bool, key: str | None) -> Response:
    """Returns the result of a run as `Executed`, or with `wait=False` its record.

    A client that goes away ends a run that only it wanted: one without an idempotency key.
    """
    note(request.scope, run=run.id)
    if not wait:
        return JSONResponse(run.record.model_dump(mode="json"), 202)
    if not key and not run.done.is_set():
        stop_when_gone(run, request)
    await run.brief_result()
    if run.large:
        return StreamingResponse(_spliced(f'{{"id":"{run.id}",', run.large), media_type="application/json")
    return Response(f'{{"id":"{run.id}",{run.result_json[1:]}', media_type="application/json")


def record_answer(record: RunRecord, large: LargeText | None) -> Response:
    """Returns a run as JSON; a large result comes from where it lies, one part at a time."""
    if large is None:
        return Response(as_json(record), media_type="application/json")
    head = as_json(record, exclude=frozenset(("result",)))
    return StreamingResponse(_spliced(f'{head[:-1]},"result":{{', large, "}"), media_type="application/json")


async def _spliced(before: str, large: LargeText, after: str = "") -> AsyncIterator[bytes]:
    """Yields a large result with something in the place of its opening bracket, and something behind it."""
    parts = large.parts()
    yield before.encode() + (await anext(parts))[1:]
    async for part in parts:
        yield part
    yield after.encode()


def stop_when_gone(run: Run, request: Request) -> None:
    """Ends a run when its client goes away."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":  # said after an answer, too
            pass
        if not run.done.is_set():
            run.stop()

    request.app.state.service.start_soon(watch)
