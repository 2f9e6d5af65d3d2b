"""How often each caller has asked lately, beside how often they may."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_RATE = re.compile(r"(\d+) ?(?:/|per) ?(second|minute|hour|day)")
_MANY = 1000  # callers, from which on those are forgotten who have not asked for long


class Rate(NamedTuple):
    """So many requests in so many seconds."""

    amount: int
    seconds: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Reads a rate that was checked before, such as `60/minute`."""
        return _parse(text)


@lru_cache(256)
def _parse(text: str) -> Rate:
    found = _RATE.fullmatch(text)
    assert found is not None, text
    return Rate(int(found[1]), _UNITS[found[2]])


class _Counted(NamedTuple):
    """Requests of one caller in this window and in the one before."""

    window: int
    seconds: int
    before: int
    now: int


class Rates:
    """Counts in windows that slide: of the window before this one, the part counts that is not over yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted: dict[str, _Counted] = {}

    def hit(self, caller: str, rate: Rate) -> float:
        """Counts a request, unless it is one too many.

        Returns:
            0 if it was counted, else the seconds after which one will be.
        """
        now = self._clock()
        window, passed = int(now // rate.seconds), now % rate.seconds
        counted = self._in(window, rate.seconds, caller)
        if counted.before * (1 - passed / rate.seconds) + counted.now + 1 > rate.amount:
            return _wait(counted, rate, passed)
        self._counted[caller] = counted._replace(now=counted.now + 1)
        return 0.0

    def _in(self, window: int, seconds: int, caller: str) -> _Counted:
        found = self._counted.get(caller)
        if found is None and len(self._counted) >= _MANY:
            self._forget()
        if found is None or found.seconds != seconds or found.window < window - 1:
            return _Counted(window, seconds, 0, 0)
        return found if found.window == window else _Counted(window, seconds, found.now, 0)

    def _forget(self) -> None:
        now = self._clock()
        self._counted = {
            caller: counted for caller, counted in self._counted.items() if now // counted.seconds <= counted.window + 1
        }


def _wait(counted: _Counted, rate: Rate, passed: float) -> float:
    """Seconds until there is room for one more: in this window, or in the next, where this one counts as the last."""
    if not rate.amount:
        return float(rate.seconds)
    if counted.now < rate.amount:
        return rate.seconds * (1 - (rate.amount - 1 - counted.now) / counted.before) - passed
    return rate.seconds - passed + rate.seconds * (1 - (rate.amount - 1) / counted.now)
