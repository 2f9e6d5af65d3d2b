"""What a server writes down of a living sandbox that goes on without it, so that the next one finds it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field

from belljar.core.model import Model
from belljar.core.process import PtySize
from belljar.core.request import Egress

Place = Mapping[str, str | int]  # by which a backend finds again what it made: its own words


class ProcessMark(Model):
    """A process that was started in a sandbox and runs."""

    id: str
    run: str
    """The name under which it is recorded."""
    argv: tuple[str, ...]
    labels: Mapping[str, str] = Field(default_factory=dict)
    pty: PtySize | None = None
    started: float
    """When, in seconds since 1970."""
    timeout: float | None = None
    """Seconds after its start at which it is ended."""
    place: Mapping[str, str | int]
    """By which the box finds it again."""


class BoxMark(Model):
    """A living sandbox as it was last."""

    place: Mapping[str, str | int]
    """By which its backend finds it again."""
    walls: str
    """What its plan said of its walls and limits: one that policy would open otherwise today is not taken over."""
    egress: Egress | None = None
    """What it may reach, if that was changed since it was opened."""
    ends: float | None = None
    """When its time is over, in seconds since 1970; None: never."""
    paused: bool = False
    left_out: tuple[str, ...] = ()
    started: int = 0
    """How many of its processes were given a name by Belljar."""
    processes: tuple[ProcessMark, ...] = ()


class Lasting(NamedTuple):
    """A living sandbox is to go on where its server ends."""

    absence: float  # seconds that it waits for the next server
    latest: float  # when it ends in any case, in seconds since 1970
    found: BoxMark | None = None  # it is there already, and is taken over
