"""Puts a person in front of a process of a living sandbox, here or on a server: for `belljar shell` and `attach`."""

from __future__ import annotations

import codecs
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from belljar.cli import terminal
from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.result import STREAMS
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from anyio import CancelScope
    from anyio.abc import TaskStatus

    from belljar.cli.living.raw_terminal import RawTerminal
    from belljar.core.result import Result
    from belljar.living.handles import ProcessHandle

LEAVE_KEY, LEAVE_TIMES, LEAVE_SECONDS = b"\x1d", 3, 1.0
LEAVING = "Ctrl-] three times within a second"
_READ_BYTES = 64 * 1024
_BELL = b"\a"


async def converse(process: ProcessHandle, own: RawTerminal, since: int = 0) -> Result | None:
    """Lends our terminal to a process that has one, until it ends. Ctrl-C and all other keys are the process'.

    Args:
        process: has a terminal.
        own: our terminal.
        since: output that was shown already.

    Returns:
        Its result; None: the person has left before, and the process goes on.
    """
    result: Result | None = None
    with own.raw(), lone_errors():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_type, process, own, tasks.cancel_scope)
            await tasks.start(_follow_size, process, own)
            async for chunk in process.output(since):
                await own.show(chunk.data)
            result = await process.wait()
            tasks.cancel_scope.cancel()
    return result


async def _type(process: ProcessHandle, own: RawTerminal, scope: CancelScope) -> None:
    """Passes keys on. Leaves when the terminal is hung up, or the keys for that were pressed."""
    leaving = _LeaveKeys()
    async for keys in own.keys():
        if leaving.pressed(keys):
            break
        try:
            await process.write(keys)
        except BrokenPipeError:  # it has ended: its output tells
            continue
        except errors.NotAvailable:  # whether it was typed is not known; if the server is gone, the output tells
            await own.show(_BELL)
    scope.cancel()


class _LeaveKeys:
    """Notices the key that leaves, pressed often enough."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def pressed(self, keys: bytes) -> bool:
        now = time.monotonic()
        if keys.strip(LEAVE_KEY):  # something else, or among something else
            self._times = []
            return False
        self._times = [at for at in self._times if now - at < LEAVE_SECONDS] + [now] * len(keys)
        return len(self._times) >= LEAVE_TIMES


async def _follow_size(process: ProcessHandle, own: RawTerminal, *, task_status: TaskStatus[None]) -> None:
    """Gives the process' terminal the size of ours, now and whenever that changes."""
    with anyio.open_signal_receiver(signal.SIGWINCH) as changed:
        await _resize(process, own)
        task_status.started()
        async for _ in changed:
            await _resize(process, own)


async def _resize(process: ProcessHandle, own: RawTerminal) -> None:
    size = own.size
    with suppress(errors.BelljarError):  # it has ended, which its output tells
        await process.resize(size.columns, size.rows)


async def relay(process: ProcessHandle, since: int, *, with_input: bool, as_json: bool) -> Result:
    """Prints the output of a process as it comes, and returns its result at its end.

    Args:
        process: any process.
        since: output that was printed already.
        with_input: whether what we read from standard input goes to the process.
        as_json: print each piece as a line of JSON.
    """
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in STREAMS}
    with lone_errors():
        async with anyio.create_task_group() as tasks:
            if with_input:
                tasks.start_soon(_pass_input, process)
            async for chunk in process.output(since):
                if as_json:
                    terminal.print_json(chunk.model_dump(mode="json"))
                    continue
                if chunk.missed:
                    terminal.note(f"{chunk.missed} bytes of output are not kept any more")
                text = decoders[chunk.stream]
                await anyio.to_thread.run_sync(_print, chunk.stream, chunk.data, text, abandon_on_cancel=True)
            result = await process.wait()
            tasks.cancel_scope.cancel()
    return result


def _print(stream: str, data: bytes, decoder: codecs.IncrementalDecoder) -> None:
    """Prints bytes as they are; on a terminal, nothing of them acts on it."""
    place = sys.stdout if stream == "stdout" else sys.stderr
    place.buffer.write(neutralise(decoder.decode(data)).encode("utf-8", "replace") if place.isatty() else data)
    place.flush()


async def _pass_input(process: ProcessHandle) -> None:
    fd = sys.stdin.fileno()
    with suppress(BrokenPipeError):  # it has ended, or reads no more
        while data := await _read(fd):
            await process.write(data)
        await process.close_stdin()


async def _read(fd: int) -> bytes:
    with suppress(PermissionError):  # an ordinary file, which never makes anybody wait
        await anyio.wait_readable(fd)
    return os.read(fd, _READ_BYTES)
