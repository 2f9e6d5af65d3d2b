"""The hosts and paths under which previews are seen: told from the service's own, and answered by the proxy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from belljar.core import errors
from belljar.core.settings import Settings
from belljar.preview import pages, proxy
from belljar.preview.headers import SeenFrom
from belljar.service.http.request_log import note

if TYPE_CHECKING:
    from belljar.service.previews.previews import Previews

PATH = "/preview/"
LOCALHOST = ".localhost"
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))


def addresses(request: HTTPConnection, label: str) -> tuple[str, str]:
    """Returns where a label is seen, as whoever asks can reach it: on a host of its own, and below our own."""
    settings: Settings = request.app.state.service.settings
    preview = settings.service.preview
    path = f"{PATH}{label}/" if preview.path else ""
    if preview.address:
        scheme, _, domain = preview.address.rpartition("://")
        return f"{scheme or 'http'}://{label}.{domain}/", path
    asked = request.headers.get("host", "")
    name, _, port = asked.rpartition(":") if not asked.endswith("]") and ":" in asked else (asked, "", "")
    if name.lower() in _LOCAL_NAMES:
        return f"http://{label}{LOCALHOST}{f':{port}' if port else ''}/", path
    return (f"{request.url.scheme}://{asked}{path}" if path else ""), path


class Claimed(NamedTuple):
    """A request that is for a preview."""

    label: str
    prefix: str  # before its path, where it is on our own host


class PreviewHosts:
    """Tells requests for previews from all others, and has them answered by the proxy: no route of ours sees them."""

    def __init__(self, settings: Settings) -> None:
        preview = settings.service.preview
        scheme, _, rest = preview.address.rpartition("://")
        domain = rest.partition(":")[0]
        self._domain, self._scheme = f".{domain}" if domain else "", scheme or "http"
        self._suffixes = (LOCALHOST, *([f".{domain}"] if domain else []))
        self._by_path = preview.path
        self._frames = proxy.origins((*preview.frames, *settings.service.origins))

    def claimed(self, host: str, path: str) -> Claimed | None:
        """Returns what a request for a preview is for; None: it is for the service.

        Args:
            host: as it was asked for, with its port.
            path: of the request.
        """
        for suffix in self._suffixes:
            if suffix in host:
                name = host.partition(":")[0].lower().removesuffix(".")
                if name.endswith(suffix):
                    return Claimed(name.removesuffix(suffix), "")
        if self._by_path and path.startswith(PATH):
            label = path[len(PATH) :].partition("/")[0]
            return Claimed(label, f"{PATH}{label}")
        return None

    async def answer(self, scope: Any, receive: Any, send: Any, host: str, claimed: Claimed) -> None:
        """Answers a request for a preview."""
        previews: Previews = scope["app"].state.previews
        frames = self._frames + self._own_frames(scope)
        try:
            place, port = await previews.place(claimed.label)
        except errors.BelljarError as error:
            await _unknown(scope, receive, send, error, frames)
            return
        note(scope, run=claimed.label[:19])
        outside = SeenFrom(
            f"{self._scheme_of(scope, host)}://{host.lower()}", claimed.prefix, port, frames,
            withholds=await _is_for_us(scope),
        )  # fmt: skip
        await proxy.serve(scope, receive, send, place, outside)

    def _scheme_of(self, scope: Any, host: str) -> str:
        """What a browser asked by: who ends TLS in front of us does not say, and the settings do."""
        if self._domain and host.partition(":")[0].lower().endswith(self._domain):
            return self._scheme
        return "https" if scope["scheme"] in ("https", "wss") else "http"

    def _own_frames(self, scope: Any) -> tuple[str, ...]:
        """Pages of the service itself, as a browser of this machine names them."""
        server = scope.get("server")
        port = server[1] if server else None
        return tuple(f"http://{name}:{port}" for name in ("localhost", "127.0.0.1")) if port else ()


async def _is_for_us(scope: Any) -> bool:
    """Whether a request has a credential that this service takes: of a token of others nobody sees it from outside."""
    if not any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"]):
        return False
    try:
        await scope["app"].state.service.access.known(Headers(scope=scope))
    except errors.BelljarError:
        return False
    return True


async def _unknown(scope: Any, receive: Any, send: Any, error: errors.BelljarError, frames: tuple[str, ...]) -> None:
    body = pages.page("There is no preview here", error.message, advice=error.fix)
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008, "reason": "there is no preview here"})
            return
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": error.http_status, "headers": pages.headers(body, frames)})
    await send({"type": f"{kind}.body", "body": body})
