"""What a web page could do to a service on its reader's machine, and why it cannot. The outermost ASGI layer.

Host      must be a name of loopback or one of `service.hosts`: a page whose name was bound to 127.0.0.1 meanwhile (DNS
          rebinding) is same-origin to its browser, but asks under its own name. Only `GET /healthz` and `GET /readyz`
          are exempt: a kubelet asks by the pod's address, and they tell nothing. `/metrics` is not: it tells much.
Origin    where there is one, must be what was asked (same host and port) or one of `service.origins`, which then get
          CORS answers. There are no cookies, so no credentials are allowed to go along by themselves.
Fetch     `Sec-Fetch-Site` of another site counts on whatever changes something, even without an Origin.
Body      is counted and timed as it comes (`bodies`); Content-Length is believed only when it says "too much".
Answers   carry headers that keep browsers from running, framing, guessing at or keeping what guests made.

Previews  are for other hosts, or below `/preview/`: their proxy answers, and no route of the service (`previews`).

WebSockets are held to the same before they are accepted: browsers let any page open one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from belljar.core import errors, spelling
from belljar.core.settings import Settings
from belljar.service.http.bodies import GONE, AsgiMessage, Bodies, Body, Receive
from belljar.service.http.preview_hosts import Claimed, PreviewHosts
from belljar.service.http.request_log import note_error

Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LOOPBACK = frozenset(("localhost", "127.0.0.1", "[::1]"))
PROBES = frozenset(("/healthz", "/readyz"))
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_ALWAYS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
# `sandbox`: a file that a guest wrote and somebody opens in a browser must not be a page of our origin.
_API: Headers = [
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"cache-control", b"no-store"),
]
_ELSEWHERE: Headers = [(b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")]
_PREFLIGHT: Headers = [
    (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, DELETE"),
    (
        b"access-control-allow-headers",
        b"Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Mcp-Protocol-Version, Mcp-Session-Id, "
        b"X-API-Key, X-Request-Id",
    ),
    (b"access-control-max-age", b"600"),
]
_EXPOSED = (b"access-control-expose-headers", b"Location, Mcp-Session-Id, Retry-After, X-Request-Id")


class Authority(NamedTuple):
    """A host and a port as browsers write them; no port: the scheme's own."""

    host: str
    port: str

    @classmethod
    def parse(cls, text: str) -> Authority | None:
        host, port = text.lower(), ""
        if not host.endswith("]") and ":" in host:
            host, _, port = host.rpartition(":")
        inside = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        allowed = "0123456789abcdef:." if inside != host else "abcdefghijklmnopqrstuvwxyz0123456789-._"
        if not inside or len(text) > 300 or set(inside) - set(allowed) or (port and not port.isdecimal()):
            return None
        return cls(host.removesuffix("."), port)


