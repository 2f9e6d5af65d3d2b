"""Tells apart what a session's turn prints and what its agent says, where both come in one stream."""

from __future__ import annotations

from belljar.backends.agent_frames import MAX_FRAME_CHARACTERS


class MarkedText:
    """Finds the agent's frames in a text: each begins with a mark, and ends with its line."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""  # the beginning of a mark, or of a frame
        self._framed = False  # what is held is a frame without its end

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """Returns pieces in their order: text, and whether it is a frame.

        Raises:
            OverflowError: a frame is longer than any may be.
        """
        said, self._held = self._held + text, ""
        pieces: list[tuple[str, bool]] = []
        while said:
            cut = said.find("\n" if self._framed else self._mark)
            if cut < 0:
                keep = len(said) if self._framed else _overlap(said, self._mark)
                pieces.append((said[: len(said) - keep], False))
                self._held = said[len(said) - keep :]
                break
            pieces.append((said[:cut], self._framed))
            said = said[cut + (1 if self._framed else len(self._mark)) :]
            self._framed = not self._framed
        if len(self._held) > MAX_FRAME_CHARACTERS:
            self.skip()
            raise OverflowError
        return [(piece, framed) for piece, framed in pieces if piece]

    def skip(self) -> None:
        """Forgets what is not whole: nobody waits for it."""
        self._held, self._framed = "", False


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of the one are the beginning of the other."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
