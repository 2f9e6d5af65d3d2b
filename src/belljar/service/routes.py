"""What every route needs: the service behind the application, and a caller who may ask."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from belljar import audit
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