class Guard:
    """`settings.service` says which hosts and origins, and how large a request may be."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._bodies = Bodies(settings.service)
        self._hosts = frozenset(_listed_host(text) for text in settings.service.hosts)
        self._origins = frozenset(_listed_origin(text) for text in settings.service.origins)
        self._previews = PreviewHosts(settings)

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        asked = _Asked(scope)
        claimed = self._previews.claimed(asked.host, scope["path"])
        if claimed is not None and self._is_for(claimed, asked):
            await self._previews.answer(scope, receive, send, asked.host, claimed)
            return
        answer = _Answer(scope, send, self._added(asked))
        try:
            self._check(asked)
        except errors.PolicyDenied as error:
            if scope["type"] == "websocket":
                await receive()  # the offer, before which nothing may be answered
            await answer.refuse(error)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, answer.send)
        elif asked.preflight and asked.origin in self._origins:
            await answer.send({"type": "http.response.start", "status": 204, "headers": list(_PREFLIGHT)})
            await answer.send({"type": "http.response.body"})
        else:
            await self._serve(scope, receive, answer)

    def _is_for(self, claimed: Claimed, asked: _Asked) -> bool:
        """Whether a request is for a preview, and not for a host of ours that is called like one."""
        authority = Authority.parse(asked.host)
        if authority is None:
            return False
        ours = authority in self._hosts or Authority(authority.host, "") in self._hosts
        return (ours or authority.host in LOOPBACK) if claimed.prefix else not ours

    def _check(self, asked: _Asked) -> None:
        self._check_host(asked)
        if asked.origin is not None and not asked.same_origin and asked.origin not in self._origins:
            raise errors.PolicyDenied(
                f"pages of {asked.origin[:100]!r} may not ask this service",
                fix="if they should, add that origin to service.origins",
                context={"setting": "service.origins"},
            )
        if not asked.safe and asked.fetch_site in ("cross-site", "same-site") and asked.origin not in self._origins:
            raise errors.PolicyDenied(
                "pages of another site may not ask this of the service",
                fix="if they should, add their origin to service.origins",
                context={"setting": "service.origins"},
            )

    def _check_host(self, asked: _Asked) -> None:
        if asked.probe:
            return
        authority = Authority.parse(asked.host)
        if authority is None:
            raise errors.PolicyDenied("the header Host is missing or not understood", fix="send one, once: name[:port]")
        if authority.host in LOOPBACK or authority in self._hosts or Authority(authority.host, "") in self._hosts:
            return
        raise errors.PolicyDenied(
            f"this service is not known as {authority.host[:100]!r}",
            fix=f'if it should be, add "{authority.host[:100]}" to service.hosts (or to BELLJAR_HOSTS)',
            context={"setting": "service.hosts"},
        )

    def _added(self, asked: _Asked) -> Headers:
        """What every answer carries."""
        headers = [*_ALWAYS, *(_API if asked.api else _ELSEWHERE)]
        if self._origins:
            headers.append((b"vary", b"Origin"))
        if asked.origin in self._origins:
            headers += [(b"access-control-allow-origin", asked.origin.encode("latin-1")), _EXPOSED]
        return headers

    async def _serve(self, scope: AsgiMessage, receive: Receive, answer: _Answer) -> None:
        """The app sees a body that ends with a disconnect where we refuse it, and what it says then is not sent."""
        length = _only(scope["headers"], b"content-length")
        try:
            self._bodies.check_declared(length, scope)
        except errors.InvalidRequest as refusal:
            await answer.refuse(refusal)
            return
        chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        body = answer.body = Body(scope, receive, self._bodies, has_body=chunked or length not in ("", "0"))

        async def bounded() -> AsgiMessage:
            try:
                return GONE if answer.refused else await body.receive()
            except errors.BelljarError as refusal:
                await answer.refuse(refusal)
                return GONE

        try:
            await self._app(scope, bounded, answer.send)
        except Exception:
            if not answer.refused:  # else it is the disconnect that it stumbled over, and the answer is out
                raise
        finally:
            body.close()


class _Asked:
    """What the headers of a request say."""

    def __init__(self, scope: AsgiMessage) -> None:
        headers = scope["headers"]
        self.host = _only(headers, b"host")
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        self.origin = (origins[0].lower() if len(origins) == 1 else "null") if origins else None
        self.fetch_site = _only(headers, b"sec-fetch-site").lower()
        method = scope.get("method", "")  # a WebSocket has none, and is no safe thing to open
        self.safe = method in _SAFE
        self.probe = scope["type"] == "http" and method in ("GET", "HEAD") and scope["path"] in PROBES
        self.api = scope["path"].startswith(("/api/", "/links/"))
        self.preflight = method == "OPTIONS" and any(name == b"access-control-request-method" for name, _ in headers)

    @property
    def same_origin(self) -> bool:
        """The scheme is left out: who ends TLS in front of us knows it, and we do not."""
        scheme, _, rest = (self.origin or "").partition("://")
        page, asked = Authority.parse(rest), Authority.parse(self.host)
        if scheme not in _DEFAULT_PORTS or page is None or asked is None:
            return False
        own = _DEFAULT_PORTS[scheme]
        return (page.host, page.port or own) == (asked.host, asked.port or own)


class _Answer:
    """What goes out: with our headers on it, and nothing more once we have refused."""

    def __init__(self, scope: AsgiMessage, send: Send, headers: Headers) -> None:
        self._scope = scope
        self._send = send
        self._headers = headers
        self._websocket = scope["type"] == "websocket"
        self._can_explain = not self._websocket or "websocket.http.response" in (scope.get("extensions") or {})
        self._started = False
        self.refused = False
        self.body: Body | None = None

    async def send(self, message: AsgiMessage) -> None:
        if self.refused:
            return
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self._started = True
            headers = self._with_ours(message.get("headers") or [])
            if self.body is not None and self.body.is_unread:
                headers = [*(pair for pair in headers if pair[0] != b"connection"), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await self._send(message)

    def _with_ours(self, given: Any) -> Headers:
        """Ours count, but for a page of our own that says more about its content, and an answer's own `Vary`."""
        theirs = [(bytes(name).lower(), bytes(value)) for name, value in given]
        api = any(name == b"cache-control" for name, _ in self._headers)
        kept = () if api else (b"content-security-policy",)
        ours = [pair for pair in self._headers if pair[0] not in kept or all(pair[0] != name for name, _ in theirs)]
        replaced = {name for name, _ in ours} - {b"vary"}
        return [pair for pair in theirs if pair[0] not in replaced] + ours

    async def refuse(self, error: errors.BelljarError) -> None:
        """Where the answer has begun, all that is left is to end it early, which the server does by hanging up."""
        note_error(self._scope, error)
        if not self._started:
            await (self._explain(error) if self._can_explain else self._close())
        self.refused = True

    async def _explain(self, error: errors.BelljarError) -> None:
        told = problem(error)
        body = json.dumps(told).encode()
        kind = "websocket.http.response" if self._websocket else "http.response"
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),  # the rest of the body is not read
            *retry_header(error),
        ]
        await self.send({"type": f"{kind}.start", "status": told["status"], "headers": headers})
        await self.send({"type": f"{kind}.body", "body": body})

    async def _close(self) -> None:
        await self.send({"type": "websocket.close", "code": 1008, "reason": "refused"})


