from __future__ import annotations

import logging
import time
from typing import Any

import anyio
import pytest

from belljar.core import errors
from belljar.core.result import Event
from belljar.service.sinks import Sink, Sinks


def event(seq: int, kind: Any = "stdout") -> Event:
    return Event(run="bj-1", seq=seq, kind=kind)


async def comes_true(condition: Any) -> object:
    deadline = time.monotonic() + 5
    while not (value := condition()) and time.monotonic() < deadline:
        await anyio.sleep(0.005)
    return value


async def test_every_sink_hears_every_event_in_order_whether_it_waits_or_not() -> None:
    quick: list[int] = []
    slow: list[int] = []

    async def hear_slowly(event: Event) -> None:
        await anyio.lowlevel.checkpoint()
        slow.append(event.seq)

    async with Sinks([Sink("quick", lambda event: quick.append(event.seq)), Sink("slow", hear_slowly)]) as sinks:
        for seq in range(100):
            sinks.hear(event(seq))
    assert quick == slow == list(range(100))
    assert sinks.missed == {"quick": 0, "slow": 0}


async def test_a_sink_that_hangs_holds_up_nobody_and_misses_the_oldest_which_is_counted() -> None:
    heard: list[int] = []
    go_on = anyio.Event()
    late: list[int] = []

    async def hang(event: Event) -> None:
        await go_on.wait()
        late.append(event.seq)

    async with Sinks([Sink("hangs", hang, count=10), Sink("well", lambda event: heard.append(event.seq))]) as sinks:
        sinks.hear(event(0))
        assert await comes_true(lambda: heard == [0])
        for seq in range(1, 100):
            sinks.hear(event(seq))
        assert await comes_true(lambda: len(heard) == 100)
        assert sinks.missed == {"hangs": 89, "well": 0}
        go_on.set()
    assert late == [0, *range(90, 100)]


async def test_a_sink_that_raises_is_logged_and_counted_and_hears_the_next(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    well: list[int] = []

    def stumble(event: Event) -> None:
        if event.seq % 2:
            raise KeyError("odd")
        heard.append(event.seq)

    with caplog.at_level(logging.ERROR, "belljar"):
        stumbles = Sink("stumbles", stumble)
        async with Sinks([stumbles, Sink("well", lambda event: well.append(event.seq))]) as sinks:
            for seq in range(30):
                sinks.hear(event(seq))
    assert heard == list(range(0, 30, 2))
    assert well == list(range(30))
    assert stumbles.failed == 15
    assert "the sink stumbles failed over stdout of bj-1" in caplog.text
    assert len(caplog.records) == 2  # the first and the tenth


async def test_closing_is_bounded_and_what_was_not_heard_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def hang(event: Event) -> None:
        await anyio.sleep_forever()

    heard: list[int] = []
    began = time.monotonic()
    sinks = Sinks([Sink("hangs", hang), Sink("well", lambda event: heard.append(event.seq))], closing=0.2)
    async with sinks:
        for seq in range(5):
            sinks.hear(event(seq))
    assert time.monotonic() - began < 3
    assert heard == list(range(5))
    assert sinks.missed == {"hangs": 5, "well": 0}
    assert "5 events" in caplog.text
    sinks.hear(event(9))
    assert sinks.missed == {"hangs": 6, "well": 1}


async def test_a_sink_that_names_its_kinds_is_not_crowded_out_by_others() -> None:
    ends: list[int] = []
    async with Sinks([Sink("ends", lambda e: ends.append(e.seq), kinds=("finished",), count=1)]) as sinks:
        sinks.hear(event(0, "finished"))
        for seq in range(1, 100):
            sinks.hear(event(seq))
    assert ends == [0]
    assert sinks.missed == {"ends": 0}


async def test_events_that_come_before_the_sinks_are_open_are_heard() -> None:
    heard: list[int] = []
    sinks = Sinks([Sink("early", lambda event: heard.append(event.seq))])
    sinks.hear(event(1))
    async with sinks:
        pass
    assert heard == [1]


async def test_what_the_body_raises_comes_out_as_it_is_after_sinks_heard_the_rest() -> None:
    heard: list[int] = []
    with pytest.raises(KeyError):
        async with Sinks([Sink("one", lambda event: heard.append(event.seq))]) as sinks:
            sinks.hear(event(1))
            raise KeyError("ours")
    with anyio.move_on_after(0.05) as scope:
        async with Sinks([Sink("one", lambda event: heard.append(event.seq))]) as sinks:
            sinks.hear(event(2))
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert heard == [1, 2]


def test_two_sinks_do_not_share_a_name_and_each_has_room() -> None:
    with pytest.raises(errors.InvalidRequest):
        Sinks([Sink("a", print), Sink("a", print)])
    with pytest.raises(errors.InvalidRequest):
        Sink("a", print, count=0)
