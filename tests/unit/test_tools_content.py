"""What models read of runs: everything arrives, nothing is too large, and no guest can break an answer."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.types import CallToolResult, ImageContent, TextContent

from belljar.core import errors
from belljar.core.result import Entry, ErrorType, Failure, Result, Status
from belljar.protocol.responses import Executed
from belljar.service.mcp import content

PNG = b"\x89PNG\r\n\x1a\n"
TAKEN = 1024 * 1024  # bytes of one event that the official client takes


def text(answer: CallToolResult) -> str:
    return "".join(block.text for block in answer.content if isinstance(block, TextContent))


def images(answer: CallToolResult) -> list[ImageContent]:
    return [block for block in answer.content if isinstance(block, ImageContent)]


def sent(answer: CallToolResult) -> bytes:
    """As it goes over the wire: UTF-8, or it does not go at all."""
    return answer.model_dump_json(by_alias=True, exclude_none=True).encode()


def result(**fields: Any) -> Result:
    return Result(**{"status": Status.SUCCESS, "exit_code": 0} | fields)


def test_a_success_reads_as_what_it_printed() -> None:
    answer = content.of_run(result(stdout="42\n"), "bj-1")
    assert (text(answer), answer.is_error) == ("42", False)
    assert answer.structured_content and Executed.model_validate(answer.structured_content).id == "bj-1"


def test_a_success_that_printed_nothing_says_so() -> None:
    assert text(content.of_run(result(), "bj-1")) == "(it ran, and printed nothing)"


def test_a_failure_tells_output_then_status_then_what_to_do_and_is_no_error_of_the_tool() -> None:
    failure = Failure(error_type=ErrorType.MISSING_PACKAGE, message="no numpy", suggestion="profile=numeric")
    failed = result(status=Status.ERROR, exit_code=1, stdout="a\n", stderr="b\n", error=failure)
    answer = content.of_run(failed, "bj-1")
    assert (
        text(answer) == "a\n[stderr]\nb\n[error, exit code 1]\nMISSING_PACKAGE: no numpy\nSuggestion: profile=numeric"
    )
    assert answer.is_error is False


def test_a_problem_of_ours_is_an_error_with_its_fix_and_no_structured_content() -> None:
    answer = content.of_problem(errors.Busy("the queue is full", retry_after=7, status=503))
    assert answer.is_error and answer.structured_content is None
    assert text(answer) == "busy: the queue is full\nFix: try again later\nTry again in 7 s."
    assert answer.meta and answer.meta["belljar/problem"]["kind"] == "busy"


@pytest.mark.parametrize(
    "wrong", ["not base64!", base64.b64encode(b"GIF89a").decode(), 5, None, "", base64.b64encode(PNG).decode() + "="]
)
def test_what_is_no_image_is_not_called_one(wrong: object) -> None:
    answer = content.of_run(result(results=({"image/png": wrong, "text/plain": "<Figure>"},)), "bj-1")
    assert images(answer) == [] and "was left out" in text(answer) and "<Figure>" in text(answer)


def test_images_have_their_places_in_the_data_and_are_bounded_together() -> None:
    small = base64.b64encode(PNG + bytes(100_000)).decode()
    large = base64.b64encode(PNG + bytes(500_000)).decode()
    bundles = tuple({"image/png": data, "text/plain": "<Figure>"} for data in (small, large, small))
    answer = content.of_run(result(results=bundles), "bj-1")
    assert [image.data for image in images(answer)] == [small, small]
    assert answer.structured_content
    assert [bundle.get("image/png") for bundle in answer.structured_content["results"]] == [
        "(image 1 of this answer)", None, "(image 2 of this answer)",
    ]  # fmt: skip


def test_the_worst_answer_is_smaller_than_what_a_client_takes() -> None:
    flood = "\x00" * (2 * TAKEN)  # each alone is too much
    bundles = ({"text/plain": flood, "image/png": base64.b64encode(PNG + bytes(440_000)).decode()},) * 64
    failure = Failure(
        error_type=ErrorType.RUNTIME_ERROR, message=flood, suggestion=flood, context=dict.fromkeys("abcdefghij", flood)
    )
    worst = result(
        status=Status.ERROR,
        stdout=flood,
        stderr=flood,
        results=bundles,
        error=failure,
        reasons=(flood,) * 9,
        denied=(flood,) * 9,
        left_out=(flood,) * 9,
        warnings=(flood,) * 9,
    )
    answer = content.of_run(worst, "bj-1")
    assert images(answer) and answer.structured_content and answer.structured_content["truncated"]
    assert len(sent(answer)) < TAKEN


def test_text_acts_on_no_terminal_and_half_a_surrogate_pair_breaks_nothing() -> None:
    bundle = {"text/plain": "\x1b[2J\ud800", "application/json": {"a": "\udfff"}, "\ud800/x": "y"}
    answer = content.of_run(result(stdout="\x1b]0;title\x07", results=(bundle,)), "bj-1")
    sent(answer)
    assert "\x1b" not in text(answer)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(st.characters()), inside, max_size=4),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text(st.characters()), json_like, max_size=4), max_size=4))
def test_whatever_a_guest_s_bundle_holds_the_answer_can_be_sent(bundles: list[dict[str, Any]]) -> None:
    answer = content.of_run(result(results=tuple(bundles)), "bj-1")
    told = json.loads(sent(answer))
    Executed.model_validate(told["structuredContent"])


def test_a_bundle_that_is_too_deep_is_left_out() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    sent(content.of_run(result(results=({"application/json": deep, "text/plain": "[[…]]"},)), "bj-1"))


@given(st.binary(max_size=300), st.integers(0, 400))
def test_the_parts_of_a_file_are_the_file(data: bytes, limit: int) -> None:
    content.FILE_LIMIT, before = max(limit, 4), content.FILE_LIMIT
    try:
        parts, offset = [], 0
        while offset is not None:
            window = content.FileWindow(offset)
            for piece in (data[:7], data[7:]):
                window.take(piece)
            told = content.of_file("f", window).structured_content
            assert told is not None
            parts.append(told["text"].encode() if told["text"] is not None else base64.b64decode(told["base64"]))
            assert told["next_offset"] is None or told["next_offset"] > offset
            offset = told["next_offset"]
        assert b"".join(parts) == data
    finally:
        content.FILE_LIMIT = before


def test_a_folder_without_end_is_cut_and_says_so() -> None:
    answer = content.of_folder(Entry(f"f{i}\ud800", "file", 1) for i in range(5000))
    assert answer.structured_content
    assert len(answer.structured_content["files"]) + answer.structured_content["left_out"] == 5000
    assert "more were left out" in text(answer) and len(sent(answer)) < TAKEN


# --- lines of a file ---


def _lines(data: bytes, first: int, most: int | None, size: int) -> content.LineWindow:
    window = content.LineWindow(first, most)
    for at in range(0, len(data), size):
        window.take(data[at : at + size])
    return window


@given(
    data=st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\xc3\xbc"]), max_size=40).map(b"".join),
    first=st.integers(1, 8), most=st.none() | st.integers(1, 5), size=st.integers(1, 9),
)  # fmt: skip
def test_lines_are_the_same_however_a_file_comes_in(data: bytes, first: int, most: int | None, size: int) -> None:
    whole = data.splitlines(keepends=True)  # there is no other end of a line in it
    wanted = whole[first - 1 : None if most is None else first - 1 + most]
    window = _lines(data, first, most, size)
    assert (bytes(window.part), window.line_count, window.size) == (b"".join(wanted), len(whole), len(data))
    after = first + len(wanted)
    assert window.next_line == (after if wanted and after <= len(whole) else None)


def test_lines_that_do_not_fit_into_an_answer_are_read_on_from_the_next() -> None:
    data = b"".join(b"%d %s\n" % (number, b"x" * 90) for number in range(1, 3001))
    read, first = b"", 1
    while first is not None:
        window = _lines(data, first, None, 1000)
        assert 0 < len(window.part) <= content.FILE_LIMIT
        read, first = read + window.part, window.next_line
    assert read == data


def test_a_line_that_is_longer_than_an_answer_is_cut_and_does_not_hold_up_the_next() -> None:
    answer = content.of_lines("a", window := _lines(b"y" * 200_000 + b"\nnext\n", 1, None, 4096))
    assert (window.long, window.next_line, len(window.part)) == (True, 2, content.FILE_LIMIT)
    assert "offset" in text(answer) and "first_line=2" in text(answer)


def test_lines_of_what_is_no_text_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="is not text"):
        content.of_lines("a", _lines(b"\0\1\n", 1, None, 4096))
