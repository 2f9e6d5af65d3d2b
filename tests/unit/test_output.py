"""What is kept of a stream: exactly its head and its tail, with the cut counted."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar.core.display import neutralise
from belljar.core.values import MIB
from belljar.host.capture import FLOOD_BYTES, Capture

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

chunks = st.lists(st.binary(max_size=30) | st.text(max_size=10).map(str.encode), max_size=20)


def fill(limit: int | None, parts: list[bytes]) -> tuple[Capture, str]:
    capture = Capture(limit)
    shown = "".join([*(capture.feed(part) for part in parts if part), capture.feed(b"")])
    return capture, shown


@patient
@given(parts=chunks, limit=st.integers(0, 200))
def test_exactly_head_and_tail_are_kept_and_the_cut_is_counted(parts: list[bytes], limit: int) -> None:
    capture, _ = fill(limit, parts)
    whole = b"".join(parts)
    assert capture.total == len(whole)
    assert capture.cut == max(0, len(whole) - limit)
    if not capture.cut:
        assert capture.text == whole.decode("utf-8", "replace")
        return
    head, tail = whole[: limit - limit // 2], whole[len(whole) - limit // 2 :]
    notice = f"\n[... {capture.cut} bytes cut by belljar: the limit is {limit} ...]\n"
    assert capture.text == head.decode("utf-8", "replace") + notice + tail.decode("utf-8", "replace")


@patient
@given(parts=chunks, limit=st.integers(0, 200))
def test_what_is_shown_is_the_stream_s_beginning_up_to_the_limit(parts: list[bytes], limit: int) -> None:
    _, shown = fill(limit, parts)
    kept = b"".join(parts)[:limit]
    assert shown == kept.decode("utf-8", "replace")


@patient
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 240), max_size=8))
def test_a_character_split_between_two_reads_is_shown_whole(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[a:b] for a, b in pairwise(places)]
    capture, shown = fill(10_000, parts)
    assert shown == capture.text == data.decode()


@patient
@given(parts=chunks)
def test_without_a_limit_all_is_shown_and_nothing_kept(parts: list[bytes]) -> None:
    capture, shown = fill(None, parts)
    assert shown == b"".join(parts).decode("utf-8", "replace")
    assert (capture.cut, capture.text, capture.flooded) == (0, "", False)


@pytest.mark.parametrize(
    ("limit", "kept"), [(0, ("", "")), (1, ("a", "")), (2, ("a", "j")), (3, ("ab", "j")), (5, ("abc", "ij"))]
)
def test_small_and_odd_limits_give_the_spare_byte_to_the_head(limit: int, kept: tuple[str, str]) -> None:
    capture, shown = fill(limit, [b"abcdefghij"])
    head, _, rest = capture.text.partition("\n[... ")
    assert (head, rest.partition("...]\n")[2]) == kept
    assert shown == "abcdefghij"[:limit]


def test_a_stream_at_exactly_its_limit_is_not_cut() -> None:
    capture, _ = fill(10, [b"abcdefghij"])
    assert (capture.cut, capture.text) == (0, "abcdefghij")


def test_an_endless_stream_of_single_bytes_takes_little_memory_and_time() -> None:
    capture = Capture(1000)
    started = time.perf_counter()
    for _ in range(200_000):
        capture.feed(b"x")
    assert len(capture._tail) <= 501 and len(capture._head) == 500
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("limit", [10, 16 * MIB])
def test_a_flood_is_some_megabytes_past_the_limit_however_large_that_is(limit: int) -> None:
    capture = Capture(limit)
    for size in (limit, FLOOD_BYTES):
        capture.feed(b"x" * size)
    assert not capture.flooded
    capture.feed(b"x")
    assert capture.flooded


@patient
@given(st.text())
def test_no_guest_text_can_act_on_a_terminal(text: str) -> None:
    shown = neutralise(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    assert neutralise(shown) == shown


def test_escapes_and_reordering_are_made_visible_and_plain_text_is_left_alone() -> None:
    assert neutralise("a\r\nb\té\x1b[2J\x07\u202ex") == "a\nb\té␛[2J␇\ufffdx"
