"""Carries bytes between a guest and a listed host: no faster, no more and no longer than they may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
from anyio.abc import ByteStream

from belljar.core.request import Limits

IDLE_SECONDS = 120.0
CHUNK_BYTES = 65_536
LOST = (TimeoutError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


class OverCapError(Exception):
    """The bytes that a run may send and receive in all are used up."""


class Pace:
    """Slows a flow down to a number of bytes a second; all that share it have that much together."""

    def __init__(self, bytes_a_second: int | None) -> None:
        self._rate = bytes_a_second
        self._free = 0.0  # when the next byte may go

    async def wait(self, size: int) -> None:
        """Waits as long as this many bytes take."""
        if self._rate:
            now = anyio.current_time()
            self._free = max(now, self._free) + size / self._rate
            await anyio.sleep(self._free - now)


class Traffic:
    """All that one proxy carries, in both directions."""

    def __init__(self, limits: Limits) -> None:
        self.cap: int | None = limits.net_bytes
        self.total: int = 0
        self.most_bytes: int = min(CHUNK_BYTES, limits.net_bandwidth or CHUNK_BYTES)  # to take at once: a second's
        self._out, self._back = Pace(limits.net_bandwidth), Pace(limits.net_bandwidth)

    @property
    def used_up(self) -> bool:
        """Whether no more may be carried."""
        return self.cap is not None and self.total >= self.cap

    async def out(self, size: int) -> None:
        """Counts bytes that go out, and waits until they may; OverCapError where they may not."""
        self._count(size)
        await self._out.wait(size)

    async def back(self, size: int) -> None:
        """The same of bytes that come back."""
        self._count(size)
        await self._back.wait(size)

    def _count(self, size: int) -> None:
        self.total += size
        if self.cap is not None and self.total > self.cap:
            raise OverCapError


class Peer:
    """One side of a connection, with what was already read of it, and is still to be looked at."""

    def __init__(self, stream: ByteStream, traffic: Traffic, early: bytes = b"") -> None:
        self.stream: ByteStream = stream
        self.held: bytes = early
        self._traffic = traffic

    async def more(self) -> None:
        """Reads more, and keeps it in `held`.

        Raises:
            anyio.EndOfStream: there is no more.
        """
        self.held += await self.stream.receive(self._traffic.most_bytes)

    async def until(self, mark: bytes, most: int) -> bytes | None:
        """Takes what comes up to a mark, and the mark; None where there is none in that many bytes."""
        while (at := self.held.find(mark, 0, most)) < 0:
            if len(self.held) >= most:
                return None
            with anyio.fail_after(IDLE_SECONDS):
                await self.more()
        taken, self.held = self.held[: at + len(mark)], self.held[at + len(mark) :]
        return taken

    async def some(self, most: int = CHUNK_BYTES) -> bytes:
        """Takes what is there, or what comes next; empty at the end."""
        if not self.held:
            try:
                with anyio.fail_after(IDLE_SECONDS):
                    await self.more()
            except anyio.EndOfStream:
                return b""
        taken, self.held = self.held[:most], self.held[most:]
        return taken


Counted = Callable[[int], Awaitable[None]]


async def relay(guest: Peer, upstream: Peer, traffic: Traffic) -> None:
    """Bytes both ways until both sides have said all, or nothing is said for too long.

    Raises:
        OverCapError: the bytes that may be carried in all are used up.
    """
    over = False

    async def pump(source: Peer, target: ByteStream, counted: Counted) -> None:
        nonlocal over
        try:
            while data := await source.some(traffic.most_bytes):
                await counted(len(data))
                await target.send(data)
            await target.send_eof()
        except OverCapError:  # caught here, as the next: out of a task group it would come as a group
            over = True
            tasks.cancel_scope.cancel()
        except LOST:
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump, guest, upstream.stream, traffic.out)
        tasks.start_soon(pump, upstream, guest.stream, traffic.back)
    if over:
        raise OverCapError


async def hang_up(stream: ByteStream) -> None:
    """Closes a connection, without waiting for the other side."""
    with suppress(*LOST):
        await anyio.aclose_forcefully(stream)
