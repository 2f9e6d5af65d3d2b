"""What each broker has of its own: channels, streams, passwords, and answers that get lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from belljar.core import errors
from belljar.service.bus.bus import Bus, open_bus
from belljar.service.bus.nats import STREAM, SUBJECTS, NatsBus
from belljar.service.bus.redis import RedisBus
from brokers import Broker, NatsServer, RedisServer, Wire, comes_true, numbers, read, read_until

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext
    from redis.asyncio import Redis

    BusAndClient = tuple[RedisBus, Redis]

BROKERS = ("redis", "nats")


# --- Redis ---


@pytest.fixture
async def redis() -> AsyncIterator[BusAndClient]:
    from redis.asyncio import Redis

    with RedisServer() as broker:
        async with RedisBus(broker.url) as bus, Redis.from_url(broker.url) as client:
            yield bus, client


async def test_lines_reach_any_redis_client_as_json_on_the_channel_of_their_run(redis: BusAndClient) -> None:
    bus, client = redis
    async with client.pubsub() as pubsub:
        await pubsub.subscribe("belljar.logs.bj-1")
        await pubsub.get_message(timeout=5)
        bus.publish("belljar.logs.bj-1", {"number": 1, "message": "hello"})
        with anyio.fail_after(5):
            message = await pubsub.get_message(timeout=5)
        assert message["channel"] == b"belljar.logs.bj-1"
        assert json.loads(message["data"]) == {"number": 1, "message": "hello"}
        await client.publish("belljar.logs.bj-2", "no JSON")


async def test_what_others_publish_that_is_no_message_of_ours_is_passed_over(redis: BusAndClient) -> None:
    bus, client = redis
    async with bus.subscribe("belljar.logs.a") as heard:
        for odd in (b"no JSON", b"\xff", b"[1]", b"7", b"[" * 100_000):
            await client.publish("belljar.logs.a", odd)
        bus.publish("belljar.logs.a", {"n": 1})
        assert await read(heard, 1) == [{"n": 1}]


async def test_a_subscriber_that_redis_throws_out_comes_back_and_is_told_of_a_gap(redis: BusAndClient) -> None:
    bus, client = redis
    async with bus.subscribe("belljar.logs.a") as heard:
        assert await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") == 1
        assert await read(heard, 1) == [{"gap": None}]
        bus.publish("belljar.logs.a", {"n": 1})
        assert await read(heard, 1) == [{"n": 1}]
        assert bus.status == ""


async def test_a_thousand_subscribers_share_one_connection_to_redis(redis: BusAndClient) -> None:
    bus, client = redis
    async with anyio.create_task_group() as tasks:
        heard: list[int] = []

        async def watch(run: int) -> None:
            async with bus.subscribe(f"belljar.logs.r{run % 100}") as lines:
                heard.extend(numbers(await read_until(lines, {"n": run % 100})))

        for run in range(1000):
            tasks.start_soon(watch, run)
        assert await comes_true(lambda: len(list(bus._listeners)) == 1000)
        assert await comes_true(lambda: len(bus._standing) == 100)
        assert len(await client.client_list()) <= 3
        for run in range(100):
            bus.publish(f"belljar.logs.r{run}", {"n": run})
        assert await comes_true(lambda: len(heard) == 1000)


# --- NATS ---


async def test_a_broker_that_is_killed_again_and_again_in_mid_flow_loses_and_repeats_no_event() -> None:
    """JetStream: each one once, in order, in the stream itself."""
    with NatsServer() as broker:
        async with NatsBus(broker.url, count=100_000) as bus:
            n = 0
            for _ in range(4):
                for _ in range(3000):
                    bus.publish("belljar.events.a", {"n": n})
                    n += 1
                    if n % 50 == 0:
                        await anyio.lowlevel.checkpoint()
                assert await comes_true(lambda: bus.waiting < 2800)  # some are out, some are on their way
                broker.kill()
                assert await comes_true(lambda: bus.status)
                broker.restart()
            assert await comes_true(lambda: not bus.waiting, 30), bus.status
            assert bus.dropped == 0
        assert await stored(broker) == list(range(n))


@pytest.mark.parametrize("memory", ["the server's memory of ids", "our own search"])
async def test_events_whose_answers_got_lost_with_the_connection_are_stored_once(memory: str) -> None:
    duplicates = 600 if memory.startswith("the server") else 0.1
    with NatsServer() as broker:
        async with Wire(broker) as wire, NatsBus(wire.url, duplicates=duplicates) as bus:
            assert await comes_true(lambda: not bus.status)
            n = 0
            for _ in range(3):
                assert await comes_true(lambda: not bus.status and not bus.waiting)
                wire.mute()
                for _ in range(600):  # more than one batch
                    bus.publish("belljar.events.a", {"n": n})
                    n += 1
                before = n - 600
                with anyio.fail_after(10):
                    while await count(broker) == before:  # the stream has some of them, and we do not know
                        await anyio.sleep(0.15)
                assert bus.waiting == 600
                if duplicates == 600:
                    bus._created = None  # as if we could not look
                wire.cut()
            assert await comes_true(lambda: not bus.waiting)
        assert await stored(broker) == list(range(n))


@asynccontextmanager
async def stream_of(broker: Broker) -> AsyncIterator[JetStreamContext]:
    import nats

    client = await nats.connect(broker.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def count(broker: Broker) -> int:
    async with stream_of(broker) as stream:
        return (await stream.stream_info(STREAM)).state.messages


async def stored(broker: Broker) -> list[int]:
    async with stream_of(broker) as stream:
        kept = (await stream.stream_info(STREAM)).state.messages
        reader = await stream.subscribe(SUBJECTS, stream=STREAM, ordered_consumer=True)
        return [json.loads((await reader.next_msg(timeout=10)).data)["n"] for _ in range(kept)]


async def test_the_stream_has_the_limits_that_were_asked_for_and_one_that_exists_is_left_alone() -> None:
    import nats

    with NatsServer() as broker:
        async with NatsBus(broker.url, max_age=3600, max_bytes=10_000_000) as bus:
            assert await comes_true(lambda: not bus.status)
        async with NatsBus(broker.url, max_age=60, max_bytes=1_000_000) as bus:
            assert await comes_true(lambda: not bus.status)
        client = await nats.connect(broker.url)
        config = (await client.jetstream().stream_info(STREAM)).config
        await client.close()
        assert (config.max_age, config.max_bytes, config.subjects) == (3600, 10_000_000, ["belljar.events.>"])


async def test_a_stream_that_is_deleted_under_us_is_made_again() -> None:
    import nats

    with NatsServer() as broker:
        async with NatsBus(broker.url) as bus, bus.subscribe("belljar.events.a") as heard:
            bus.publish("belljar.events.a", {"n": 0})
            assert await read(heard, 1) == [{"n": 0}]
            client = await nats.connect(broker.url)
            await client.jetstream().delete_stream(STREAM)
            await client.close()
            bus.publish("belljar.events.a", {"n": 1})
            items = await read_until(heard, {"n": 1})
            assert items == [{"gap": None}, {"n": 1}]


async def test_an_event_that_nats_never_takes_is_dropped_and_the_next_goes_through() -> None:
    with NatsServer() as broker:
        async with NatsBus(broker.url) as bus, bus.subscribe("belljar.events.a") as heard:
            bus.publish("belljar.events.a", {"text": "x" * 2_000_000})
            bus.publish("belljar.elsewhere", {"n": 0})
            bus.publish("belljar.events.a", {"n": 1})
            assert await read(heard, 1) == [{"n": 1}]
            assert bus.dropped == 2


async def test_nats_without_jetstream_is_told_in_words() -> None:
    with NatsServer(jetstream=False) as broker:
        async with NatsBus(broker.url) as bus:
            assert await comes_true(lambda: "JetStream" in bus.status), bus.status


# --- addresses and secrets ---


@pytest.mark.parametrize("kind", BROKERS)
async def test_a_password_opens_the_broker_and_a_wrong_one_is_told_without_being_shown(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (RedisServer if kind == "redis" else NatsServer)(password="Open-Sesame") as broker:
        make: Callable[[str], Bus] = RedisBus if kind == "redis" else NatsBus
        async with make(broker.url) as bus:
            assert await comes_true(lambda: not bus.status), bus.status
        async with make(broker.url.replace("Sesame", "Barley")) as bus:
            assert await comes_true(lambda: "not connected yet" not in bus.status)
            assert bus.status
            assert "Barley" not in bus.status
            assert f"127.0.0.1:{broker.port}" in bus.status
    assert "Sesame" not in caplog.text
    assert "Barley" not in caplog.text


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:6379", "http://127.0.0.1", "{}://", "{}://:secret@", "{}://u:secret@host:port", "{}://h:99999"],
)
@pytest.mark.parametrize("kind", BROKERS)
def test_a_url_that_makes_no_sense_is_refused_at_once_without_its_password(kind: str, url: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="makes no sense") as caught:
        (RedisBus if kind == "redis" else NatsBus)(url.format(kind))
    assert "secret" not in str(caught.value)


def test_options_of_redis_that_do_not_exist_are_refused_at_once() -> None:
    with pytest.raises(errors.InvalidRequest, match="makes no sense"):
        RedisBus("redis://127.0.0.1?sokket_timeout=3")


@pytest.mark.parametrize("kind", BROKERS)
def test_a_library_that_is_missing_is_named_with_its_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == kind] + [kind]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.NotAvailable) as caught:
        (RedisBus if kind == "redis" else NatsBus)(f"{kind}://127.0.0.1")
    assert f"pip install 'belljar-sandbox[{kind}]'" in caught.value.fix


def test_the_libraries_of_brokers_are_not_loaded_by_who_does_not_use_them() -> None:
    code = "import sys, belljar.service.bus.bus; print([m for m in ('redis', 'nats') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


async def test_open_bus_is_local_without_urls_and_uses_the_brokers_with_them() -> None:
    async with open_bus() as buses:
        assert (buses.lines.name, buses.events.name) == ("local", "local")
    with RedisServer() as redis, NatsServer() as nats:
        async with open_bus(redis=redis.url, nats=nats.url) as buses:
            assert (buses.lines.name, buses.events.name) == ("redis", "nats")
            async with (
                buses.lines.subscribe("belljar.logs.a") as lines,
                buses.events.subscribe("belljar.events.a") as events,
            ):
                buses.lines.publish("belljar.logs.a", {"n": 1})
                buses.events.publish("belljar.events.a", {"n": 2})
                assert await read(lines, 1) == [{"n": 1}]
                assert await read(events, 1) == [{"n": 2}]
