"""The MCP server over streamable HTTP: `mcp_app` for an application's lifespan, and `entrance` for its route `/mcp`.

Every request says who it is from, by the same rules as the rest of the API: without a credential that we know, a 401.
What that caller may do is each tool's question. An MCP session belongs to who began it: for others it does not exist.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.mcpserver import Context
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from belljar.core import errors
from belljar.core.settings import Settings
from belljar.protocol.records import SCOPES, Caller
from belljar.service.auth import gate
from belljar.service.http.guard import Guard, problem
from belljar.service.http.streams import still_known
from belljar.service.mcp.calls import OperatorGrants, granted
from belljar.service.mcp.server import create_server
from belljar.service.previews.previews import Previews
from belljar.service.service import Service
from belljar.service.sessions import Sessions
from belljar.service.telemetry.log_lines import BEAT

PATH = "/mcp"
_CALLER = "belljar.caller"  # in the scope of a request that was authenticated


class McpApp:
    """An ASGI callable, while `mcp_app` is open."""

    def __init__(
        self, service: Service, sessions: Sessions, grants: OperatorGrants | None = None,
        previews: Previews | None = None,
    ) -> None:  # fmt: skip
        self._service = service
        server = create_server(service, sessions, _caller_of, grants=grants, previews=previews)
        server.streamable_http_app(  # makes the transport, which is all that is wanted of it
            max_request_body_size=service.settings.service.request_size,
            # `guard` is in front of everything that listens, and knows the hosts and origins of the settings.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        self.transport: StreamableHTTPSessionManager = server.session_manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = await gate.admit(self._service, Headers(scope=scope), *SCOPES)  # one of them is enough
        except errors.BelljarError as error:
            await _refuse(error, send)
            return
        scope["caller"] = caller  # who is charged for the body
        token = AccessToken(token="", client_id=f"{caller.name}\0{caller.key}", scopes=sorted(caller.scopes))
        known = {**scope, _CALLER: caller, "user": AuthenticatedUser(token)}
        if scope["method"] == "GET":
            await self._listen(known, receive, send)
        elif whole := await _read_whole(known, receive):
            await self.transport.handle_request(known, whole, send)

    async def _listen(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that only listens does so for hours: it must not hold up a server that wants to leave, nor outlive
        its key."""
        open_answer = False

        async def watched(message: Message) -> None:
            nonlocal open_answer
            open_answer = message["type"] == "http.response.start" or bool(message.get("more_body"))
            await send(message)

        async def leave() -> None:
            while not self._service.drain.drained.is_set() and await still_known(self._service, Headers(scope=scope)):
                with anyio.move_on_after(BEAT):
                    await self._service.drain.drained.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await self.transport.handle_request(scope, receive, watched)
            tasks.cancel_scope.cancel()
        if open_answer:
            with suppress(OSError):
                await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def mcp_app(
    service: Service, sessions: Sessions, grants: OperatorGrants | None = None, previews: Previews | None = None
) -> AsyncIterator[McpApp]:
    """For a lifespan: `async with mcp_app(service, sessions) as app.state.mcp`.

    Args:
        service: what runs things.
        sessions: what callers hold open.
        grants: of its operator.
        previews: those of the service.
    """
    app = McpApp(service, sessions, grants, previews)
    async with app.transport.run():
        yield app


class _Entrance:
    """An object, for a function would be taken for one that wants a `Request`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["app"].state.mcp(scope, receive, send)


entrance: _Entrance = _Entrance()  # exactly at PATH: a mount would send clients on to PATH/ first


def _caller_of(ctx: Context[Any, Any]) -> Caller:
    found = ctx.request_context.request
    caller = found.scope.get(_CALLER) if found is not None else None
    if caller is None:  # every request was authenticated before
        raise errors.Unauthorized("nobody knows who asks", fix="please report this")
    return cast(Caller, caller)


async def _read_whole(scope: Scope, receive: Receive) -> Receive | None:
    """Reads a body, and returns what gives it to the library; None if the client hung up: that takes it for a bug."""
    try:
        told: list[Message] = [{"type": "http.request", "body": await Request(scope, receive).body()}]
    except ClientDisconnect:
        return None

    async def replay() -> Message:
        return told.pop() if told else await receive()

    return replay


async def _refuse(error: errors.BelljarError, send: Send) -> None:
    told = problem(error)
    body = json.dumps(told).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, errors.Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": told["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})


def create_app(settings: Settings, grants: OperatorGrants | None = None) -> Starlette:
    """MCP alone, behind the same guard as the whole service."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service = Service(settings)
        sessions = Sessions(service)
        app.state.service = service
        async with service, sessions, mcp_app(service, sessions, grants) as app.state.mcp:
            yield

    granted(grants.hosts if grants else ())  # what makes no sense is said before anything is started
    app = Starlette(routes=[Route(PATH, entrance)], lifespan=lifespan)
    app.add_middleware(Guard, settings=settings)
    return app
