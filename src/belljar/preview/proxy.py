"""The reverse proxy of previews: takes what an ASGI application gets, and has it answered by what is inside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from belljar.core import errors
from belljar.preview import headers, pages
from belljar.preview.backend import ApiBackend
from belljar.preview.connections import Idle, ServerConnection
from belljar.preview.exchange import AsgiMessage, AskedInside, Failed, Hung, Patience, Receive, Send, Stale, carry
from belljar.preview.headers import SeenFrom
from belljar.protocol.previews import PreviewStatus

_MOST_AT_ONCE = 256  # requests and WebSockets of one preview
_CLOSE_SECONDS = 2.0
_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))  # may be asked twice
_PATIENCE = Patience()


class Glance(NamedTuple):
    """How a preview is at this moment."""

    status: PreviewStatus
    reason: str = ""
    suggestion: str = ""
    lines: Sequence[str] = ()


class Place(Protocol):
    """What is looked at through the proxy: a port of a living sandbox."""

    backend: ApiBackend | None
    open: int
    idle: Idle

    async def dial(self) -> ByteStream:
        """Connects to the port; raises OSError where nothing listens, BelljarError where there is no sandbox."""
        ...

    def glance(self) -> Glance:
        """Tells how it is."""
        ...


async def serve(
    scope: AsgiMessage, receive: Receive, send: Send, place: Place, outside: SeenFrom, patience: Patience = _PATIENCE
) -> None:  # fmt: skip
    """Answers one request, or one WebSocket, by what is inside.

    Args:
        scope: of ASGI.
        receive: of ASGI.
        send: of ASGI.
        place: whose server answers.
        outside: how the preview is seen.
        patience: how long is waited.
    """
    one = _Request(scope, receive, send, place, outside, patience)
    if scope["type"] == "websocket":
        await receive()  # the offer, before which nothing may be answered
    with suppress(Hung):
        await one.answer()


class _Request:
    def __init__(
        self, scope: AsgiMessage, receive: Receive, send: Send, place: Place, outside: SeenFrom, patience: Patience
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._place = place
        self._outside = outside
        self._patience = patience
        self._socket = scope["type"] == "websocket"
        self._path: bytes = scope.get("raw_path") or scope["path"].encode()

    async def answer(self) -> None:
        prefix = self._outside.prefix.encode()
        if prefix:
            if self._path == prefix:
                await self._refuse(308, b"", [(b"location", prefix + b"/"), (b"content-length", b"0")])
                return
            if not self._path.startswith(prefix + b"/"):
                await self._refuse(404, b"")
                return
            if self._scope.get("method") == "OPTIONS" and self._header(b"access-control-request-method"):
                await self._refuse(204, b"", headers.answered((), self._outside, ""))
                return
            self._path = self._path[len(prefix) :]
        if self._place.open >= _MOST_AT_ONCE:
            await self._explain(503, "This preview is busy", "As many requests are under way as may be.")
            return
        self._place.open += 1
        try:
            await self._carry()
        except Failed as failure:
            await self._tell(failure)
        finally:
            self._place.open -= 1

    async def _carry(self) -> None:
        own = self._path == b"/api" or self._path.startswith(b"/api/")
        backend = self._place.backend if own else None
        host = backend.netloc if backend else self._outside.inside
        if self._socket:
            stream = await self._connected(backend)
            try:
                await self._carry_socket(stream, host)
            finally:
                with anyio.move_on_after(_CLOSE_SECONDS, shield=True), suppress(OSError):
                    await anyio.aclose_forcefully(stream)
            return
        harmless = self._scope["method"] in _HARMLESS and not any(headers.framing(self._scope["headers"]))
        again = harmless and backend is None
        if again and (idle := await self._place.idle.take()):
            with suppress(Stale):
                await self._carry_request(idle, host, again)
                return
        await self._carry_request(ServerConnection(await self._connected(backend)), host, again)

    async def _connected(self, backend: ApiBackend | None) -> ByteStream:
        try:
            if backend is None:
                with anyio.fail_after(self._patience.connect):
                    return await self._dialled()
            server = self._scope.get("server")
            return await backend.connect(server[1] if server else None, self._patience.connect)
        except errors.PolicyDenied as refusal:
            raise Failed(403, refusal.message) from None
        except errors.BelljarError as error:
            raise Failed(502, error.message) from None
        except (OSError, TimeoutError):
            what = f"the backend {backend.url} does not answer" if backend else "nothing listens on its port"
            raise Failed(502, what) from None

    async def _dialled(self) -> ByteStream:
        """Connects inside; a server that takes no more connections at the moment is asked again."""
        while True:
            with suppress(TimeoutError):
                return await self._place.dial()

    async def _carry_request(self, connection: ServerConnection, host: str, again: bool) -> None:
        """Carries a request; what is asked for `again` may go over a connection that was used before."""
        given = self._scope["headers"]
        kept = headers.asked(given, self._outside, host)
        framed = [*headers.framing(given)]
        kept += framed
        kept += [] if again else [(b"connection", b"close")]
        asked = AskedInside(self._scope["method"].encode(), self._target(), kept, bool(framed))
        mended = partial(headers.answered, outside=self._outside, host=host)
        whole = False
        try:
            await carry(connection, asked, self._receive, self._send, mended, self._patience)
            whole = True
        finally:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await (self._place.idle.give(connection) if whole and again else connection.close())

    async def _carry_socket(self, stream: ByteStream, host: str) -> None:
        from belljar.preview.sockets import Offer, bridge  # here: it needs wsproto, and few requests do

        kept = headers.asked(self._scope["headers"], self._outside, host)[1:]
        protocols = headers.offered(self._scope.get("subprotocols") or ())
        offer = Offer(host, self._target().decode("latin-1"), kept, protocols)
        await bridge(stream, offer, self._receive, self._send, self._patience)

    def _target(self) -> bytes:
        query: bytes = self._scope.get("query_string") or b""
        return self._path + (b"?" + query if query else b"")

    # --- where nobody inside answers ---

    async def _tell(self, failure: Failed) -> None:
        seen = self._place.glance()
        if failure.status != 502:
            await self._explain(failure.status, "This preview does not answer", str(failure))
        elif seen.status == "error":
            await self._explain(502, "This preview has ended", seen.reason, seen)
        elif seen.status == "starting":
            await self._explain(503, "This preview is starting", "The page reloads by itself.", seen, reload=True)
        else:
            text = f"{failure}. The page reloads by itself."
            await self._explain(502, "This preview does not answer", text, seen, reload=True)

    async def _explain(
        self, status: int, title: str, text: str, seen: Glance | None = None, *, reload: bool = False
    ) -> None:
        if b"text/html" not in self._header(b"accept"):
            body = f"{title}: {text}\n".encode()
            told = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
            told += [(b"cache-control", b"no-store"), (b"content-security-policy", self._outside.policy.encode())]
            told += [(b"content-length", str(len(body)).encode())]
        else:
            lines, advice = (seen.lines, seen.suggestion) if seen else ((), "")
            body = pages.page(title, text, advice=advice, lines=lines, reload=reload)
            told = pages.headers(body, self._outside.frames)
        await self._refuse(status, body, told + ([(b"retry-after", b"1")] if reload else []))

    async def _refuse(self, status: int, body: bytes, told: headers.Headers | None = None) -> None:
        if not self._socket:
            kind = "http.response"
        elif "websocket.http.response" in (self._scope.get("extensions") or {}):
            kind = "websocket.http.response"
        else:
            await self._send({"type": "websocket.close", "code": 1011, "reason": "the preview does not answer"})
            return
        listed = told if told is not None else [(b"content-length", b"0")]
        await self._send({"type": f"{kind}.start", "status": status, "headers": listed})
        await self._send({"type": f"{kind}.body", "body": body})

    def _header(self, name: bytes) -> bytes:
        return b",".join(value for given, value in self._scope["headers"] if given == name)


def origins(frames: Sequence[str]) -> tuple[str, ...]:
    """Returns origins that may frame previews, as a Content-Security-Policy names them.

    Raises:
        InvalidRequest: one of them is no origin.
    """
    for text in frames:
        parts = urlsplit(text)
        wild = text in ("vscode-webview:",)
        good = parts.scheme in ("http", "https", "vscode-webview") and parts.netloc and parts.path in ("", "/")
        if not (wild or good) or set(text) & set(" ;,'\"\t\r\n"):
            raise errors.InvalidRequest(f"{text[:80]!r} is no origin", fix="write http://name:port, or vscode-webview:")
    return tuple(frames)
