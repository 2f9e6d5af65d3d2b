"""Keeps the output of a process that may never end, so that readers can come, go and come back."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

import anyio

from belljar.core.process import Chunk
from belljar.core.result import StreamName
from belljar.core.values import MIB

HEAD_BYTES = TAIL_BYTES = MIB  # that are kept of the beginning and of the end
_PIECE_BYTES = 64  # that a piece counts beside its data: whoever prints byte by byte must not fill our memory


class OutputLog:
    """Numbered pieces of both streams in order: the first megabyte and the last one. A reader slows nobody."""

    def __init__(self, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._head_most = self._head_room = head
        self._tail_room = tail
        self._head: list[Chunk] = []
        self._tail: deque[Chunk] = deque()
        self._tail_bytes = 0
        self._dropped = 0  # bytes between head and tail
        self._last = 0
        self._more = anyio.Event()
        self._closed = False

    @property
    def last(self) -> int:
        """The number of the newest piece; 0 before the first."""
        return self._last

    @property
    def held(self) -> int:
        """How many bytes it holds, with what the pieces themselves take."""
        return self._head_most - self._head_room + self._tail_bytes

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def add(self, stream: StreamName, data: bytes) -> None:
        """Takes the next piece of output."""
        if not data:
            return
        self._last += 1
        chunk = Chunk(seq=self._last, stream=stream, data=data)
        if self._head_room > 0 and not self._tail:
            self._head_room -= _size(chunk)
            self._head.append(chunk)
        else:
            self._push(chunk)
        self._wake()

    def close(self) -> None:
        """Says that nothing more will come: readers end when they have read all."""
        self._closed = True
        self._wake()

    def since(self, seq: int) -> list[Chunk]:
        """Returns the pieces that are kept after number `seq`; one after a gap says how much is missed."""
        found = self._head[max(seq, 0) :]  # by number, without looking at the others: each new piece wakes all readers
        wanted = min(max(self._last - seq, 0), len(self._tail))
        rest = [*islice(reversed(self._tail), wanted)][::-1]
        expected = max(seq, len(self._head)) + 1
        if rest and rest[0].seq > expected:  # the gap between head and tail
            rest[0] = rest[0].model_copy(update={"missed": self._missed(expected, rest[0].seq)})
        return found + rest

    def _missed(self, first: int, following: int) -> int:
        """How many bytes the pieces from `first` to the one before `following` had, which are not kept.

        Of a reader that has had some of them it is a share: the sizes of single pieces are not kept either.
        """
        before = self._head[-1].seq if self._head else 0
        return round(self._dropped * (following - first) / (following - 1 - before))

    async def follow(self, since: int = 0) -> AsyncIterator[Chunk]:
        """Gives the pieces after number `since`: those that are kept at once, then new ones until the end."""
        while True:
            more = self._more
            for chunk in self.since(since):
                since = chunk.seq
                yield chunk
            if more is not self._more:
                continue
            if self._closed:
                return
            await more.wait()

    def _push(self, chunk: Chunk) -> None:
        self._tail.append(chunk)
        self._tail_bytes += _size(chunk)
        while len(self._tail) > 1 and self._tail_bytes - _size(self._tail[0]) >= self._tail_room:
            gone = self._tail.popleft()
            self._tail_bytes -= _size(gone)
            self._dropped += len(gone.data)

    def _wake(self) -> None:
        more, self._more = self._more, anyio.Event()
        more.set()


def _size(chunk: Chunk) -> int:
    return len(chunk.data) + _PIECE_BYTES
