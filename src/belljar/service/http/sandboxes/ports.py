"""Routes of the ports of living sandboxes: waited for, and connected to without a network."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

import anyio
from anyio.abc import ByteStream
from fastapi import APIRouter, Query, WebSocket
from fastapi import Path as InPath
from pydantic import ValidationError

from belljar.core import errors
from belljar.protocol import file_errors
from belljar.protocol.living import MAX_WAIT_SECONDS, ControlMessage, Listening
from belljar.service.http.dependencies import BoundedRoute
from belljar.service.http.sandboxes.box import PREFIX, TheBox
from belljar.service.http.sandboxes.sockets import OVER, REFUSED, UNREAD_SECONDS, Joined, attached

router: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"], route_class=BoundedRoute)
Port = Annotated[int, InPath(ge=1, le=65535)]
Timeout = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False, description="seconds to wait")]
_LEAST_SECONDS = 0.01


@router.get("/{id}/ports/{port}/wait")
async def wait_for_port(box: TheBox, port: Port, timeout: Timeout = 30.0) -> Listening:
    """Answers when something listens on a TCP port, or when the time to wait is over."""
    async with box.used() as sandbox:
        try:
            await sandbox.wait_for_port(port, timeout=max(timeout, _LEAST_SECONDS))
        except TimeoutError:
            return Listening(listening=False)
        return Listening(listening=True)


@router.websocket("/{id}/ports/{port}/dial")
async def dial_port(socket: WebSocket, id: str, port: Port) -> None:
    """The bytes of a connection to a port of the sandbox's loopback, as binary messages both ways."""
    async with attached(socket, id, "sessions") as joined:
        with file_errors.refused(f"port {port}"):
            stream = await joined.held.box.dial(port)
        async with aclosing(stream):
            await _pump(joined, stream)


async def _pump(joined: Joined, stream: ByteStream) -> None:
    """Passes bytes on both ways until both sides have closed theirs, or one has gone."""
    heard_all = anyio.Event()

    async def from_client() -> None:
        async for message in joined.messages():
            if isinstance(message, bytes):
                await _sent(joined, stream, message)
            elif (await _control(joined, message)).eof:
                await stream.send_eof()
                heard_all.set()

    async with joined.opened(from_client):
        try:
            async for data in stream:
                await joined.send_bytes(data, patiently=True)
        except anyio.BrokenResourceError:
            joined.end(OVER, "the connection was reset")
        await joined.tell({"eof": True})
        await heard_all.wait()


async def _sent(joined: Joined, stream: ByteStream, data: bytes) -> None:
    try:
        with anyio.move_on_after(UNREAD_SECONDS):
            await stream.send(data)
            return
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        joined.end(OVER, "the connection was reset")
    joined.end(REFUSED, "what was sent was not read")


async def _control(joined: Joined, message: str) -> ControlMessage:
    try:
        return ControlMessage.model_validate_json(message)
    except ValidationError as error:
        await joined.tell_problem(errors.from_validation(error, "control", ControlMessage))
        return ControlMessage()
