"""Runs our small programs in a container, for the files of its box."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from belljar.backends.containers import file_stream
from belljar.core import errors
from belljar.host.docker_api import ProgramStreams, asking
from belljar.host.guest_uid import group_of
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer
    from aiodocker.execs import Exec

_MOVING_SECONDS = 60.0  # for files to go in or out
_SILENCE_SECONDS = 30.0  # that a file which is read may take for its next piece
_WORDS_BYTES = 4096  # kept of what a program inside complains of
# The errors that a program may end with, by their number or by their text.
_BY_NUMBER = (errno.ENXIO, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_BY_TEXT = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


class FailedInside(errors.ExecutionFailed):
    """A program of ours failed in a container: with this exit code, and with these last words."""

    def __init__(self, what: str, code: int | None, words: str) -> None:
        first = next(iter(words.splitlines()), f"exit code {code}")  # the last only says that there was another
        super().__init__(f"{what} could not be moved: {first}")
        self.code: int | None = code
        self.words: str = words


async def execute(
    container: DockerContainer, argv: Sequence[str], uid: int, stdin: bytes, *, limit: int = 0,
    what: str = "the files", strict: bool = True,
) -> bytes:  # fmt: skip
    """Runs a program of ours in a container and returns what it printed; over the limit is a failure."""
    out, complaint = bytearray(), bytearray()
    async with asking(what, seconds=_MOVING_SECONDS):
        call = await container.exec(list(argv), user=f"{uid}:{group_of(uid)}", stdin=True, workdir="/")
        with lone_errors():
            async with (
                ProgramStreams.open(call.start(detach=False), what) as streams,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(streams.supply, stdin)
                tasks.start_soon(_watch_end, call, tasks.cancel_scope)
                async for name, data in streams.parts():
                    if name == "stderr":
                        complaint += data[: _WORDS_BYTES - len(complaint)]
                    elif len(out) + len(data) > limit:
                        raise errors.ExecutionFailed(f"{what}: more came out than may be taken")
                    else:
                        out += data
                tasks.cancel_scope.cancel()
        code = (await call.inspect()).get("ExitCode")
    if strict and code != 0:
        raise FailedInside(what, code, complaint.decode("utf-8", "replace").strip())
    return bytes(out)


def as_os_error(code: int | None, words: str, path: str) -> OSError | None:
    """Returns what the end of a program means for the file at a path; None if that cannot be told."""
    text = words.lower().replace("wrote only", os.strerror(errno.ENOSPC).lower())  # GNU tar's words for a full disk
    number = code if code in _BY_NUMBER else next((n for n in _BY_TEXT if os.strerror(n).lower() in text), None)
    return OSError(number, os.strerror(number), path) if number else None


@asynccontextmanager
async def reading(
    container: DockerContainer, argv: Sequence[str], uid: int, path: str
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Opens a file by a program that tells its content (see `file_stream`), and ends the program with the block."""
    async with AsyncExitStack() as stack:
        async with asking("the file", seconds=_MOVING_SECONDS):
            call = await container.exec(list(argv), user=f"{uid}:{group_of(uid)}", workdir="/")
            streams = await stack.enter_async_context(ProgramStreams.open(call.start(detach=False), "the file"))
        parts = streams.parts()

        async def more() -> bytes:
            async with asking("the file", seconds=_SILENCE_SECONDS):
                async for name, data in parts:
                    if name == "stdout":
                        return data
            return b""

        yield await file_stream.opened(more, path)


async def _watch_end(call: Exec, reading_scope: anyio.CancelScope) -> None:
    """gVisor's engine at times forgets to hang up after its program has ended."""
    for pause in (1.0, 0.5, *[2.0] * 30):
        await anyio.sleep(pause)
        if (await call.inspect()).get("Running") is False:
            await anyio.sleep(0.5)  # for what is still on its way
            reading_scope.cancel()
