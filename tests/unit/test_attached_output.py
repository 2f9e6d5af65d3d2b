"""Output of a process that a person looks at: on a terminal nothing of it acts, elsewhere it is as it was."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from belljar.cli.living import attached
from belljar.core.process import Chunk

pytestmark = pytest.mark.anyio
_HOSTILE = "\x1b]0;renamed\x07é".encode()


class Screen(io.TextIOWrapper):
    """Where we print; a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__(io.BytesIO(), "utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Talking:
    """A process that prints byte by byte."""

    async def output(self, since: int) -> AsyncIterator[Chunk]:
        for at, byte in enumerate(_HOSTILE, 1):
            yield Chunk(seq=at, stream="stdout", data=bytes([byte]))

    async def wait(self) -> None:
        return None


async def _shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> bytes:
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    await attached.relay(cast(Any, Talking()), 0, with_input=False, as_json=False)
    return cast(io.BytesIO, screen.buffer).getvalue()


async def test_what_a_process_prints_does_nothing_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = await _shown(monkeypatch, terminal=True)
    assert b"\x1b" not in shown and b"\x07" not in shown
    assert shown.endswith("é".encode()), "though it came in two pieces"


async def test_what_is_not_shown_on_a_terminal_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _shown(monkeypatch, terminal=False) == _HOSTILE
