"""Keeps the head and the tail of a stream that may never end, and says what was cut."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping
from typing import Any

from belljar.core.values import MIB

FLOOD_BYTES = 16 * MIB  # past its limit: a stream that goes on is an attack on the reader, and the run is ended


class Capture:
    """Keeps a bounded part of one stream, and decodes it as it comes."""

    def __init__(self, limit: int | None) -> None:
        """Starts empty.

        Args:
            limit: how many bytes are kept. None: nothing is kept and `feed` returns everything.
        """
        self.unlimited: bool = limit is None
        self.limit: int = limit or 0
        self.total: int = 0
        self._head = bytearray()
        self._head_room = self.limit - self.limit // 2
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._text: str | None = None  # what was built of it, until more comes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Takes the next bytes and returns the text to show now. Empty data: the stream has ended."""
        if self.unlimited:
            return self._decoder.decode(data, final=not data)
        self._text = None
        room = max(0, self.limit - self.total)
        self.total += len(data)
        keep = self._head_room - len(self._head)
        if keep > 0:
            self._head += data[:keep]
        rest = data[max(keep, 0) :]
        if rest and self.limit:
            self._push(rest)
        return self._decoder.decode(data[:room], final=not data) if room or not data else ""

    def _push(self, data: bytes) -> None:
        room = self.limit // 2
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= room:
            self._tail_size -= len(self._tail.popleft())

    @property
    def cut(self) -> int:
        """How many bytes are missing from `text`."""
        return max(0, self.total - self.limit)

    @property
    def flooded(self) -> bool:
        """Whether so much came that the run should be ended."""
        return self.total > self.limit + FLOOD_BYTES

    @property
    def text(self) -> str:
        """What was kept, with a line in between that says how much was cut."""
        return self._build() if self._text is None else self._text

    def build(self) -> None:
        """Makes `text` ready, which takes tens of milliseconds of a large one. Another thread may do it."""
        self._text = self._build()

    def _build(self) -> str:
        tail = b"".join(self._tail)
        if not self.cut:
            return (self._head + tail).decode("utf-8", "replace")
        first = self._head.decode("utf-8", "replace")
        last = tail[len(tail) - self.limit // 2 :].decode("utf-8", "replace")
        return f"{first}\n[... {self.cut} bytes cut by belljar: the limit is {self.limit} ...]\n{last}"


def scrub(value: Any) -> Any:
    """Replaces half surrogate pairs in texts, however nested: a guest can display them, and they are no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {scrub(key): scrub(item) for key, item in value.items()}
    return [scrub(item) for item in value] if isinstance(value, list | tuple) else value
