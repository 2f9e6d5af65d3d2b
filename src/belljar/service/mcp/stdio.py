"""The MCP server on stdin and stdout, for whoever started it. stdout carries the protocol and nothing else.

Both descriptors are taken away before anything is started: 0 is empty and 1 goes to stderr from then on, so that
neither a guest nor a stray print can reach the wire. They are read and written only when they are ready, and not by
threads: one that is blocked in a read would keep us from leaving on a signal.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from mcp.server.stdio import stdio_server

from belljar.core.settings import Settings
from belljar.protocol.records import SCOPES, Caller
from belljar.service.auth.access import LOCAL_USER
from belljar.service.mcp import sdk
from belljar.service.mcp.calls import OperatorGrants
from belljar.service.mcp.server import create_server
from belljar.service.service import Service
from belljar.service.sessions import Sessions

_CHUNK = 64 * 1024
_PIPE_BUF = 4096  # as much as a pipe that is ready takes without blocking
_LOCAL = Caller(name=LOCAL_USER, scopes=frozenset(SCOPES))


async def serve(settings: Settings, grants: OperatorGrants | None = None) -> None:
    """Until stdin ends. Then whatever runs is stopped, and nothing is left."""
    with _wire() as (source, sink):
        async with Service(settings) as service, Sessions(service) as sessions:
            server = create_server(service, sessions, lambda _: _LOCAL, grants=grants)
            reader: Any = _LineReader(source)
            writer: Any = _TextWriter(sink)
            async with stdio_server(reader, writer) as (read, write):
                await sdk.serve(server, read, write)


@contextmanager
def _wire() -> Iterator[tuple[int, int]]:
    source, sink = os.dup(0), os.dup(1)  # neither is inherited
    empty = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(empty, 0)
        os.dup2(2, 1)
        yield source, sink
    finally:
        os.dup2(sink, 1)
        for fd in (empty, source, sink):
            os.close(fd)


class _LineReader:
    """Reads a descriptor line by line: `async for line in …`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[bytes] = []  # whole ones, the next one last
        self._parts: list[bytes] = []  # of one that is not whole yet

    def __aiter__(self) -> _LineReader:
        return self

    async def __anext__(self) -> str:
        while not self._lines:
            await _ready(anyio.wait_readable, self._fd)
            data = os.read(self._fd, _CHUNK)
            if not data:
                raise StopAsyncIteration
            first, *rest = data.split(b"\n")
            self._parts.append(first)
            if rest:
                self._lines = [*reversed(rest[:-1]), b"".join(self._parts)]
                self._parts = [rest[-1]]
        return self._lines.pop().decode("utf-8", "replace")


class _TextWriter:
    """Writes text to a descriptor, with the two methods that the SDK calls."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def write(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "replace"))
        while data:
            await _ready(anyio.wait_writable, self._fd)
            try:
                data = data[os.write(self._fd, data[:_PIPE_BUF]) :]
            except BrokenPipeError:
                raise anyio.ClosedResourceError from None  # what the SDK expects of a reader that went away

    async def flush(self) -> None:
        """There is no buffer."""


async def _ready(wait: Callable[[int], Awaitable[None]], fd: int) -> None:
    try:
        await wait(fd)
    except PermissionError:  # a regular file, or the null device: always ready
        await anyio.lowlevel.checkpoint()
