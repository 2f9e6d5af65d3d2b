"""How many of one thing callers may have open at once: each some, and all of them together some more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from belljar.core import errors

_RETRY_SECONDS = 5.0


class Places:
    """Places for things of one kind, such as WebSockets. `what` names them in refusals."""

    def __init__(self, what: str, *, each: int, total: int) -> None:
        self._what = what
        self._each = each
        self._total = total
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, owner: str) -> Iterator[None]:
        """Takes one while the block runs.

        Raises:
            Busy: 429: this owner has all that one may have; 503: all are taken.
        """
        if self._taken[owner] >= self._each:
            message = f"{self._each} {self._what} are under way, which is all that may be"
            raise errors.Busy(message, retry_after=_RETRY_SECONDS, fix="end one, or try again later")
        if self._taken.total() >= self._total:
            raise errors.Busy(f"all {self._what} are taken", retry_after=_RETRY_SECONDS, status=503)
        self._taken[owner] += 1
        try:
            yield
        finally:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]
