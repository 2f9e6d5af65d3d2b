"""Lines as they come, to who listens: as server-sent events, or over a WebSocket.

Who listens for hours is asked again who they are: with each batch, and with the empty ones that come in silence.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from belljar.core import errors
from belljar.host.loops import lone_errors
from belljar.protocol.records import Caller, LogLine
from belljar.service.publisher import EVENTS
from belljar.service.queries import sees
from belljar.service.service import Service
from belljar.service.sessions import Sessions
from belljar.service.telemetry.log_lines import BEAT


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


class EventListener(StreamingResponse):
    """Server-sent events about the runs of a caller. It gives its place back however it ends."""

    def __init__(self, service: Service, sessions: Sessions, caller: Caller, headers: Mapping[str, str]) -> None:
        super().__init__(_told_events(service, sessions, caller, headers), media_type="text/event-stream")
        self._stack = ExitStack()
        self._stack.enter_context(service.queries.listening(caller))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._stack:
            await super().__call__(scope, receive, send)


async def _told_events(
    service: Service, sessions: Sessions, caller: Caller, headers: Mapping[str, str]
) -> AsyncIterator[str]:
    async with service.publisher.events.subscribe(f"{EVENTS}.>") as news:
        yield ": listening\n\n"
        while True:
            event = await _next_event(news, service.drain.drained)
            if service.drain.drained.is_set() or not await still_known(service, headers):
                return
            if event is None:
                yield ": alive\n\n"
            elif "gap" in event:
                yield f"event: gap\ndata: {json.dumps(event)}\n\n"
            elif await _concerns(event, service, sessions, caller):
                yield f"event: {event['kind']}\ndata: {json.dumps(event)}\n\n"


async def _next_event(news: AsyncIterator[dict[str, Any]], drained: anyio.Event) -> dict[str, Any] | None:
    """The next event; None after a while of silence, or when the service goes away."""
    event: dict[str, Any] | None = None
    with anyio.move_on_after(BEAT):
        async with anyio.create_task_group() as tasks:

            async def until_drained() -> None:
                await drained.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_drained)
            event = await anext(news, None)
            tasks.cancel_scope.cancel()
    return event


async def _concerns(event: dict[str, Any], service: Service, sessions: Sessions, caller: Caller) -> bool:
    """Whether a caller may know of an event: it is about a run or session of theirs."""
    if "caller" in event:
        return sees(caller, str(event["caller"]))
    id = str(event.get("container_id"))
    if sessions.holds(id, caller):
        return True
    try:
        await service.queries.record(id, caller)
    except errors.BelljarError:
        return False
    return True


async def watch(
    service: Service, id: str, caller: Caller, headers: Mapping[str, str], after: int, socket: WebSocket
) -> None:
    """One line a message; closed with the run's state as the reason. Who hangs up is no error, whenever it is."""
    with service.queries.listening(caller), suppress(WebSocketDisconnect), lone_errors():
        with _hang_up():
            await socket.accept(subprotocol=service.access.subprotocol(headers))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_gone, socket, tasks.cancel_scope)
            async for batch in _lines(service, id, caller, headers, after):
                for line in batch:
                    with _hang_up():
                        await socket.send_text(line.model_dump_json())
            record = await service.queries.record(id, caller)
            with _hang_up():  # 1012: we go away, another tells the rest
                await socket.close(1000 if record.final else 1012, record.state)
            tasks.cancel_scope.cancel()


@contextmanager
def _hang_up() -> Iterator[None]:
    """Raises what a socket says of a client that is gone as one thing: there are three words for it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise WebSocketDisconnect(1006, str(error)) from None


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
