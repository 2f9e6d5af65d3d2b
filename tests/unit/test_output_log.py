"""What is kept of a process that goes on: numbered pieces of both streams, the beginning and the end."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.control.output_log import OutputLog
from belljar.core.result import StreamName
from belljar.service.mcp.processes import _text

pytestmark = pytest.mark.anyio
_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")


@given(
    parts=st.lists(st.tuples(st.sampled_from(_STREAMS), st.binary(max_size=300)), max_size=40), since=st.integers(0, 45)
)
def test_what_is_kept_and_what_is_missed_is_all_there_was(parts: list[tuple[StreamName, bytes]], since: int) -> None:
    log = OutputLog(head=500, tail=500)
    for stream, data in parts:
        log.add(stream, data)
    given = [(stream, data) for stream, data in parts if data]
    assert log.last == len(given)
    told = log.since(since)
    assert all((chunk.stream, chunk.data) == given[chunk.seq - 1] for chunk in told)
    assert [chunk.seq for chunk in told] == sorted(chunk.seq for chunk in told if chunk.seq > since)
    if since == 0:
        assert sum(len(chunk.data) + chunk.missed for chunk in told) == sum(len(data) for _, data in given)
    if given and since < len(given):
        assert told[-1].seq == len(given), "the end is kept always"
    assert [chunk.seq for chunk in told] == [chunk.seq for chunk in log.since(0) if chunk.seq > since]


def test_whoever_prints_byte_by_byte_does_not_fill_the_memory() -> None:
    log = OutputLog()
    for _ in range(60_000):
        log.add("stdout", b"x")
    kept = log.since(0)
    assert len(kept) < 40_000
    assert len(kept) + sum(chunk.missed for chunk in kept) == 60_000


async def test_a_reader_that_comes_late_hears_all_of_it_and_ends_with_it() -> None:
    log = OutputLog()
    log.add("stdout", b"one")
    heard: list[bytes] = []

    async def hear() -> None:
        heard.extend([chunk.data async for chunk in log.follow()])

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hear)
            log.add("stderr", b"two")
            log.close()
    assert heard == [b"one", b"two"] and log.closed


_PIECES = st.lists(st.sampled_from([b"a", "ü".encode(), b"\r\n", b"[", b"]0;", b"m"]), max_size=5).map(b"".join)


@given(parts=st.lists(st.tuples(st.sampled_from(_STREAMS), _PIECES), max_size=30))
def test_a_model_reads_no_escape_sequence_of_a_process(parts: list[tuple[StreamName, bytes]]) -> None:
    log = OutputLog()
    for stream, data in parts:
        log.add(stream, b"\x1b[31m" + data + b"\x1b]0;title\x07\x1b[0m")
    plain = b"".join(data for _, data in parts).decode().replace("\r\n", "\n")
    assert _text(log.since(0)) == plain


def test_a_model_reads_beginning_and_end_of_a_flood_and_how_much_is_between() -> None:
    log = OutputLog()
    log.add("stdout", "ü".encode()[:1])
    log.add("stdout", "ü".encode()[1:] + b"first")
    for _ in range(300):
        log.add("stdout", b"x" * 4096)
    log.add("stderr", b"last")
    text = _text(log.since(0))
    assert text.startswith("üfirst") and text.endswith("last") and len(text) < 200_000
    assert f"[… {301 * 4096 - text.count('x') - 4096} bytes …]" in text


def test_a_reader_that_falls_behind_again_and_again_misses_no_more_than_there_was() -> None:
    log, told, read = OutputLog(head=500, tail=500), 0, 0
    for number in range(1, 2_001):
        log.add("stdout", b"x" * 50)
        if number % 500 == 0:
            for chunk in log.since(read):
                told += len(chunk.data) + chunk.missed
                read = chunk.seq
    assert told == 2_000 * 50
