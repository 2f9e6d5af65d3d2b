"""How much of this process's memory callers may fill: each one a part, and all of them together a bounded whole."""

from __future__ import annotations

from collections import Counter

from belljar.core import errors
from belljar.core.values import KIB

_FREE_BYTES = 16 * KIB  # of each body, request or output: what is small is never refused because others are large
_RETRY_SECONDS = 2.0


class ByteBudget:
    """Bytes of one kind that callers hold at the moment. `what` names them in refusals."""

    def __init__(self, what: str, each: int, total: int) -> None:
        self._what = what
        self._each = each
        self._total = total
        self._held: Counter[str] = Counter()  # by caller
        self._all = 0

    def share(self, caller: str) -> Share:
        """Returns an account for one thing that a caller makes us hold; it has to be closed."""
        return Share(self, caller)

    def take(self, caller: str, size: int) -> None:
        """Counts bytes, or raises Busy: 429 for what the caller holds itself, 503 for what all hold."""
        if self._held[caller] + size > self._each:
            raise errors.Busy(
                f"{self._what} of yours hold {self._held[caller]} bytes, and may hold {self._each}",
                retry_after=_RETRY_SECONDS, fix="send fewer at once, or smaller ones",
            )  # fmt: skip
        if self._all + size > self._total:
            raise errors.Busy(
                f"{self._what} of all callers hold all the memory they may", retry_after=_RETRY_SECONDS, status=503
            )
        self._held[caller] += size
        self._all += size

    def give_back(self, caller: str, size: int) -> None:
        """Counts bytes that are not held any more."""
        self._all -= size
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]


class Share:
    """What one body, request or output holds. The first few kilobytes are free."""

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._size = 0
        self._counted = 0

    def add(self, size: int) -> None:
        """Counts more of it, or raises Busy, and then holds what it held before."""
        more = max(0, self._size + size - _FREE_BYTES) - self._counted
        if more > 0:
            self._budget.take(self._caller, more)
            self._counted += more
        self._size += size

    def close(self) -> None:
        """Gives everything back. It may be called twice."""
        if self._counted:
            self._budget.give_back(self._caller, self._counted)
        self._size = self._counted = 0
