"""`belljar serve`: the engine as a service."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
import typer
from anyio.abc import TaskStatus

from belljar.cli import terminal
from belljar.core import errors
from belljar.core.settings import Settings
from belljar.core.version import __version__
from belljar.engine import tracing
from belljar.host.loops import lone_errors
from belljar.host.scheduling import run_soon_after_waking
from belljar.settings import load

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from belljar.service.service import Service

_log = logging.getLogger("belljar")
_HEADERS_SECONDS, _HEADERS_BYTES = 20.0, 64 * 1024  # of a request
_SWITCH_SECONDS = 0.0005  # that the event loop waits for a thread that writes records or a large result
_LAST_SECONDS = 3  # for answers under way when all runs have ended, and then for who does not read
_PING_SECONDS, _PONG_SECONDS = 30.0, 120.0  # of a WebSocket: a client that is busy reads nothing for a while
Json = Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")]


def serve(
    host: Annotated[str | None, typer.Option(help="Where to listen; anything but loopback needs a key first.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any that is free.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error: from where on.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console, or json: a line of it for each event.")] = None,
    as_json: Json = False,
) -> None:
    """Serve HTTP, WebSocket and MCP. SIGTERM lets runs end, then leaves; a second one leaves at once."""
    given = {"host": host, "port": port, "log_level": log_level, "log_format": log_format}
    flags = {name: value for name, value in given.items() if value is not None}
    settings = load(service=flags) if flags else load()
    try:
        from belljar.service.http.app import create_app
        from belljar.service.telemetry.server_log import ServerLog
    except ImportError as error:
        fix = "pip install 'belljar-sandbox[service]'"
        raise errors.NotAvailable(f"the service needs a package that is not installed: {error.name}", fix=fix) from None
    tracing.turn_on()
    sys.setswitchinterval(_SWITCH_SECONDS)
    run_soon_after_waking()  # the event loop: guests that compute must not hold it up
    with ServerLog(settings.service).installed() as log:
        listen(create_app(settings, log), settings, as_json)


def listen(app: FastAPI, settings: Settings, as_json: bool) -> None:
    """Serves an application whose lifespan opens a service, until it is told to leave."""
    import uvicorn

    app.middleware_stack = app.build_middleware_stack()  # now: a host that makes no sense is told here, not to callers
    config = uvicorn.Config(
        app, http=_patient(), lifespan="off",
        log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="wsproto",
        ws_max_size=64 * 1024,
        ws_ping_interval=_PING_SECONDS, ws_ping_timeout=_PONG_SECONDS,
        timeout_graceful_shutdown=_LAST_SECONDS, backlog=2048,
    )  # fmt: skip

    class ServerWithoutSignals(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

    server = ServerWithoutSignals(config)
    with _listening(settings) as listener:
        faster = {"use_uvloop": find_spec("uvloop") is not None}
        anyio.run(_serve, server, app, listener, as_json, backend_options=faster)


def _patient() -> type[asyncio.Protocol]:
    """uvicorn's protocol, with an end to its patience: it waits for ever for the end of a request's headers, and takes
    any number of them."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from belljar.service.http.joined_writes import JoinedWrites

    class Patient(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _heads = 0
        _upgraded = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
            self._deadline = self.loop.call_later(_HEADERS_SECONDS, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._upgraded:
                return
            idle = self.cycle is None or self.cycle.response_complete
            self._heads = self._heads + len(data) if idle else 0
            if self._heads > _HEADERS_BYTES:
                self.transport.abort()
            if self._deadline and not idle:
                self._deadline.cancel()
                self._deadline = None
            elif idle and self._deadline is None:
                self._deadline = self.loop.call_later(_HEADERS_SECONDS, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline:
                self._deadline.cancel()
            super().connection_lost(exc)

        def handle_websocket_upgrade(self) -> None:
            self._upgraded = True
            if self._deadline:
                self._deadline.cancel()
                self._deadline = None
            _give_up_on_silence(self.transport.get_extra_info("socket"))
            super().handle_websocket_upgrade()

    return Patient


def _give_up_on_silence(connection: socket.socket | None) -> None:
    """Has the kernel drop a connection whose other side takes nothing for long: closing it would wait for that."""
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(1000 * (_PING_SECONDS + _PONG_SECONDS))
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


async def _serve(server: uvicorn.Server, app: FastAPI, listener: socket.socket, as_json: bool) -> None:
    from belljar.service.auth.access import refuse_open_bind

    with lone_errors():
        async with app.router.lifespan_context(app):
            service: Service = app.state.service
            refuse_open_bind(listener.getsockname()[0], await service.access.required())
            async with anyio.create_task_group() as tasks:
                await tasks.start(_leave_when_told, server, service)
                gc.collect()
                gc.freeze()  # what was loaded stays: no collection has to look through it again
                _announce(_url(listener), as_json)  # it is bound: who connects now is served in a moment
                _log.info("serving", extra={"facts": {"url": _url(listener), "version": __version__}})
                await server.serve(sockets=[listener])
                tasks.cancel_scope.cancel()


async def _leave_when_told(
    server: uvicorn.Server, service: Service, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """The first signal: nothing new is taken in, runs have their time to end. The second: they are ended now. The
    third: nobody is waited for.

    Until the last run has ended, questions are answered: its caller wants to know, and a balancer asks `/readyz`.
    """
    told = 0

    async def close_when_drained() -> None:
        await service.drain.drained.wait()
        with anyio.move_on_after(_LAST_SECONDS):
            while server.server_state.tasks:  # noqa: ASYNC110 (answers and streams that are about to end by themselves)
                await anyio.sleep(0.02)
        server.should_exit = True

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_when_drained)
            task_status.started()
            async for _ in received:
                told += 1
                service.drain.draining.set()
                if told == 2:
                    service.drain.stop_all()
                if told == 3:
                    server.should_exit = server.force_exit = True


def _announce(url: str, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"url": url}) + "\n")
        sys.stdout.flush()
    else:
        terminal.say(f"Belljar serves on {url}  (its API: {url}/docs; Ctrl-C ends it)")


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """The socket is ours before anything else is started: a port that is taken is told at once."""
    host, port = settings.service.host, settings.service.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            yield listener
    except OSError as error:
        raise errors.NotAvailable(
            f"cannot listen on {host}:{port}: {error.strerror or error}", fix="choose another --port"
        ) from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
