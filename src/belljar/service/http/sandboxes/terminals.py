"""Output and input of processes over WebSockets."""

from __future__ import annotations

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from pydantic import ValidationError

from belljar.core import errors
from belljar.living.process import AsyncProcess
from belljar.protocol.living import ControlMessage
from belljar.service.http.sandboxes.sockets import REFUSED, UNREAD_SECONDS, Joined
from belljar.service.sandboxes.processes import record_of

_WAITING_FRAMES = 16  # of input that may wait until the program reads them


async def tell(joined: Joined, process: AsyncProcess, since: int) -> None:
    """Tells the output of a process after a number, a message for each piece, and then how it ended."""
    async with joined.opened(joined.ignore_messages):
        async for chunk in process.output(since):
            await joined.send_text(chunk.model_dump_json())
        await _tell_end(joined, process)


async def attach(joined: Joined, process: AsyncProcess, since: int) -> None:
    """Joins a client's input and control with a process, and its output with the client."""
    feed, waiting = anyio.create_memory_object_stream[bytes | None](_WAITING_FRAMES)

    async def hear() -> None:
        await _hear(joined, process, feed)

    async def pass_on() -> None:
        await _pass_on(joined, process, waiting)

    with feed, waiting:
        async with joined.opened(hear, pass_on):
            async for chunk in process.output(since):
                await joined.tell(chunk.model_dump(include={"seq", "stream", "missed"}))
                await joined.send_bytes(chunk.data)
            await _tell_end(joined, process)


async def _tell_end(joined: Joined, process: AsyncProcess) -> None:
    await process.gone()
    await joined.tell({"ended": record_of(process, whole=False).model_dump(mode="json")})


async def _hear(joined: Joined, process: AsyncProcess, feed: ObjectSendStream[bytes | None]) -> None:
    """Takes input while there is room for it, and does what control messages say at once."""
    async for message in joined.messages():
        if isinstance(message, bytes):
            await _fed(joined, feed, message)
            continue
        try:
            asked = ControlMessage.model_validate_json(message)
        except ValidationError as error:
            await joined.tell_problem(errors.from_validation(error, "control", ControlMessage))
            continue
        if asked.eof:
            await _fed(joined, feed, None)
        try:
            await _obey(process, asked)
        except errors.BelljarError as error:
            await joined.tell_problem(error)


async def _fed(joined: Joined, feed: ObjectSendStream[bytes | None], data: bytes | None) -> None:
    """Waits for room. While it does, nobody would notice that the client is gone: so not for ever."""
    with anyio.move_on_after(UNREAD_SECONDS):
        await feed.send(data)
        return
    joined.end(REFUSED, "its input was not read")


async def _obey(process: AsyncProcess, asked: ControlMessage) -> None:
    if asked.resize is not None:
        await process.resize(*asked.resize)
    if asked.signal is not None:
        await process.signal(asked.signal)


async def _pass_on(joined: Joined, process: AsyncProcess, waiting: ObjectReceiveStream[bytes | None]) -> None:
    """Writes input as the program reads it. What it will never read is told once, and dropped."""
    told = False
    async for data in waiting:
        try:
            if data is None:
                await process.close_stdin()
            elif data:
                await process.write(data)
        except BrokenPipeError as error:
            if not told:
                await joined.tell_problem(errors.InvalidRequest(f"input: {error.strerror}", context={"errno": "EPIPE"}))
            told = True
