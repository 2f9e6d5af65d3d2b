"""One preview at a port of this machine's loopback, without a service around it. Needs uvicorn and wsproto."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from belljar.core import errors
from belljar.preview.proxy import Place
from belljar.preview.site import Site

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # of a WebSocket
_WAITING_CONNECTIONS = 256


class _Quiet(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they end the program around it, and so everything


class LocalPreview:
    """A preview that is shown at a port of the loopback.

    Attributes:
        url: where a browser sees it.
    """

    def __init__(self, place: Place, port: int, listener: socket.socket) -> None:
        """Nothing is served yet.

        Args:
            place: what is shown.
            port: of its server.
            listener: where browsers come to; see `listening`.
        """
        site = Site(place, port)
        self.url: str = f"http://{site.name}:{listener.getsockname()[1]}/"
        self._listener = listener
        self._server = _Quiet(
            uvicorn.Config(
                site, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
                ws="wsproto", ws_max_size=_MAX_MESSAGE_BYTES, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip

    async def serve(self) -> None:
        """Serves until it is cancelled."""
        with self._listener:
            await self._server.serve(sockets=[self._listener])


def listening(port: int) -> socket.socket:
    """Returns a socket that listens at a port of the loopback; 0: any that is free.

    Raises:
        InvalidRequest: that port is taken.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise errors.InvalidRequest(f"port {port} of this machine: {error.strerror}", fix="choose another") from None
    return listener