def problem(error: errors.BelljarError) -> dict[str, Any]:
    """An error as `application/problem+json`."""
    told = spelling.told(error, "http")
    return {
        "type": "about:blank", "title": error.kind.replace("_", " "), "status": error.http_status,
        "detail": told.pop("message"), **told,
    }  # fmt: skip


def retry_header(error: errors.BelljarError) -> Headers:
    """Returns the header that says when to ask again, for an error that says so."""
    if not isinstance(error, errors.Busy):
        return []
    return [(b"retry-after", str(max(1, round(error.retry_after))).encode())]


def _only(headers: Headers, name: bytes) -> str:
    """The value of a header that was sent once; of two nobody knows which one counts, so there is none."""
    values = [value for given, value in headers if given == name]
    return values[0].decode("latin-1").strip() if len(values) == 1 else ""


def _listed_host(text: str) -> Authority:
    found = Authority.parse(text.strip())
    if found is None:
        raise errors.InvalidRequest(
            f"service.hosts: {text[:80]!r} is no host", fix="write name or name:port, without scheme or wildcard"
        )
    return found


def _listed_origin(text: str) -> str:
    try:
        parts = urlsplit(text.strip().lower())
        good = parts.scheme and parts.netloc and Authority.parse(parts.netloc) and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise errors.InvalidRequest(
            f"service.origins: {text[:80]!r} is no origin", fix="write https://name or https://name:port, no wildcard"
        )
    return f"{parts.scheme}://{parts.netloc}"
