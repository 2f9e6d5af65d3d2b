"""One preview on this machine, without a service: what answers on a host of its own at a port of the loopback."""

from __future__ import annotations

import secrets
from typing import Any

from belljar.preview import pages, proxy
from belljar.preview.headers import SeenFrom
from belljar.preview.proxy import Place

_TOKEN_BYTES = 10
# Pages of this machine that show a preview in a frame: other programs on its loopback, and the panes of an editor.
FRAMES = ("http://localhost:*", "http://127.0.0.1:*", "vscode-webview:")


class Site:
    """An ASGI application that shows one preview, on a host that nobody can guess.

    A host of its own keeps it apart from all else on this machine: cookies of `localhost` are not its, and a page
    whose name was bound to 127.0.0.1 meanwhile asks under another one.
    """

    def __init__(self, place: Place, port: int) -> None:
        """Answers for a place.

        Args:
            place: what is shown.
            port: of its server.
        """
        self.name: str = f"preview-{secrets.token_hex(_TOKEN_BYTES)}.localhost"
        self._place = place
        self._port = port

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request, or one WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            return
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and hosts[0].partition(":")[0] == self.name:
            outside = SeenFrom(f"http://{hosts[0]}", "", self._port, FRAMES)
            await proxy.serve(scope, receive, send, self._place, outside)
        elif scope["type"] == "http":
            body = pages.page("There is no preview here", "This is not its address.")
            await send({"type": "http.response.start", "status": 404, "headers": pages.headers(body, ())})
            await send({"type": "http.response.body", "body": body})
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})
