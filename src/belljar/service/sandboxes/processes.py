"""What callers do with the processes of a living sandbox, as they are told of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress

import anyio

from belljar.core import errors
from belljar.core.process import Chunk
from belljar.core.spelling import told
from belljar.living.process import AsyncProcess
from belljar.protocol.living import (
    MAX_STDIN_BYTES,
    MAX_WAIT_SECONDS,
    OutputPage,
    ProcessRecord,
    StartProcess,
    StdinWritten,
)
from belljar.sandbox import AsyncSandbox
from belljar.service.sandboxes.sandboxes import labelled

_PIECE_BYTES = 64 * 1024
_STDIN_SECONDS = 30.0  # that one request waits for a program to read


def record_of(process: AsyncProcess, *, whole: bool = True) -> ProcessRecord:
    """Returns a process as its caller is told of it.

    Args:
        process: the process.
        whole: with its result, whose outputs may be megabytes.
    """
    result, error = process.result, process.error
    return ProcessRecord(
        id=process.id, pid=process.pid, command=process.command, labels=dict(process.labels), pty=process.pty,
        state="running" if process.running else "lost" if error else "ended", started=process.started,
        last=process.log.last, exit_code=result.exit_code if result else None,
        status=result.status if result else None, result=result if whole else None,
        problem=told(error, "http") if error else None, found=process.found,
    )  # fmt: skip


async def start(box: AsyncSandbox, body: StartProcess) -> ProcessRecord:
    """Starts a process that goes on."""
    command = body.command if isinstance(body.command, str) else tuple(body.command)
    process = await box.start(
        command, cwd=body.cwd, env=body.environment, pty=body.pty, timeout=body.timeout_seconds, labels=body.labels,
        id=body.id,
    )  # fmt: skip
    return record_of(process)


def started(box: AsyncSandbox, labels: Iterable[str]) -> list[ProcessRecord]:
    """Returns those that were started here and have all of these labels, without their results."""
    wanted = tuple(labels)
    return [record_of(one, whole=False) for one in box.started if labelled(one.labels, wanted)]


async def wait(process: AsyncProcess, seconds: float) -> ProcessRecord:
    """Waits for the end of a process, but no longer than so many seconds."""
    with suppress(TimeoutError, errors.BelljarError):
        await process.wait(seconds)
    return record_of(process)


async def kill(process: AsyncProcess) -> ProcessRecord:
    """Ends a process and all that it started, and waits for that."""
    process.stop()
    return await wait(process, MAX_WAIT_SECONDS)


async def write(process: AsyncProcess, data: bytes) -> StdinWritten:
    """Writes to a process what it takes within a while.

    Raises:
        BrokenPipeError: it has ended, or its input was closed.
        InvalidRequest: it is more than one request may send.
    """
    if len(data) > MAX_STDIN_BYTES:
        raise too_large(f"stdin: one request may send {MAX_STDIN_BYTES} bytes", "send it in pieces, or use a WebSocket")
    written = 0
    with anyio.move_on_after(_STDIN_SECONDS):
        while written < len(data):
            piece = data[written : written + _PIECE_BYTES]
            await process.write(piece)
            written += len(piece)
    if not process.running and written < len(data):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    return StdinWritten(written=written)


async def output(process: AsyncProcess, since: int, limit: int, seconds: float) -> OutputPage:
    """Returns some of the output after number `since`.

    Args:
        process: the process.
        since: the number of the last piece that the caller has.
        limit: bytes, unless the first piece is larger.
        seconds: to wait for something new, where there is nothing.
    """
    with anyio.move_on_after(seconds):
        async for _ in process.output(since):
            break
    over, last = process.log.closed, process.log.last
    chunks: list[Chunk] = []
    size = 0
    for chunk in process.kept(since):
        size += len(chunk.data)
        if chunks and size > limit:
            over = False
            break
        chunks.append(chunk)
    return OutputPage(chunks=tuple(chunks), last=last, over=over)


def too_large(message: str, fix: str) -> errors.InvalidRequest:
    """Returns the refusal of a body that is larger than its route takes."""
    refusal = errors.InvalidRequest(message, fix=fix)
    refusal.http_status = 413
    return refusal
