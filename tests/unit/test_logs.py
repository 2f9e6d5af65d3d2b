"""LineSplitter of output: whole, numbered, and told to each reader at its own pace."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.core.result import Event
from belljar.protocol.records import LogLine
from belljar.service.telemetry import log_lines
from belljar.service.telemetry.log_lines import LineSplitter, Live, replay


class Kept:
    """Of the store, what lines need."""

    def __init__(self) -> None:
        self.written: list[LogLine] = []

    def add(self, *lines: LogLine) -> None:
        self.written += lines

    async def flush(self, id: str) -> None:
        pass

    async def lines(self, id: str, after: int = 0, limit: int = 1000, room: float = 0) -> list[LogLine]:
        return [line for line in self.written if line.number > after][:limit]


def said(text: str, kind: str = "stdout") -> Event:
    return Event(run="r", seq=1, kind=kind, text=text)  # type: ignore[arg-type]


def live(store: Kept, room: int = 1 << 20) -> Live:
    return Live("r", store, lambda line: None, room)  # type: ignore[arg-type]


@given(st.lists(st.text(alphabet="ab\n", max_size=9), max_size=20))
def test_the_lines_are_those_of_the_whole_text_however_it_was_cut(chunks: list[str]) -> None:
    lines = LineSplitter("r")
    told = [line for chunk in chunks for line in lines.feed(said(chunk))] + lines.end(0)
    whole = "".join(chunks)
    assert [line.message for line in told] == whole.removesuffix("\n").split("\n") if whole else told == []
    assert [line.number for line in told] == list(range(1, len(told) + 1))


def test_streams_do_not_mix_within_a_line() -> None:
    lines = LineSplitter("r")
    assert list(lines.feed(said("out "))) == []
    assert [line.message for line in lines.feed(said("err\n", "stderr"))] == ["err"]
    assert [(line.stream, line.message) for line in lines.feed(said("more\n"))] == [("stdout", "out more")]


async def count(log: Live, lines: int) -> None:
    for number in range(lines):
        await log.hear(said(f"{number}\n"))


def test_a_line_without_end_is_told_in_parts() -> None:
    lines = LineSplitter("r")
    told = [*lines.feed(said("x" * 200_000)), *lines.end(0)]
    assert "".join(line.message for line in told) == "x" * 200_000
    assert len(told) == 4


async def test_a_reader_that_comes_late_gets_all_of_it_from_the_store_and_from_memory() -> None:
    store = Kept()
    log = live(store, room=5000)
    for number in range(1000):
        await log.hear(said(f"line {number}\n"))
    log.close(0)
    assert len(log._kept) < 100
    told = [line.message async for batch in log.follow(0) for line in batch]
    assert told == [f"line {number}" for number in range(1000)]


async def test_a_reader_that_comes_back_with_its_last_number_misses_nothing_and_gets_nothing_twice() -> None:
    log = live(Kept())
    await count(log, 10)
    log.close(0)
    assert [line.number async for batch in log.follow(7) for line in batch] == [8, 9, 10]


async def test_lines_that_nobody_kept_are_told_as_a_gap() -> None:
    store = Kept()
    log = live(store, room=400)
    await count(log, 100)
    store.written.clear()
    log.close(0)
    told = [line async for batch in log.follow(0) for line in batch]
    assert told[0].stream == "gap"
    assert told[-1].message == "99"
    assert told[0].number + 1 == told[1].number


def shown(lines: list[LogLine]) -> list[int | str]:
    """Numbers of lines, and what gaps say."""
    return [line.message if line.stream == "gap" else line.number for line in lines]


async def test_lines_that_the_store_lost_at_the_beginning_and_in_the_middle_are_told_as_gaps() -> None:
    store = Kept()
    log = live(store, room=400)
    await count(log, 100)
    log.close(0)
    store.written = [line for line in store.written if line.number in (3, 4, 10)]
    kept = log._kept[0].number
    assert kept > 11
    after = [line async for batch in replay(store, "r", 0) for line in batch]  # type: ignore[arg-type]
    assert shown(after) == ["2 lines were not kept", 3, 4, "5 lines were not kept", 10]
    during = [line async for batch in log.follow(0) for line in batch]
    rest = [f"{kept - 11} lines were not kept", *range(kept, 101)]
    assert shown(during) == ["2 lines were not kept", 3, 4, "5 lines were not kept", 10, *rest]
    assert [line.number for line in during] == sorted({line.number for line in during})


async def test_what_the_store_lost_but_memory_has_is_told() -> None:
    store = Kept()
    log = live(store, room=400)
    await count(log, 100)
    log.close(0)
    store.written = [line for line in store.written if line.number < log._kept[0].number or line.number == 100]
    told = [line async for batch in log.follow(0) for line in batch]
    assert shown(told) == list(range(1, 101))


async def test_a_reader_is_told_of_silence_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "BEAT", 0.01)
    log = live(Kept())
    await log.hear(said("one\n"))
    heard: list[str] = []
    with anyio.fail_after(10):
        async for batch in log.follow(0):
            heard += [line.message for line in batch] or [""]
            if heard == ["one", "", ""]:
                await log.hear(said("two\n"))
            elif heard[-1] == "two":
                log.close(0)
    assert heard == ["one", "", "", "two"]


def test_more_lines_than_anybody_reads_are_told_together_and_whole() -> None:
    lines = LineSplitter("r")
    text = "".join(f"{number}\n" for number in range(10_000))
    assert len(list(lines.feed(said(text)))) == 10_000
    told = list(lines.feed(said("a\nb\n\nc")))
    assert [line.message for line in told] == ["a\nb\n"]
    assert [line.message for line in lines.end(0)] == ["c"]


async def test_a_batch_is_bounded_by_its_size_too() -> None:
    log = live(Kept())
    for _ in range(40):
        await log.hear(said("x" * 60_000 + "\n"))
    log.close(0)
    assert max([len(batch) async for batch in log.follow(35)]) <= 5


async def test_many_lines_of_one_stream_are_not_overtaken_by_a_line_of_the_other() -> None:
    """A reader drops numbers that it has passed: what is numbered first has to be taken first."""
    store = Kept()
    log = live(store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.hear, said("out\n" * 300))
        tasks.start_soon(log.hear, said("err\n", "stderr"))
    assert [line.number for line in store.written] == list(range(1, 302))
