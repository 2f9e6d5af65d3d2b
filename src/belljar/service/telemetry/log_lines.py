"""Output as lines with numbers. The latest of a run under way are in memory, all of them go to the store, and each
reader goes at its own pace: one that is slow costs nothing, one that comes back with its last number misses nothing.

A guest that writes faster than lines can be kept is slowed down by its own pipe, and everybody else has their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, cast, get_args

import anyio

from belljar.core import errors
from belljar.core.result import Event
from belljar.core.values import KIB, MIB
from belljar.host.loops import give_way
from belljar.protocol.records import Alert, LogLine

if TYPE_CHECKING:
    from belljar.service.store.store import Store

_LONGEST = 64 * KIB  # characters of a line; what is longer is told in parts
_MANY = 10_000  # lines of a run; from then on those that come together are told as one: ten megabytes of newlines
# would be a gigabyte of records
_BATCH = 500
_FEW = 10  # lines after which nobody gives way
_TURN = 50  # lines of a run that prints much, which are taken in one turn of the event loop: a millisecond
_ROOM = 256 * KIB  # characters of a batch: a reader that stands still holds one
_AHEAD = MIB  # that a run may write before it waits for the store
_ITEM = 600  # of memory for a line, besides its text
_PATIENCE = 2.0  # seconds that it waits
BEAT = 15.0  # seconds after which a reader to whom nothing came gets an empty batch: to show that it is there, or leave
Told = Literal["stdout", "stderr", "display", "limit", "denied", "alert"]
_TOLD = get_args(Told)


class LineSplitter:
    """Makes lines of what a guest wrote, whole ones where it wrote whole ones, and gives each its number."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._number = 0
        self._open: dict[Told, str] = {}

    def feed(self, event: Event) -> Iterator[LogLine]:
        """Each has its number when it is taken, not before: two streams may be fed in turns."""
        if event.kind == "finished":
            return iter(self.end(event.at))
        if event.kind not in _TOLD or not event.text:
            return iter(())
        stream = cast(Told, event.kind)
        if stream not in ("stdout", "stderr"):
            return iter((self._line(stream, event.text[:_LONGEST], event.at),))
        *whole, rest = (self._open.pop(stream, "") + event.text).split("\n")
        if self._number >= _MANY and whole:
            whole = ["\n".join(whole)]
        begun = len(rest) - len(rest) % _LONGEST
        if rest[begun:]:
            self._open[stream] = rest[begun:]
        parts = chain.from_iterable(map(_parts, whole))
        more = ((rest[at : at + _LONGEST], True) for at in range(0, begun, _LONGEST))
        return (self._line(stream, text, event.at, partial) for text, partial in chain(parts, more))

    def end(self, at: float) -> list[LogLine]:
        """What was begun and never ended."""
        left, self._open = self._open, {}
        return [self._line(stream, text, at, True) for stream, text in left.items()]

    def alert(self, alert: Alert) -> LogLine:
        """Returns an alert as a line of its own."""
        return self._line("alert", alert.message, alert.timestamp)

    def _line(self, stream: Told, text: str, at: float, partial: bool = False) -> LogLine:
        self._number += 1
        return LogLine.model_construct(
            container_id=self._run,
            number=self._number,
            timestamp=at,
            stream=stream,
            message=text,
            partial=partial,
        )


def _parts(text: str) -> list[tuple[str, bool]]:
    """A line in parts, each with whether it goes on."""
    if len(text) <= _LONGEST:
        return [(text, False)]
    starts = range(0, len(text), _LONGEST)
    return [(text[at : at + _LONGEST], at != starts[-1]) for at in starts]


