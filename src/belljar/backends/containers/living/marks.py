"""What the launcher of a living box' command (`guest/shell/containers/command.sh`) says among the guest's output."""

from __future__ import annotations

_LINE_BYTES = 32  # at most, of what follows the secret word
_LINES = 16  # of the launcher's, which has four to say
_PREAMBLE_BYTES = 1 << 12


class Marks:
    """Takes the launcher's lines out of a stream.

    Attributes:
        said: what each line said after the secret word: its first word, and the number that follows.
        preamble: the end of what came before the guest began.
    """

    def __init__(self, word: bytes, *, begun: bool) -> None:
        """Waits for lines that begin with `word`; until the guest has `begun`, nothing else is the guest's."""
        self.said: dict[bytes, int] = {}
        self.preamble: bytes = b""
        self._begun = begun
        self._word = word
        self._held = b""

    def take(self, data: bytes) -> bytes:
        """Takes the next bytes and returns those that are the guest's; what may be the beginning of a mark waits."""
        said, self._held = self._held + data, b""
        guests = b""
        while (place := said.find(self._word)) >= 0:
            told, newline, after = said[place + len(self._word) :].partition(b"\n")
            if not newline and len(told) <= _LINE_BYTES:
                self._held = said[place:]
                return guests + self._guests(said[:place])
            guests += self._guests(said[:place])
            self._note(told[:_LINE_BYTES].split())
            said = after
        place = len(said) - _overlap(said, self._word)
        self._held = said[place:]
        return guests + self._guests(said[:place])

    def rest(self) -> bytes:
        """Returns what was held back, when nothing more will come."""
        held, self._held = self._held, b""
        return self._guests(held)

    def _note(self, words: list[bytes]) -> None:
        name, number = (*words, b"", b"")[:2]
        if len(self.said) < _LINES:
            self.said.setdefault(name, int(number) if number.isdigit() else 0)
        self._begun = self._begun or name == b"runs"

    def _guests(self, said: bytes) -> bytes:
        if self._begun:
            return said
        self.preamble = (self.preamble + said)[-_PREAMBLE_BYTES:]
        return b""


def _overlap(said: bytes, mark: bytes) -> int:
    """How many bytes at the end of the one are the beginning of the other."""
    return next((n for n in range(min(len(said), len(mark) - 1), 0, -1) if mark.startswith(said[-n:])), 0)
