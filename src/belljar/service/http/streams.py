"""Lines as they come, to who listens: as server-sent events, or over a WebSocket.

Who listens for hours is asked again who they are: with each batch, and with the empty ones that come in silence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from belljar.core import errors
from belljar.protocol.records import Caller, LogLine
from belljar.service.service import Service


class Listener(StreamingResponse):
    """Server-sent events. It gives its place back however it ends, even before the first line."""

    def __init__(self, service: Service, id: str, caller: Caller, headers: Mapping[str, str], after: int) -> None:
        super().__init__(_events(service, id, caller, headers, after), media_type="text/event-stream")
        self._stack = ExitStack()
        self._stack.enter_context(service.queries.listening(caller))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._stack:
            await super().__call__(scope, receive, send)


async def _events(
    service: Service, id: str, caller: Caller, headers: Mapping[str, str], after: int
) -> AsyncIterator[str]:
    async for batch in _lines(service, id, caller, headers, after):
        told = "".join(f"id: {line.number}\ndata: {line.model_dump_json()}\n\n" for line in batch)
        yield told or ": alive\n\n"  # a proxy must not think us dead
    record = await service.queries.record(id, caller)
    if record.final:  # else we go away, and another tells the rest
        yield f"event: end\ndata: {record.state}\n\n"


async def watch(
    service: Service, id: str, caller: Caller, headers: Mapping[str, str], after: int, socket: WebSocket
) -> None:
    """One line a message; closed with the run's state as the reason."""
    with service.queries.listening(caller), suppress(WebSocketDisconnect):
        await socket.accept(subprotocol=service.access.subprotocol(headers))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_gone, socket, tasks.cancel_scope)
            async for batch in _lines(service, id, caller, headers, after):
                for line in batch:
                    await socket.send_text(line.model_dump_json())
            record = await service.queries.record(id, caller)
            await socket.close(1000 if record.final else 1012, record.state)  # 1012: we go away, another tells the rest
            tasks.cancel_scope.cancel()


async def _until_gone(socket: WebSocket, scope: anyio.CancelScope) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
    scope.cancel()


async def _lines(
    service: Service, id: str, caller: Caller, headers: Mapping[str, str], after: int
) -> AsyncIterator[list[LogLine]]:
    """A key that was revoked meanwhile ends a stream, too."""
    async for batch in service.queries.follow(id, caller, after):
        if not await still_known(service, headers):
            return
        yield batch


async def still_known(service: Service, headers: Mapping[str, str]) -> bool:
    try:
        await service.access.known(headers)
    except errors.BelljarError:
        return False
    return True
