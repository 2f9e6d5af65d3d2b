"""How far a set-up has come and about how long it will still take, by how long its steps usually take."""

from __future__ import annotations

# Seconds of each step of `belljar setup wasm`, in their order, on two cores of 2026. Only their proportions matter: the
# first steps that were measured here say how fast this machine is.
USUAL_SECONDS: dict[str, float] = {
    "compiling python": 90, "compiling javascript": 6, "unpacking the library": 2, "the profile fresh": 1,
    "the profile standard": 1, "the profile numpy": 2, "the profile numeric": 4, "the profile plots": 4,
}  # fmt: skip
_STEPS = tuple(USUAL_SECONDS)


class SetupPace:
    """Follows the steps of one set-up. Times are given, in seconds of any clock."""

    def __init__(self) -> None:
        self._step = ""
        self._began = self._spent = self._planned = 0.0
        self._whole = 0.0

    def begin(self, step: str, now: float) -> None:
        """Notes that a step begins, and so that the one before it has ended."""
        if self._step in USUAL_SECONDS:
            self._spent += now - self._began
            self._planned += USUAL_SECONDS[self._step]
        self._step, self._began = step, now
        self._whole = self._whole or self._ahead()

    def left(self, now: float) -> float | None:
        """Seconds that it will still take, about; None for a step that nobody has measured."""
        if self._step not in USUAL_SECONDS:
            return None
        own = USUAL_SECONDS[self._step]
        rest = max(own * self._factor() - (now - self._began), 0.0)
        return rest + (self._ahead() - own) * self._factor()

    def share(self, now: float) -> float:
        """How much of it is done, from 0 to 1."""
        left = self.left(now)
        return 0.0 if left is None or not self._whole else min(max(1 - left / (self._whole * self._factor()), 0.0), 1.0)

    def _ahead(self) -> float:
        """Usual seconds of this step and those after it."""
        return sum(USUAL_SECONDS[step] for step in _STEPS[_STEPS.index(self._step) :]) if self._step in _STEPS else 0.0

    def _factor(self) -> float:
        return self._spent / self._planned if self._planned and self._spent else 1.0


def in_words(seconds: float | None) -> str:
    """About how long, such as "about 2 minutes left"; nothing where that is not known."""
    if seconds is None:
        return ""
    if seconds >= 90:
        return f"about {round(seconds / 60)} minutes left"
    return f"about {max(5, round(seconds / 5) * 5)} seconds left" if seconds >= 5 else "a few seconds left"
