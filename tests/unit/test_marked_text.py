"""What a session's agent says between what its turns print."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.backends import marked_text
from belljar.backends.marked_text import MarkedText
from belljar.backends.session_agents import _quoted

MARK = "\x1eabc\x1e"


@given(st.lists(st.sampled_from(["a", "\n", "\x1e", "\x1eab", MARK + "{}\n"]), max_size=12), st.integers(1, 4))
def test_however_a_stream_is_cut_its_frames_and_texts_are_the_same(parts: list[str], size: int) -> None:
    whole = "".join(parts) + MARK + "end\n"
    reader = MarkedText(MARK)
    cut = [piece for at in range(0, len(whole), size) for piece in reader.feed(whole[at : at + size])]
    once = MarkedText(MARK).feed(whole)

    def joined(pieces: list[tuple[str, bool]]) -> tuple[str, list[str]]:
        return "".join(text for text, frame in pieces if not frame), [text for text, frame in pieces if frame]

    assert joined(cut) == joined(once)
    assert joined(once)[1][-1] == "end"


def test_a_frame_without_an_end_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked_text, "MAX_FRAME_CHARACTERS", 100)
    reader = MarkedText(MARK)
    with pytest.raises(OverflowError):
        reader.feed(MARK + "x" * 101)
    assert reader.feed("after") == [("after", False)]


def test_any_code_is_one_line_for_bash_and_comes_out_as_it_was() -> None:
    text = 'it\'s \\n "$x" `y`\n\ttab \r é 😀 \x01\x1f\x7f!'
    assert "\n" not in _quoted(text)
    said = subprocess.run(["bash", "-c", f"printf %s {_quoted(text)}"], capture_output=True, check=True)
    assert said.stdout.decode() == text
