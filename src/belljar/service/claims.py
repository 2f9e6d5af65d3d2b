"""What a POST with an idempotency key has made of sessions, told again to whoever sends it again.

In memory: sessions die with this process, and a claim with the session that it is about. Runs are claimed in the store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from belljar.core import errors

T = TypeVar("T")
_MOST = 256  # of one session: the oldest go


class _Claim:
    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.over = anyio.Event()
        self.session = ""  # none: it was turned away, or is under way
        self.answer: Any = None


class SessionClaims:
    def __init__(self, lives: Callable[[str], bool]) -> None:
        self._lives = lives
        self._made: dict[tuple[str, str], _Claim] = {}

    async def once(
        self, caller: str, key: str, asked: str, work: Callable[[], Awaitable[T]], session: Callable[[T], str]
    ) -> T:
        """What `work` returns, or has returned before to the same caller with the same key. `asked` tells requests
        apart, `session` whose the answer is."""
        self._forget()
        name = (caller, key)
        if claim := self._made.get(name):
            answer: T = await _again(claim, asked)
            return answer
        claim = self._made[name] = _Claim(asked)
        try:
            claim.answer = answer = await work()
            claim.session = session(answer)
            return answer
        finally:
            claim.over.set()
            if not claim.session:
                del self._made[name]

    def _forget(self) -> None:
        """SessionClaims of sessions that are closed, and of each the oldest that are too many."""
        left: dict[str, int] = {}
        for name, claim in [*self._made.items()][::-1]:
            left[claim.session] = left.get(claim.session, _MOST) - 1
            if claim.session and (left[claim.session] < 0 or not self._lives(claim.session)):
                del self._made[name]


def another_request() -> errors.InvalidRequest:
    return errors.InvalidRequest(
        "this idempotency key came with another request before", fix="use a new key for a new request"
    )


async def _again(claim: _Claim, asked: str) -> Any:
    if claim.asked != asked:
        raise another_request()
    await claim.over.wait()
    if not claim.session:
        raise errors.Busy("a request with this idempotency key was just turned away", retry_after=1, status=503)
    return claim.answer
