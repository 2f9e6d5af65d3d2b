"""What somebody who waits for a pull or a build is told meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from belljar.core.model import Model


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
