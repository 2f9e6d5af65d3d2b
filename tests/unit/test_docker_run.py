"""Where a guest's words begin and end in what its launcher says, however the bytes are cut."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.backends.containers import spec
from belljar.backends.containers.marked_stream import MarkedStream

WORD = b"0123456789abcdef"


def heard(marked: MarkedStream, said: bytes, sizes: list[int]) -> bytes:
    out, place = b"", 0
    for size in (*sizes, len(said)):
        out += marked.take(said[place : place + size])
        place += size
    return out + marked.rest()


@given(st.binary(max_size=200), st.integers(0, 255), st.lists(st.integers(1, 20), max_size=60), st.binary(max_size=20))
def test_a_guests_words_are_between_the_marks_whatever_they_are_and_however_they_are_cut(
    words: bytes, code: int, sizes: list[int], late: bytes
) -> None:
    marked = MarkedStream(WORD, begun=False)
    said = b"launcher: hm\n" + WORD + b"\n" + words + WORD + b" %d\n" % code + late
    assert heard(marked, said, sizes) == words
    assert (marked.preamble, marked.ended) == (b"launcher: hm\n", str(code).encode())


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), max_size=60))
def test_without_the_second_mark_all_of_it_is_the_guests(words: bytes, sizes: list[int]) -> None:
    marked = MarkedStream(WORD, begun=True)
    assert heard(marked, words, sizes) == words
    assert marked.ended is None


@pytest.mark.parametrize("nearly", [WORD[:-1], WORD[:5] + WORD[:7], b"x" + WORD[:3]])
def test_what_only_begins_like_the_mark_is_not_lost(nearly: bytes) -> None:
    marked = MarkedStream(WORD, begun=True)
    assert marked.take(nearly) != nearly, "it may still become the mark"
    assert marked.take(b"!") + marked.rest() != b""
    again = MarkedStream(WORD, begun=True)
    assert again.take(nearly) + again.take(b"!") == nearly + b"!"


def test_a_guest_that_forges_the_mark_ends_itself_and_cannot_fill_our_memory() -> None:
    marked = MarkedStream(WORD, begun=True)
    assert marked.take(b"a" + WORD + b"x" * 10_000) == b"a"
    assert marked.ended is not None
    assert marked.take(b"y" * 10_000) == b""


def test_a_launcher_that_never_began_is_heard_as_the_preamble_only() -> None:
    marked = MarkedStream(WORD, begun=False)
    assert heard(marked, b"sh: cannot change to that folder\n", [3, 4]) == b""
    assert marked.preamble == b"sh: cannot change to that folder\n"


def launched(cwd: str, env: dict[str, str], argv: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The launcher itself, in a process namespace of its own: at the end it ends every process it may."""
    said = WORD + b"\n" + spec.order(cwd, env, argv) + stdin
    line = " ".join(map(shlex.quote, spec.LAUNCHER)).replace("exec sleep 20", "exit")
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "sh", "-c", f"{line}; exit 0"]
    done = subprocess.run(inside, input=said, capture_output=True, timeout=30, check=False)
    if done.stderr.startswith(b"unshare:"):
        pytest.skip(f"THE LAUNCHER was not tried: no process namespace here ({done.stderr.decode().strip()})")
    return done


@pytest.mark.parametrize("word", ["a b", "it's", 'say "x"', "two\nlines", "$HOME `id` \\n", "", "-n", "*", "ünï"])
def test_every_word_reaches_the_program_as_it_was_given(word: str) -> None:
    done = launched("/", {"GIVEN": word}, ["sh", "-c", 'printf "%s|%s" "$1" "$GIVEN"', "sh", word])
    assert done.stdout.removesuffix(WORD + b"\n").decode() == f"{word}|{word}"
    assert done.stderr == WORD + b"\n" + WORD + b" 0\n"


def test_the_program_gets_what_follows_the_order_as_its_stdin_and_its_end_is_told() -> None:
    done = launched("/", {}, ["sh", "-c", "cat; echo oops >&2; exit 7"], stdin=b"line 1\nline 2")
    assert done.stdout == b"line 1\nline 2" + WORD + b"\n"
    assert done.stderr == WORD + b"\noops\n" + WORD + b" 7\n"


@pytest.mark.parametrize("argv", [["exit", "3"], ["a=b"], ["cd", "/"]])
def test_a_word_that_the_shell_knows_is_a_program_that_is_missing(argv: list[str]) -> None:
    done = launched("/", {"A": "1"}, argv)
    assert done.stderr.startswith(WORD + b"\n")
    assert done.stderr.endswith(WORD + b" 127\n")


def test_a_guest_that_died_of_a_signal_says_nothing_more_and_has_the_signals_code() -> None:
    done = launched("/", {}, ["sh", "-c", "kill -s SEGV $$"])
    assert done.stderr == WORD + b"\n" + WORD + b" 139\n"


def test_what_the_guest_started_is_ended_with_it() -> None:
    done = launched("/", {}, ["sh", "-c", "(sleep 60; echo late) & echo up"])
    assert done.stdout == b"up\n" + WORD + b"\n"
