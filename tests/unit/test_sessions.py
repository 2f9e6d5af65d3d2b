"""What the service holds open: when it ends, and what an idempotency key makes of the same request twice."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.protocol.records import SessionRecord
from belljar.sandbox import AsyncSandbox
from belljar.service.claims import SessionClaims
from belljar.service.sessions import Held

pytestmark = pytest.mark.anyio


def held(*, idle: float, lifetime: float = 3600.0) -> Held:
    now = time.time()
    record = SessionRecord(id="bs-1", kind="sandbox", caller="me", backend="fake", created=now, expires=now + lifetime)
    return Held(AsyncSandbox(backend=Fake({})), record, idle, (None, False))


async def test_a_session_that_was_busy_for_longer_than_its_idle_time_ends_soon_after() -> None:
    one, ended = held(idle=0.05), anyio.Event()

    async def live() -> None:
        await one.wait_for_end()
        ended.set()

    async with anyio.create_task_group() as tasks:
        async with one.used():
            tasks.start_soon(live)
            with anyio.move_on_after(0.2):
                await ended.wait()
            assert not ended.is_set(), "it ended in the middle of its use"
        with anyio.fail_after(5):
            await ended.wait()


async def test_a_clock_that_is_set_neither_ends_a_session_nor_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    one, other = held(idle=60.0), held(idle=0.05)
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    with anyio.move_on_after(0.1) as clock:
        await one.wait_for_end()
    assert clock.cancelled_caught, "tomorrow came early"
    monkeypatch.setattr(time, "time", lambda: real() - 86400)
    with anyio.fail_after(5):
        await other.wait_for_end()


async def test_what_is_told_of_its_end_is_in_the_time_of_the_wall_and_never_after_its_lifetime() -> None:
    one = held(idle=600.0, lifetime=100.0)
    one.touch(turns=1)
    assert (round(one.record.expires - time.time()), one.record.turns) == (100, 1)


# --- the same request twice ---


class Counted:
    """Something to be done once, which ends when it is told to."""

    def __init__(self) -> None:
        self.times = 0
        self.go = anyio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.times += 1
        await self.go.wait()
        if self.error:
            raise self.error
        return f"bs-{self.times}"


def claims(*closed: str) -> SessionClaims:
    return SessionClaims(lambda session: session not in closed)


async def test_twins_that_come_together_get_one_answer() -> None:
    work, known, told = Counted(), claims(), list[str]()

    async def ask() -> None:
        told.append(await known.once("me", "key", "the same", work, str))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        work.go.set()
    await ask()
    assert (told, work.times) == (["bs-1"] * 3, 1)


async def test_a_key_of_another_caller_is_another_key_and_another_request_is_refused() -> None:
    work, known = Counted(), claims()
    work.go.set()
    assert await known.once("me", "key", "the same", work, str) == "bs-1"
    assert await known.once("you", "key", "the same", work, str) == "bs-2"
    with pytest.raises(errors.InvalidRequest, match="another request"):
        await known.once("me", "key", "not the same", work, str)
    assert work.times == 2


async def test_who_was_turned_away_may_come_again_and_the_twin_is_told_to() -> None:
    work, known, told = Counted(), claims(), list[Any]()
    work.error = errors.Busy("full", retry_after=1)

    async def ask() -> None:
        try:
            told.append(await known.once("me", "key", "the same", work, str))
        except errors.Busy as error:
            told.append(error.http_status)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        work.go.set()
    work.error = None
    await ask()
    assert (sorted(told[:2]), told[2:], work.times) == ([429, 503], ["bs-2"], 2)


async def test_a_claim_goes_with_its_session_and_one_session_has_only_so_many() -> None:
    work, known = Counted(), claims("bs-1")
    work.go.set()
    assert await known.once("me", "key", "the same", work, str) == "bs-1"
    assert await known.once("me", "key", "the same", work, str) == "bs-2", "what it told of is closed"
    for number in range(300):
        await known.once("me", f"key {number}", "x", work, lambda _: "bs-2")
    times = work.times
    await known.once("me", "key 299", "x", work, lambda _: "bs-2")
    assert work.times == times
    await known.once("me", "key 0", "x", work, lambda _: "bs-2")
    assert work.times == times + 1, "it was the oldest"
    assert len(known._made) <= 258
