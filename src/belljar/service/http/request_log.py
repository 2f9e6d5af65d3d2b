"""The outermost layer of HTTP: every request gets an id, one line of the log, and its place in the figures."""

from __future__ import annotations

import re
import secrets
import time
from itertools import count
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar.core import errors
from belljar.service.telemetry.metrics import Metrics
from belljar.service.telemetry.server_log import ServerLog, request_id

_HEADER = b"x-request-id"
_GIVEN = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STARTS = frozenset(("http.response.start", "websocket.http.response.start"))
_SWITCHED = 101  # the status of a WebSocket that was accepted
_HUNG_UP = 499  # what is logged for a client that went away before it was answered
_QUIET = frozenset(("/healthz", "/readyz", "/metrics"))  # asked every few seconds: of level debug, if all is well
_REFUSED = frozenset((401, 403, 408, 413, 429, 503))
_LONGEST_TEXT = 300  # characters of a path or a message
_PROCESS = secrets.token_hex(4)
_numbers = count(1)


def note(scope: Any, **facts: Any) -> None:
    """Adds to the line that will be logged for a request, such as the run that it started."""
    scope.setdefault("belljar.noted", {}).update(facts)


def note_error(scope: Any, error: errors.BelljarError) -> None:
    """Has the line for a request say why it was refused, or what failed."""
    note(scope, kind=error.kind, detail=error.message[:_LONGEST_TEXT])


class RequestLog:
    """Wraps an application. The id of a request is the caller's `X-Request-Id` if that makes sense, else one of ours.

    Args:
        app: What answers.
        log: Where the lines go; None: nowhere.
    """

    def __init__(self, app: ASGIApp, log: ServerLog | None) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        request_id.set(exchange.id)
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            self._tell(scope, exchange)

    def _tell(self, scope: Scope, exchange: _Exchange) -> None:
        seconds = time.perf_counter() - exchange.began
        method = scope.get("method", "WEBSOCKET")
        service = getattr(scope["app"].state, "service", None)
        if service is not None:
            metrics: Metrics = service.metrics
            metrics.answered(method, _route(scope), exchange.status, seconds)
        level = _level(exchange.status, scope["path"])
        if self._log is None or not self._log.wants(level):
            return
        facts: dict[str, Any] = scope.get("belljar.noted", {})
        caller, client = scope.get("caller"), scope.get("client")
        self._log.line(
            level, "request", request_id=exchange.id, method=method, path=scope["path"][:_LONGEST_TEXT],
            status=exchange.status, ms=round(seconds * 1000, 1), client=client[0] if client else None,
            **({"caller": caller.name} if caller else {}), **facts,
        )  # fmt: skip


class _Exchange:
    """One request and its answer, as seen from outside."""

    __slots__ = ("_send", "began", "id", "status")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.began = time.perf_counter()
        self.status = _HUNG_UP
        self.id = _given(scope["headers"]) or f"{_PROCESS}-{next(_numbers):06x}"

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in _STARTS or kind == "websocket.accept":
            self.status = message.get("status", _SWITCHED)
            headers = [*(message.get("headers") or ()), (_HEADER, self.id.encode())]
            message = {**message, "headers": headers}
        elif kind == "websocket.close" and self.status == _HUNG_UP:  # refused, where no reason can be sent
            self.status = 403
        await self._send(message)


def _given(headers: Any) -> str:
    for name, value in headers:
        if name == _HEADER:
            return value.decode("ascii") if _GIVEN.fullmatch(value) else ""
    return ""


def _route(scope: Scope) -> str:
    """The pattern that a path was matched by: no label takes a caller's word."""
    return getattr(scope.get("route"), "path", "")


def _level(status: int, path: str) -> str:
    if status < 400:
        return "debug" if path in _QUIET else "info"
    if status in _REFUSED:
        return "warning"
    return "error" if status >= 500 else "info"
