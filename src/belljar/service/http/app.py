"""HTTP and WebSocket: routes that parse, ask and answer. What they ask is `service` and `sessions`.

Three kinds of failure, kept apart: a guest's own is a 200 with its status; a refusal is a 4xx of kind policy_denied,
unauthorized or busy; our own failure is a 5xx. Every error is a problem (RFC 9457).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from importlib.util import find_spec
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar.core import errors
from belljar.core.model import fields_at
from belljar.core.settings import Settings
from belljar.core.version import __version__
from belljar.protocol.responses import Problem
from belljar.service.auth import gate
from belljar.service.health import Health
from belljar.service.http import execute, pages, previews, runs, tests
from belljar.service.http import sessions as api_sessions
from belljar.service.http.guard import Guard, problem, retry_header
from belljar.service.http.openapi import Documented
from belljar.service.http.request_log import RequestLog, note_error
from belljar.service.http.sandboxes import routes as living
from belljar.service.previews.previews import Previews
from belljar.service.sandboxes.sandboxes import Sandboxes
from belljar.service.service import Service
from belljar.service.sessions import Sessions
from belljar.service.telemetry.server_log import ServerLog

_log = logging.getLogger("belljar")
_MCP = find_spec("mcp") is not None
_TOLD = 20  # mistakes of one request
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}  # the spans and figures are ours
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": what, "content": {"application/problem+json": {}}}
    for status, what in (
        (400, "not HTTP, or not JSON"),
        (401, "nobody knows who asks"), (403, "refused"), (404, "there is no such thing"),
        (409, "not in this state"), (410, "it has ended"),
        (413, "larger than the server takes"), (422, "the request makes no sense"),
        (429, "over a quota: Retry-After says when"), (499, "aborted"), (500, "our failure"),
        (503, "not available, or busy: Retry-After says when"), (504, "an engine did not answer"),
    )
}  # fmt: skip


class _Application(Documented):
    """An application whose outermost layer logs: outside of what answers for bugs, so that they are logged too."""

    log: ServerLog | None = None

    def build_middleware_stack(self) -> ASGIApp:
        return RequestLog(super().build_middleware_stack(), self.log)


def create_app(settings: Settings, log: ServerLog | None = None) -> FastAPI:
    """The whole service as an ASGI application; its lifespan opens and closes everything.

    Args:
        settings: What it does.
        log: Where each request gets its line; None: nowhere.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(settings)
        sessions = Sessions(service)
        app.state.service, app.state.sessions, app.state.health = service, sessions, Health(service)
        app.state.sandboxes = Sandboxes(service, sessions, lasting=True)
        app.state.previews = Previews(service, sessions, app.state.sandboxes)
        service.metrics.show("log_dropped", lambda: log.dropped if log else 0)
        async with service, sessions, _models(service, sessions, app.state.previews) as app.state.mcp:
            await app.state.sandboxes.find_again()
            yield

    app = _Application(
        title="Belljar", version=__version__, lifespan=lifespan, responses=_PROBLEMS,
        docs_url=None, redoc_url=None, openapi_url="/openapi.json", telemetry=_NO_TELEMETRY,
        description="Runs code that nobody has read yet, where it can do no harm, and returns a typed answer.",
    )  # fmt: skip
    app.log = log
    execute.add_route(app)
    app.include_router(tests.router)
    app.include_router(previews.router)  # before what takes any id
    app.include_router(runs.router)
    app.include_router(api_sessions.router)
    for routes in living.ROUTERS:
        app.include_router(routes)
    app.include_router(runs.about)
    app.include_router(pages.router)
    if _MCP:
        from belljar.service.mcp.http import PATH, entrance

        app.router.routes.append(Route(PATH, entrance, include_in_schema=False))
    app.add_exception_handler(errors.BelljarError, _refuse)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(_Authentication)  # behind the guard
    app.add_middleware(Guard, settings=settings)
    return app


class _Authentication:
    """Who asks is known before a byte of a body is read: FastAPI parses it before it looks at a dependency."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/api/"):
            try:
                scope["caller"] = await gate.known(scope["app"].state.service, Headers(scope=scope))
            except errors.BelljarError as error:
                note_error(scope, error)
                await _answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _models(service: Service, sessions: Sessions, shown: Previews) -> AbstractAsyncContextManager[Any]:
    """What answers MCP, where its library is installed."""
    if not _MCP:
        return nullcontext()
    from belljar.service.mcp.http import mcp_app

    return mcp_app(service, sessions, previews=shown)


def _answer(error: errors.BelljarError) -> Response:
    headers = {name.decode(): value.decode() for name, value in retry_header(error)}
    if isinstance(error, errors.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem(error), error.http_status, headers=headers, media_type="application/problem+json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.BelljarError)
    note_error(request.scope, error)
    return _answer(error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = list(islice(error.errors(), _TOLD))
    told, fix, model = [], "", _body_of(request)
    for item in found:
        steps = [step for step in item["loc"] if step not in ("body", "query", "path")] or ["body"]
        where = ".".join(map(str, steps))
        message = f"{where}: {str(item['msg']).removeprefix('Value error, ')}"
        if item["type"] == "extra_forbidden" and model:
            message, fix = errors.unknown_name(where, fields_at(model, steps[:-1]))
        if steps == ["body"] and item["type"] == "model_attributes_type":
            message, fix = "body: is no JSON object", "send one, with the header content-type: application/json"
        told.append(message)
    fields = [".".join(map(str, item["loc"])) for item in found]
    return _answer(errors.InvalidRequest("; ".join(told), fix=fix, context={"fields": fields}))


def _body_of(request: Request) -> type[BaseModel] | None:
    """The model of the body that the route of a request takes."""
    params = getattr(getattr(request.scope.get("route"), "dependant", None), "body_params", ())
    kinds = [param.field_info.annotation for param in params]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = Problem(title=error.detail, status=error.status_code, detail=error.detail, kind="http")
    body = told.model_dump(mode="json")
    return JSONResponse(body, error.status_code, headers=error.headers, media_type="application/problem+json")


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this: the client hung up, or the guard has answered. The guard has logged it."""
    return Response(status_code=400)


async def _bug(request: Request, error: Exception) -> Response:
    _log.exception("a bug of ours in %s %s", request.method, request.scope.get("route"))
    return _answer(
        errors.ExecutionFailed("something broke in Belljar itself", fix="its log says what: please report it")
    )
