"""How the client reads answers, however they come, and what it refuses to send."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.client.framing import Answer, AnswerReader, Broken, lines_of, request_line
from belljar.core import errors

_SIZED = b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX-One: a b\r\n\r\nhello"
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
_CLOSED = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
_TWICE = b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n" + _SIZED
_OLD = b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"


def read(data: bytes, size: int) -> tuple[Answer, AnswerReader]:
    reader = AnswerReader()
    for start in range(0, len(data), size):
        if answer := reader.feed(data[start : start + size]):
            assert start + size >= len(data), "not before all of it is there"
            return answer, reader
    raise AssertionError("it is not whole")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "data, status, stays", [(_SIZED, 201, True), (_CHUNKED, 200, True), (_CLOSED, 200, False), (_TWICE, 201, True),
                            (_OLD, 200, False)]
)  # fmt: skip
def test_an_answer_is_read_in_pieces_of_any_size(data: bytes, status: int, stays: bool, size: int) -> None:
    answer, reader = read(data, size)
    assert (answer.status, answer.content, reader.reusable) == (status, b"hello", stays)
    assert "x-early" not in answer.headers
    assert data is not _SIZED or answer.headers == {"content-length": "5", "x-one": "a b"}


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\nhel") is None
    assert reader.feed(b"lo") is None
    answer = reader.feed(b"")
    assert answer is not None
    assert (answer.content, reader.reusable) == (b"hello", False)


@pytest.mark.parametrize("cut", range(len(_SIZED)))
def test_an_answer_that_ends_early_is_none(cut: int) -> None:
    reader = AnswerReader()
    assert reader.feed(_SIZED[:cut]) is None if cut else True
    with pytest.raises(Broken):
        reader.feed(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(Broken):
        AnswerReader().feed(data)


def test_a_connection_on_which_more_came_than_was_asked_for_is_not_used_again() -> None:
    reader = AnswerReader()
    answer = reader.feed(_SIZED + _CHUNKED)
    assert answer is not None
    assert (answer.status, answer.content, reader.reusable) == (201, b"hello", False)


@given(st.text(), st.binary(), st.binary())
def test_nothing_that_is_sent_ends_its_line_early(target: str, name: bytes, value: bytes) -> None:
    for made in (partial(request_line, "GET", target), partial(lines_of, [(name, value)])):
        try:
            line = made()
        except errors.InvalidRequest:
            continue
        assert line.endswith(b"\r\n")
        assert not {b"\r"[0], b"\n"[0], 0} & set(line[:-2])
