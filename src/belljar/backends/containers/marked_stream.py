"""Tells apart what the guest wrote to a stream from what the launcher and the engine did."""

from __future__ import annotations

_PREAMBLE_BYTES = 1 << 16
_EXIT_CODE_BYTES = 16  # at most


class MarkedStream:
    """Finds in a stream what the guest wrote: between two marks that only we and the launcher know.

    Attributes:
        begun: whether the first mark was seen.
        preamble: what the launcher and the engine wrote before it, or the end of that.
        ended: what the launcher wrote with the second mark; None: it was not seen.
    """

    def __init__(self, mark: bytes, *, begun: bool) -> None:
        """Waits for the first mark, or, if it has `begun` already, for the second."""
        self.begun: bool = begun
        self.preamble: bytes = b""
        self.ended: bytes | None = None
        self._mark = mark
        self._held = b""

    def take(self, data: bytes) -> bytes:
        """Takes the next bytes and returns those that are the guest's.

        The tail is held back while it may be the beginning of a mark.
        """
        if self.ended is not None:
            return b""
        said, self._held = self._held + data, b""
        place = said.find(self._mark)
        if place < 0:
            place = len(said) - _overlap(said, self._mark)
            self._held = said[place:]
            return self._guests(said[:place])
        told, newline, after = said[place + len(self._mark) :].partition(b"\n")
        if not newline and len(told) <= _EXIT_CODE_BYTES:
            self._held = said[place:]
        elif self.begun:
            self.ended = told.strip()
        else:
            self.preamble = (self.preamble + said[:place])[-_PREAMBLE_BYTES:]
            self.begun = True
            return self.take(after)
        return self._guests(said[:place])

    def _guests(self, said: bytes) -> bytes:
        if self.begun:
            return said
        self.preamble = (self.preamble + said)[-_PREAMBLE_BYTES:]
        return b""

    def rest(self) -> bytes:
        """Returns what was held back, when nothing more will come."""
        held, self._held = self._held, b""
        return self._guests(held) if self.ended is None else b""


def _overlap(said: bytes, mark: bytes) -> int:
    """How many bytes at the end of the one are the beginning of the other."""
    return next((n for n in range(min(len(said), len(mark) - 1), 0, -1) if mark.startswith(said[-n:])), 0)
