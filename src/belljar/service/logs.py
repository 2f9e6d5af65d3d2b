"""Output as lines with numbers. The latest of a run under way are in memory, all of them go to the store, and each
reader goes at its own pace: one that is slow costs nothing, one that comes back with its last number misses nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Literal

import anyio

from belljar.models import KIB, Event
from belljar.service.records import LogLine

if TYPE_CHECKING:
    from belljar.service.store import Store

_LONGEST = 64 * KIB  # characters of a line; what is longer is told in parts
_BATCH = 500
Told = Literal["stdout", "stderr", "display", "limit", "denied"]


class Lines:
    """Makes lines of what a guest wrote, whole ones where it wrote whole ones, and gives each its number."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._number = 0
        self._open: dict[Told, str] = {}

    def feed(self, event: Event) -> list[LogLine]:
        if event.kind == "finished":
            return self.end(event.at)
        if event.kind == "started" or not event.text:
            return []
        if event.kind not in ("stdout", "stderr"):
            return [self._line(event.kind, event.text[:_LONGEST], event.at)]
        *whole, rest = (self._open.pop(event.kind, "") + event.text).split("\n")
        found = [part for text in whole for part in _parts(text)]
        while len(rest) >= _LONGEST:
            found.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        if rest:
            self._open[event.kind] = rest
        return [self._line(event.kind, text, event.at) for text in found]

    def end(self, at: float) -> list[LogLine]:
        """What was begun and never ended."""
        left, self._open = self._open, {}
        return [self._line(stream, text, at) for stream, text in left.items()]

    def _line(self, stream: Told, text: str, at: float) -> LogLine:
        self._number += 1
        return LogLine.model_construct(
            container_id=self._run, number=self._number, timestamp=at, stream=stream, message=text
        )


def _parts(text: str) -> list[str]:
    return [text[at : at + _LONGEST] for at in range(0, len(text), _LONGEST)] or [""]


class Live:
    """The lines of one run under way."""

    def __init__(self, run: str, store: Store, publish: Callable[[LogLine], None], room: int) -> None:
        self._run = run
        self._lines = Lines(run)
        self._store = store
        self._publish = publish
        self._room = room
        self._kept: deque[LogLine] = deque()
        self._size = 0
        self._news = anyio.Event()
        self.closed = False

    def hear(self, event: Event) -> None:
        self._take(self._lines.feed(event))

    def close(self, at: float) -> None:
        self._take(self._lines.end(at))
        self.closed = True
        self._news.set()

    def _take(self, lines: list[LogLine]) -> None:
        if not lines:
            return
        for line in lines:
            self._kept.append(line)
            self._size += len(line.message) + 64
            self._publish(line)
        self._store.add(*lines)
        while self._size > self._room and len(self._kept) > 1:
            self._size -= len(self._kept.popleft().message) + 64
        news, self._news = self._news, anyio.Event()
        news.set()

    async def follow(self, after: int) -> AsyncIterator[list[LogLine]]:
        """Batches of what comes after a number, to the end of the run."""
        while True:
            news, closed = self._news, self.closed
            if batch := await self._next(after):
                after = batch[-1].number
                yield batch
            elif closed:
                return
            else:
                await news.wait()

    async def _next(self, after: int) -> list[LogLine]:
        kept = self._kept
        if not kept or kept[-1].number <= after:
            return []
        first = kept[0].number
        if after + 1 >= first:
            start = after + 1 - first
            return [kept[place] for place in range(start, min(len(kept), start + _BATCH))]
        await self._store.flush()
        if older := await self._store.lines(self._run, after, _BATCH):
            return older
        return [_gap(self._run, after, self._kept[0])]


async def replay(store: Store, run: str, after: int) -> AsyncIterator[list[LogLine]]:
    """The same of a run that is over, or that another process runs: what the store has by now."""
    await store.flush()
    while batch := await store.lines(run, after, _BATCH):
        yield batch
        after = batch[-1].number


def _gap(run: str, after: int, then: LogLine) -> LogLine:
    missing = then.number - after - 1
    return LogLine(
        container_id=run, number=then.number - 1, timestamp=then.timestamp, stream="gap",
        message=f"{missing} lines were not kept",
    )  # fmt: skip
