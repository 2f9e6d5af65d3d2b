"""Calls of Apple's `container` command: fed, capped, and never waited for without end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import anyio

from belljar.core import errors
from belljar.host import process
from belljar.host.loops import lone_errors

Hear = Callable[[bytes], Awaitable[object]]
_CALL_SECONDS = 60.0
_KEPT_BYTES = 1 << 16


class Said(NamedTuple):
    """What a call printed, and its exit code."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def words(self) -> str:
        """Its complaint, or else its output."""
        return self.stderr.decode("utf-8", "replace") or self.text


class CliCall:
    """A started call, and our ends of its pipes. They are closed with the stack it was started on."""

    def __init__(self, child: process.Child, stdin: int, stdout: int, stderr: int) -> None:
        self.child = child
        self.stdout = stdout
        self.stderr = stderr
        self._stdin = stdin

    async def feed(self, data: bytes) -> None:
        await process.write_all(self._stdin, data)

    def end_input(self) -> None:
        stdin, self._stdin = self._stdin, -1
        if stdin >= 0:
            os.close(stdin)

    async def drain(self, stdout: Hear, stderr: Hear) -> int:
        """Hears both streams to their end; then its exit code."""

        async def read(fd: int, hear: Hear) -> None:
            while data := await process.read_some(fd):
                await hear(data)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, self.stdout, stdout)
            tasks.start_soon(read, self.stderr, stderr)
        return await self.child.wait()

    async def end(self) -> None:
        """The program here, not what it started in the virtual machine."""
        self.child.kill()
        with anyio.CancelScope(shield=True):
            await self.child.wait()


class Cli:
    """The program, by its path."""

    def __init__(self, binary: str) -> None:
        self.binary = binary

    def start(self, words: Sequence[str], fds: ExitStack, *, stdin: bool = False) -> CliCall:
        """Starts a call; our ends of its pipes are closed with `fds`."""
        ours, theirs = [-1, -1, -1], [subprocess.DEVNULL, -1, -1]
        with ExitStack() as far:
            for number in (0, 1, 2) if stdin else (1, 2):
                near, other = os.pipe() if number else reversed(os.pipe())
                ours[number], theirs[number] = near, other
                far.callback(os.close, other)
                if number:
                    fds.callback(os.close, near)
            try:
                child = process.Child([self.binary, *words], stdin=theirs[0], stdout=theirs[1], stderr=theirs[2])
            except OSError as error:
                if stdin:
                    os.close(ours[0])
                raise errors.StartFailed(f"{self.binary} could not be started: {error}") from None
        call = CliCall(child, *ours)
        fds.callback(call.end_input)
        return call

    async def call(
        self, words: Sequence[str], *, data: bytes | None = None, limit: int = 1 << 20, deadline: float = _CALL_SECONDS
    ) -> Said:
        """A call to its end, with what it said, cut at `limit`; one that does not end is ended."""
        heard = {1: bytearray(), 2: bytearray()}
        with ExitStack() as fds:
            call = self.start(words, fds, stdin=data is not None)

            async def feed() -> None:
                await call.feed(data or b"")
                call.end_input()

            async def hear(number: int, piece: bytes) -> None:
                heard[number] += piece[: limit - len(heard[number])]

            try:
                with lone_errors(), anyio.fail_after(deadline):
                    async with anyio.create_task_group() as tasks:
                        if data is not None:
                            tasks.start_soon(feed)
                        code = await call.drain(lambda piece: hear(1, piece), lambda piece: hear(2, piece))
                        tasks.cancel_scope.cancel()  # who has ended reads no more
            except TimeoutError:
                raise errors.BackendTimeout(f"container {words[0]} did not answer within {deadline:g} s") from None
            finally:
                await call.end()
        return Said(code, bytes(heard[1]), bytes(heard[2]))

    async def follow(self, words: Sequence[str], told: Callable[[str], object], *, deadline: float) -> Said:
        """A call whose lines, of either stream, are told as they come; the last of them are kept."""
        heard, rest = bytearray(), bytearray()

        async def hear(data: bytes) -> None:
            heard.extend(data)
            del heard[:-_KEPT_BYTES]
            rest.extend(data)
            *lines, last = rest.split(b"\n")
            rest[:] = last[-_KEPT_BYTES:]
            for line in lines:
                told(line.decode("utf-8", "replace").rstrip())

        with ExitStack() as fds:
            call = self.start(words, fds)
            try:
                with lone_errors(), anyio.fail_after(deadline):
                    code = await call.drain(hear, hear)
            except TimeoutError:
                raise errors.BackendTimeout(f"container {words[0]} did not end within {deadline:g} s") from None
            finally:
                await call.end()
        return Said(code, b"", bytes(heard))
