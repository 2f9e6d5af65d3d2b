"""What somebody who waits for a pull or a build is told meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from belljar.core.model import Model

_PAUSE_SECONDS = 1.0  # between two texts
_MEGABYTE = 1_000_000
_ARRIVED = ("Verifying Checksum", "Download complete", "Extracting", "Pull complete")  # "Already exists": it never came


class Progress(Model):
    """One step of a pull or a build that is under way."""

    image: str
    step: str
    layer: str = ""
    current: int = 0
    total: int = 0


Listener = Callable[[Progress], object]


def silent(progress: Progress) -> None:
    """A listener that does nothing."""


class PullTotals:
    """Adds up what an engine tells of a pull's layers: bytes where it tells them, else layers."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}  # id -> bytes that are here, bytes in all
        self._arrived: set[str] = set()

    def add(self, progress: Progress) -> None:
        """Takes one step of the pull."""
        layer, step = progress.layer, progress.step
        if not layer or step.startswith("Pulling from"):
            return
        _, known = self._layers.setdefault(layer, (0, 0))
        if step == "Downloading":
            self._layers[layer] = (progress.current, max(progress.total, known))
        elif step in _ARRIVED:
            self._arrived.add(layer)
            self._layers[layer] = (known, known)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes that are here, and those of all layers whose size is known."""
        return sum(here for here, _ in self._layers.values()), sum(whole for _, whole in self._layers.values())

    def __str__(self) -> str:
        here, whole = self.bytes
        if whole:
            return f"{here / _MEGABYTE:.1f} of {whole / _MEGABYTE:.1f} MB"
        return f"{len(self._arrived)} of {len(self._layers)} layers" if self._layers else ""


class PullText:
    """A listener that tells a pull as text, at most once a second: `pulling app:1: 12.3 of 45.6 MB`."""

    def __init__(
        self,
        image: str,
        told: Callable[[str], object],
        *,
        begun: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tells that the pull begins; without `begun` only when the engine says so.

        Args:
            image: Its name.
            told: Is called with each text.
            begun: It is known that the image will be pulled.
            clock: For tests.
        """
        self._image = image
        self._told = told
        self._clock = clock
        self._totals = PullTotals()
        self._last = ""
        self._next = clock() + _PAUSE_SECONDS
        if begun:
            self._tell("pulling")

    def __call__(self, progress: Progress) -> None:
        self._totals.add(progress)
        if not self._last:
            self._tell("pulling")
        if (now := self._clock()) >= self._next:
            self._next = now + _PAUSE_SECONDS
            self._tell("pulling")

    def finish(self) -> None:
        """Tells how much came, if anything did."""
        if self._last:
            self._tell("pulled")

    def _tell(self, verb: str) -> None:
        amount = str(self._totals)
        text = f"{verb} {self._image}" + (f": {amount}" if amount else "")
        if text != self._last:
            self._last = text
            self._told(text)
