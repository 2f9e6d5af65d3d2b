"""`POST /api/sandbox/execute`: the route that is asked so often that its own time counts.

FastAPI describes it, by the signature of `execute`, and does not run it: `ExecuteRoute` gives the endpoint its
arguments itself, and takes the body from its bytes to a checked request in one step.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import StringConstraints, TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from belljar.core import errors
from belljar.protocol.requests import Execute
from belljar.protocol.responses import Executed
from belljar.service.http.dependencies import (
    ACCEPTED,
    Allowed,
    Key,
    Runner,
    TheService,
    answer,
    read_body,
)

_runner = Allowed("run")
_key = TypeAdapter(Annotated[str, StringConstraints(min_length=1, max_length=255)])  # as `Key` has it


class ExecuteRoute(APIRoute):
    """A route that reads caller, key and body itself: FastAPI's own way to an endpoint takes a quarter millisecond."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; whoever asks with another method than POST is told so by the base class."""
        if scope["method"] != "POST":
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        service = request.app.state.service
        caller = await _runner(request, service)
        key = _idempotency_key(request)
        body = _parse(request.headers.get("content-type", ""), await read_body(request))
        response = await execute(body, request, service, caller, key)
        await response(scope, receive, send)


async def execute(
    body: Execute, request: Request, service: TheService, caller: Runner, idempotency_key: Key = None
) -> Response:
    """Run a snippet or a command in a sandbox of its own. A guest that fails is an answer like any other."""
    run = await service.submit(await service.asked(body, caller), caller, key=idempotency_key or "", cached=body.cached)
    return await answer(run, request, wait=body.wait, key=idempotency_key)


def add_route(app: FastAPI) -> None:
    """Adds the route to an application: to its own router, since one that is included is searched a second time."""
    app.router.add_api_route(
        "/api/sandbox/execute", execute, methods=["POST"], response_model=Executed, responses=ACCEPTED, tags=["runs"],
        route_class_override=ExecuteRoute,
    )  # fmt: skip


def _idempotency_key(request: Request) -> str | None:
    given = request.headers.get("idempotency-key")
    try:
        return None if given is None else _key.validate_python(given)
    except ValidationError as error:
        raise _invalid(error, "header", "Idempotency-Key") from None


def _parse(content_type: str, body: bytes) -> Execute:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise errors.InvalidRequest("body: it is not JSON", fix="send it with Content-Type: application/json")
    try:
        return Execute.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, "body") from None


def _invalid(error: ValidationError, *where: str) -> RequestValidationError:
    return RequestValidationError([{**item, "loc": (*where, *item["loc"])} for item in error.errors(include_url=False)])