class Live:
    """The lines of one run under way."""

    def __init__(self, run: str, store: Store, publish: Callable[[LogLine], None], room: int) -> None:
        """Starts without a line.

        Args:
            run: Its id.
            store: Gets all lines.
            publish: Is called with each line.
            room: Bytes of the latest lines that are kept in memory.
        """
        self._run = run
        self._lines = LineSplitter(run)
        self._store = store
        self._publish = publish
        self._room = room
        self._kept: deque[LogLine] = deque()
        self._size = 0
        self._ahead = 0
        self._news: anyio.Event | None = None  # somebody follows, and waits for more
        self.closed: bool = False

    @property
    def latest(self) -> LogLine | None:
        return self._kept[-1] if self._kept else None

    async def hear(self, event: Event) -> None:
        coming = self._lines.feed(event)
        while batch := list(islice(coming, _TURN)):
            self._take(batch)
            if len(batch) > _FEW:
                await give_way()
            await self._wait_for_store()

    async def _wait_for_store(self) -> None:
        """What the store has no room for would be lost."""
        if self._ahead > _AHEAD:
            with anyio.move_on_after(_PATIENCE), suppress(errors.NotAvailable):
                await self._store.flush(self._run)
            self._ahead = 0

    def alert(self, alert: Alert) -> None:
        """Takes an alert; what comes after the end is not told any more."""
        if not self.closed:
            self._take([self._lines.alert(alert)])

    def close(self, at: float) -> None:
        self._take(self._lines.end(at))
        self.closed = True
        self._wake()

    def _take(self, lines: list[LogLine]) -> None:
        if not lines:
            return
        for line in lines:
            self._kept.append(line)
            self._size += len(line.message) + 64
            self._ahead += len(line.message) + _ITEM
            self._publish(line)
        self._store.add(*lines)
        while self._size > self._room and len(self._kept) > 1:
            self._size -= len(self._kept.popleft().message) + 64
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()

    async def follow(self, after: int) -> AsyncIterator[list[LogLine]]:
        """Batches of what comes after a number, to the end of the run; an empty one after each `BEAT` of silence."""
        while True:
            news = self._news = self._news or anyio.Event()
            closed = self.closed
            if batch := await self._next(after):
                after = batch[-1].number
                yield batch
            elif closed:
                return
            else:
                with anyio.move_on_after(BEAT) as quiet:
                    await news.wait()
                if quiet.cancelled_caught:
                    yield []

    async def _next(self, after: int) -> list[LogLine]:
        kept = self._kept
        if not kept or kept[-1].number <= after:
            return []
        first = kept[0].number
        if after + 1 >= first:
            return _batch(kept[place] for place in range(after + 1 - first, len(kept)))
        return await self._older(after)

    async def _older(self, after: int) -> list[LogLine]:
        """What memory has not any more; where the store has not got it either, how much that is."""
        if found := await self._stored(after):
            return found
        with suppress(errors.NotAvailable):  # they are on their way there
            await self._store.flush(self._run)
        return await self._stored(after) or [_gap(after, self._kept[0])]

    async def _stored(self, after: int) -> list[LogLine]:
        found = await self._store.lines(self._run, after, _BATCH, room=_ROOM)
        first = self._kept[0].number  # from there on memory has them all, and the store perhaps not
        return with_gaps(after, [line for line in found if line.number < first])


def _batch(lines: Iterable[LogLine]) -> list[LogLine]:
    found: list[LogLine] = []
    room = _ROOM
    for line in islice(lines, _BATCH):
        found.append(line)
        room -= len(line.message)
        if room <= 0:
            break
    return found


async def replay(store: Store, run: str, after: int) -> AsyncIterator[list[LogLine]]:
    """The same of a run that is over, or that another process runs: what the store has by now."""
    await store.flush(run)
    while batch := await store.lines(run, after, _BATCH, room=_ROOM):
        yield with_gaps(after, batch)
        after = batch[-1].number


def with_gaps(after: int, lines: Iterable[LogLine]) -> list[LogLine]:
    """Those lines, and a word wherever numbers jump: what the store had no room for is missed, not passed over."""
    told: list[LogLine] = []
    for line in lines:
        if line.number > after + 1:
            told.append(_gap(after, line))
        told.append(line)
        after = line.number
    return told


def _gap(after: int, then: LogLine) -> LogLine:
    missing = then.number - after - 1
    return LogLine(
        container_id=then.container_id, number=then.number - 1, timestamp=then.timestamp, stream="gap",
        message=f"{missing} lines were not kept",
    )  # fmt: skip
