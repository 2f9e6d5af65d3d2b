"""Reads the frames of a session's agent: lines of JSON that a guest may have written, so that each is hostile.

Parsing holds Python's global lock, so a thread alone would not keep the event loop free: a frame is first bounded in
length, depth and number of values, none of which takes a parser, and then a large one is parsed in a thread.
"""

from __future__ import annotations

import json
import re
from typing import Any

import anyio.to_thread

from belljar.core.values import KIB, MIB

MAX_FRAME_CHARACTERS = 32 * MIB
MAX_DEPTH = 100  # of lists and objects in each other; what writes a result down goes no deeper than 250
MAX_VALUES = 120_000  # which is a tenth of a second of parsing
_MAX_BARE_CHARACTERS = 2 * MIB  # outside of texts: numbers take far longer to parse than texts
_SMALL_CHARACTERS = 64 * KIB  # a frame that is parsed at once
_BRACKETS = re.compile(r"[\[\]{}]")

Frame = dict[str, Any]


class FrameLines:
    """Cuts what comes through a pipe into lines, and leaves out those that nobody waits for."""

    def __init__(self) -> None:
        self._parts: list[str] = []  # of a line that is not whole yet
        self._size = 0
        self._skipping = False  # the rest of this line is not wanted

    def feed(self, text: str) -> list[str]:
        """Returns the lines that are whole now.

        Raises:
            OverflowError: a line is longer than any frame may be.
        """
        if self._skipping:
            _, newline, text = text.partition("\n")
            self._skipping = not newline
        if not text:
            return []
        first, *lines = text.split("\n")
        self._parts.append(first)
        self._size += len(first)
        if self._size > MAX_FRAME_CHARACTERS:
            self._parts, self._size = [], 0
            raise OverflowError
        if not lines:
            return []
        whole, self._parts, self._size = "".join(self._parts), [lines[-1]], len(lines[-1])
        return [whole, *lines[:-1]]

    def skip(self, text: str) -> None:
        """Takes text that nobody waits for: only where its last line begins is remembered, for the next `feed`."""
        self._parts, self._size = [], 0
        self._skipping = not text.endswith("\n")


async def read_frame(text: str | bytes) -> Frame | None:
    """Parses a frame, in a thread if it is large.

    Returns:
        The frame; None if it is no JSON object.

    Raises:
        OverflowError: it is too deep, or has too many values.
    """
    if len(text) <= _SMALL_CHARACTERS:
        return _parse(text)
    return await anyio.to_thread.run_sync(_parse, text)


def _parse(data: str | bytes) -> Frame | None:
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    _check_structure(text)
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return frame if isinstance(frame, dict) else None


def _check_structure(text: str) -> None:
    """Raises OverflowError for a text that, if it is JSON, is too deep or has too many values to be parsed."""
    if "\\" in text:  # what is left of escapes then is no quote and no bracket
        text = text.replace("\\\\", "").replace('\\"', "")
    if text.count('"') > 2 * MAX_VALUES:
        raise OverflowError
    bare = "".join(text.split('"')[::2])
    if len(bare) > _MAX_BARE_CHARACTERS or sum(map(bare.count, ",[{")) > MAX_VALUES or _depth(bare) > MAX_DEPTH:
        raise OverflowError


def _depth(bare: str) -> int:
    deepest = depth = 0
    for bracket in _BRACKETS.findall(bare):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
