"""What every route needs: the service behind the application, and a caller who may ask."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, cast

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from belljar import audit, errors
from belljar.service.core import Service
from belljar.service.records import Caller, Scope
from belljar.service.sessions import Sessions


# Coroutines, though they wait for nothing: FastAPI sends plain functions to a thread, which takes a millisecond.
async def _service(connection: HTTPConnection) -> Service:
    return cast(Service, connection.app.state.service)


async def _sessions(connection: HTTPConnection) -> Sessions:
    return cast(Sessions, connection.app.state.sessions)


TheService = Annotated[Service, Depends(_service)]
TheSessions = Annotated[Sessions, Depends(_sessions)]


def headers_of(connection: HTTPConnection) -> Headers:
    """All of them: what a WebSocket offers as its subprotocols, the server has taken out of its headers."""
    offered = ", ".join(connection.scope.get("subprotocols") or ())
    if not offered or "sec-websocket-protocol" in connection.headers:
        return connection.headers
    return Headers(raw=[*connection.headers.raw, (b"sec-websocket-protocol", offered.encode("latin-1"))])


_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRUCTURE = 1 << 20  # bytes of JSON besides its texts: each empty list is three bytes, and sixty as an object


class Parsed(APIRoute):
    """Of a route that takes JSON: sixty-four megabytes of brackets would be gigabytes of lists."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            if request.method == "POST":
                body = await request.body()
                if len(body) > _STRUCTURE and len(_STRINGS.sub(b"", body)) > _STRUCTURE:
                    raise errors.InvalidRequest("the body is no request: more of it is structure than any has")
            return await handle(request)

        return bounded


class Allowed:
    """A dependency: who asks, if they have the scope."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    async def __call__(self, connection: HTTPConnection, service: TheService) -> Caller:
        caller = await service.access.caller(connection.headers, self._scope)
        audit.caller.set(caller.name)
        return caller


Runner = Annotated[Caller, Depends(Allowed("run"))]
Reader = Annotated[Caller, Depends(Allowed("read"))]
SessionHolder = Annotated[Caller, Depends(Allowed("sessions"))]
FileUser = Annotated[Caller, Depends(Allowed("files"))]
