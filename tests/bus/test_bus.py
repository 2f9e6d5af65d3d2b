"""The buses, over real brokers that are killed, frozen and started again."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from belljar.core import errors
from belljar.service.bus import nats, redis
from belljar.service.bus.bus import LocalBus
from belljar.service.bus.nats import NatsBus
from belljar.service.bus.queues import Outbox
from belljar.service.bus.redis import RedisBus
from brokers import Broker, NatsServer, RedisServer, comes_true, numbers, read, read_until
from ports import free_port

KINDS = ("local", "redis", "nats")
BROKERS = ("redis", "nats")


class Made:
    """A bus of one kind, with the broker that it needs."""

    def __init__(self, kind: str, broker: Broker | None) -> None:
        self.kind = kind
        self.broker = broker

    def bus(self, **options: Any) -> Any:
        if self.broker is None:
            for name in ("count", "size", "closing"):
                options.pop(name, None)
            return LocalBus(**options)
        return (RedisBus if self.kind == "redis" else NatsBus)(self.broker.url, **options)


@contextmanager
def made(kind: str) -> Iterator[Made]:
    if kind == "local":
        yield Made(kind, None)
        return
    with RedisServer() if kind == "redis" else NatsServer() as broker:
        yield Made(kind, broker)


@pytest.fixture(params=KINDS)
def any_bus(request: pytest.FixtureRequest) -> Iterator[Made]:
    with made(request.param) as it:
        yield it


@pytest.fixture(params=BROKERS)
def broker_bus(request: pytest.FixtureRequest) -> Iterator[Made]:
    with made(request.param) as it:
        yield it


# --- all of them ---


async def test_a_subscriber_hears_what_is_published_from_then_on_in_order(any_bus: Made) -> None:
    async with any_bus.bus() as bus:
        async with bus.subscribe("belljar.events.a") as heard, bus.subscribe("belljar.events.b") as other:
            for n in range(500):
                bus.publish("belljar.events.a", {"n": n, "text": "ü\ud800\n"})
            bus.publish("belljar.events.b", {"n": -1})
            items = await read(heard, 500)
            assert numbers(items) == list(range(500))
            assert items[0]["text"] == "ü\ud800\n"
            assert numbers(await read(other, 1)) == [-1]
        assert await comes_true(lambda: (bus.status, bus.dropped, bus.waiting) == ("", 0, 0))


async def test_patterns_hear_what_they_name_and_nothing_else(any_bus: Made) -> None:
    async with (
        any_bus.bus() as bus,
        bus.subscribe("belljar.events.>") as everything,
        bus.subscribe("belljar.events.*.end") as ends,
    ):
        for n, subject in enumerate(("a.end", "a.begin", "a.b.end", "b.end")):
            bus.publish(f"belljar.events.{subject}", {"n": n})
        assert numbers(await read(everything, 4)) == [0, 1, 2, 3]
        assert numbers(await read(ends, 2)) == [0, 3]


async def test_each_subscriber_hears_everything_and_who_leaves_does_not_disturb_the_rest(any_bus: Made) -> None:
    async with any_bus.bus() as bus, bus.subscribe("belljar.events.a") as first:
        for round_ in range(20):
            async with bus.subscribe("belljar.events.a") as second:
                bus.publish("belljar.events.a", {"n": round_})
                assert numbers(await read(second, 1)) == [round_]
        assert numbers(await read(first, 20)) == list(range(20))


async def test_a_slow_subscriber_is_bounded_and_told_how_many_it_missed(any_bus: Made) -> None:
    async with any_bus.bus(inbox_count=10) as bus, bus.subscribe("belljar.events.a") as slow:
        for n in range(100):
            bus.publish("belljar.events.a", {"n": n})
        assert await comes_true(lambda: slow._missed == 90)
        assert await read(slow, 11) == [{"gap": 90}, *({"n": n} for n in range(90, 100))]


async def test_the_messages_that_a_slow_subscriber_has_not_read_are_bounded_by_bytes_as_well(any_bus: Made) -> None:
    async with any_bus.bus(inbox_size=100_000) as bus, bus.subscribe("belljar.events.a") as slow:
        for n in range(50):
            bus.publish("belljar.events.a", {"n": n, "text": "x" * 10_000})
        assert await comes_true(lambda: slow._missed == 41)
        assert numbers(await read(slow, 10)) == list(range(41, 50))


async def test_what_makes_no_sense_is_dropped_and_counted_and_never_raises(any_bus: Made) -> None:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    async with any_bus.bus() as bus, bus.subscribe("belljar.events.>") as heard:
        bus.publish("belljar.events.a", ring)
        bus.publish("belljar.events.a b\r\nPUB x", {"n": 0})
        bus.publish("belljar.events.a", {"n": 1, "odd": object, "none": float("nan")})
        item = (await read(heard, 1))[0]
        assert (item["n"], item["none"]) == (1, None)
        assert bus.dropped == 2


async def test_a_subject_that_makes_no_sense_cannot_be_subscribed_to(any_bus: Made) -> None:
    async with any_bus.bus() as bus:
        for subject in ("", "a b", "belljar.events.>.a", "belljar..events", "belljar.events.a\r\nPING"):
            with pytest.raises(errors.InvalidRequest, match="no subject"):
                async with bus.subscribe(subject):
                    pass


async def test_a_subscriber_reads_what_is_there_and_ends_when_the_bus_does(any_bus: Made) -> None:
    async with any_bus.bus() as bus:
        context = bus.subscribe("belljar.events.a")
        heard = await context.__aenter__()
        bus.publish("belljar.events.a", {"n": 1})
        assert await comes_true(lambda: heard._items)
    with anyio.fail_after(5):
        assert [item async for item in heard] == [{"n": 1}]
    await context.__aexit__(None, None, None)
    bus.publish("belljar.events.a", {"n": 2})
    assert bus.dropped == 1


async def test_what_the_body_raises_comes_out_as_it_is(any_bus: Made) -> None:
    with pytest.raises(KeyError):
        async with any_bus.bus():
            raise KeyError("ours")
    with anyio.move_on_after(0.2) as scope:
        async with any_bus.bus():
            await anyio.sleep_forever()
    assert scope.cancelled_caught


# --- brokers that come and go ---


async def test_a_broker_that_is_down_is_told_and_gets_everything_in_order_once_it_is_back(broker_bus: Made) -> None:
    broker = broker_bus.broker
    assert broker
    async with broker_bus.bus() as bus, bus.subscribe("belljar.events.a") as heard:
        bus.publish("belljar.events.a", {"n": 0})
        assert await read(heard, 1) == [{"n": 0}]
        broker.kill()
        assert await comes_true(lambda: bus.status)
        assert f"127.0.0.1:{broker.port}" in bus.status
        for n in range(1, 2000):
            bus.publish("belljar.events.a", {"n": n})
        assert bus.waiting == 1999
        broker.restart()
        heard._limits = 5000, 2**24  # this subscriber is quick
        items = await read_until(heard, {"n": 1999})
        assert numbers(items) == list(range(1, 2000))
        assert ({"gap": None} in items) == (broker_bus.kind == "redis")  # a stream remembers, pub/sub cannot
        assert await comes_true(lambda: not bus.status and not bus.waiting)
        assert bus.dropped == 0


async def test_a_broker_that_was_never_there_is_told_and_caught_up_when_it_comes(broker_bus: Made) -> None:
    assert broker_bus.broker
    broker_bus.broker.kill()
    async with broker_bus.bus() as bus:
        assert "not connected" in bus.status
        assert await comes_true(lambda: "not connected" not in bus.status)
        with anyio.fail_after(1):  # a subscriber does not wait for what is known to be down
            context = bus.subscribe("belljar.events.a")
            heard = await context.__aenter__()
        bus.publish("belljar.events.a", {"n": 1})
        broker_bus.broker.restart()
        assert await read(heard, 2) == [{"gap": None}, {"n": 1}]
        assert bus.status == ""
        await context.__aexit__(None, None, None)


async def test_a_broker_that_hangs_is_told_and_caught_up_when_it_goes_on(
    broker_bus: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (redis, nats):
        monkeypatch.setattr(module, "_ANSWER", 1.0)
        monkeypatch.setattr(module, "_HEARTBEAT", 1)
    broker = broker_bus.broker
    assert broker
    async with broker_bus.bus() as bus, bus.subscribe("belljar.events.a") as heard:
        assert await comes_true(lambda: not bus.status)
        broker.freeze()
        bus.publish("belljar.events.a", {"n": 1})
        assert await comes_true(lambda: bus.status, 20)
        bus.publish("belljar.events.a", {"n": 2})
        broker.thaw()
        items = await read_until(heard, {"n": 2})
        once = list(dict.fromkeys(numbers(items)))  # over Redis the first may come twice
        assert once == [1, 2] or items[0] == {"gap": None}
        assert await comes_true(lambda: not bus.status and not bus.waiting)


async def test_a_bus_that_is_closed_gives_a_broker_that_is_well_the_rest(broker_bus: Made) -> None:
    async with broker_bus.bus() as listener, listener.subscribe("belljar.events.a") as heard:
        heard._limits = 5000, 2**24
        async with broker_bus.bus(closing=30) as bus:
            for n in range(3000):
                bus.publish("belljar.events.a", {"n": n})
        assert bus.waiting == 0
        assert numbers(await read(heard, 3000)) == list(range(3000))


async def test_closing_does_not_wait_for_a_dead_broker_and_says_how_many_are_left(
    broker_bus: Made, caplog: pytest.LogCaptureFixture
) -> None:
    assert broker_bus.broker
    async with broker_bus.bus() as bus:
        assert await comes_true(lambda: not bus.status)
        broker_bus.broker.kill()
        assert await comes_true(lambda: bus.status)
        for n in range(7):
            bus.publish("belljar.events.a", {"n": n})
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert bus.waiting == 7
    assert "7 messages left" in caplog.text


async def test_closing_is_bounded_when_the_broker_hangs(broker_bus: Made) -> None:
    assert broker_bus.broker
    async with broker_bus.bus(closing=0.5) as bus:
        assert await comes_true(lambda: not bus.status)
        broker_bus.broker.freeze()
        bus.publish("belljar.events.a", {"n": 1})
        began = time.monotonic()
    assert time.monotonic() - began < 4
    assert bus.waiting == 1


@pytest.mark.parametrize("kind", BROKERS)
async def test_a_dead_broker_costs_a_bounded_buffer_from_which_the_oldest_go_first(kind: str) -> None:
    url = f"{kind}://127.0.0.1:{free_port()}"
    bus = RedisBus(url, count=1000) if kind == "redis" else NatsBus(url, count=1000)
    async with bus:
        for n in range(5000):
            bus.publish("belljar.events.a", {"n": n})
        assert (bus.waiting, bus.dropped) == (1000, 4000)
        assert json.loads(bus._outbox.next(1, 1)[0].body) == {"n": 4000}
        bus.publish("belljar.events.a", {"text": "x" * 20_000_000})  # more than all the room: it alone goes
        assert (bus.waiting, bus.dropped) == (1000, 4001)


@pytest.mark.parametrize("kind", BROKERS)
async def test_a_flood_into_a_dead_broker_does_not_grow_memory(kind: str) -> None:
    url = f"{kind}://127.0.0.1:{free_port()}"
    bound = 2 * 2**20
    bus = RedisBus(url, size=bound) if kind == "redis" else NatsBus(url, size=bound)
    async with bus:
        tracemalloc.start()
        try:
            for n in range(30_000):
                bus.publish(f"belljar.events.r{n}", {"n": n, "text": "x" * (n % 1000)})
                if n % 1000 == 0:
                    await anyio.lowlevel.checkpoint()
            held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert bus.dropped + bus.waiting == 30_000
        assert held < 1.5 * bound, held
        assert most < 2 * bound, most


def test_a_message_that_was_pushed_out_while_it_was_sent_is_not_lost_if_it_arrived() -> None:
    box = Outbox(3, 10_000)
    for _ in range(3):
        box.add("a", b"")
    assert [message.number for message in box.next(2, 10_000)] == [1, 2]
    for _ in range(3):
        box.add("a", b"")
    assert (len(box), box.dropped) == (3, 3)
    box.sent(1)
    assert box.dropped == 2
    assert [message.number for message in box.next(9, 10_000)] == [4, 5, 6]
    box.sent(6)
    assert (len(box), box.dropped, box._size) == (0, 2, 0)
