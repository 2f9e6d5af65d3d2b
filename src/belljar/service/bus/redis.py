"""Lines of output over Redis pub/sub.

Redis keeps nothing: what nobody hears is gone. What was published while it was down is sent once it is back. Who
listened then is told of a gap and reads the store. A message whose answer got lost is sent again, so it can arrive
twice: lines have numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Unpack

import anyio
from anyio.abc import TaskGroup

from belljar.core import errors
from belljar.core.values import MIB
from belljar.service.bus.bus import Bounds, BrokerAddress, BrokerBus, Link
from belljar.service.bus.queues import Inbox, Message, Signal, is_pattern, matches

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

_ANSWER = 5.0  # seconds that Redis has for an answer
_HEARTBEAT = 2.0  # seconds without traffic after which we ask whether it is still there
_OWN_EARS = 1.0  # seconds that what was kept waits for our own subscribers to be back
_BATCH = 256, MIB


class RedisBus(BrokerBus):
    name = "redis"

    def __init__(self, url: str, **bounds: Unpack[Bounds]) -> None:
        super().__init__(**bounds)
        shown, secrets = BrokerAddress.parse(url, "Redis", ("redis", "rediss", "unix"))
        self._url = url.strip()
        self._check()
        whose = f"Redis at {shown}"
        self._writer = Link(whose, self._progress.set, secrets=secrets, problem=f"{whose}: not connected yet")
        self._reader = Link(f"{whose}, for subscribers", self._progress.set, secrets=secrets)
        self._links = [self._writer, self._reader]
        self._changed = Signal()  # somebody came or left
        self._asked: Counter[str] = Counter()  # subscriptions that Redis has not confirmed yet
        self._standing: set[str] = set()  # those that it has
        self._heard = anyio.Event()  # all that our subscribers want stands
        self._deaf = False  # they lost their connection since something was sent

    def _check(self) -> None:
        try:
            self._client().connection_pool.make_connection()
        except ImportError:
            raise errors.NotAvailable(
                "the bus over Redis needs a library", fix="pip install 'belljar-sandbox[redis]'"
            ) from None
        except (TypeError, ValueError) as error:
            raise errors.InvalidRequest(
                f"the URL of Redis makes no sense: {error}", fix="write it as redis://HOST:PORT"
            ) from None

    def _client(self) -> Redis:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        # It is we who try again: the library would do so unseen, and subscribers would miss messages unsaid.
        return Redis.from_url(
            self._url, protocol=2, socket_connect_timeout=_ANSWER, socket_timeout=_ANSWER, retry=Retry(NoBackoff(), 0)
        )

    def _start(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._writer.keep, self._write)
        tasks.start_soon(self._reader.keep, self._read)

    # --- what we publish ---

    async def _write(self) -> None:
        client = self._client()
        try:
            await client.ping()
            self._writer.well()
            while True:
                if batch := self._outbox.next(*_BATCH):
                    await self._wait_for_own_ears()
                    await self._send(client, batch)
                    continue
                with anyio.move_on_after(_HEARTBEAT) as idle:
                    await self._posted.wait()
                if idle.cancelled_caught:
                    await client.ping()
        finally:
            with anyio.move_on_after(1, shield=True):
                await client.aclose()

    async def _wait_for_own_ears(self) -> None:
        """What was kept is for our own subscribers, too: once they lost their connection, they have a moment."""
        if self._deaf and self._listeners.subjects:
            self._reader.nudge()
            with anyio.move_on_after(_OWN_EARS):
                await self._heard.wait()
        self._deaf = False

    async def _send(self, client: Redis, batch: list[Message]) -> None:
        pipe = client.pipeline(transaction=False)
        for message in batch:
            pipe.publish(message.subject, message.body)
        answers = await pipe.execute(raise_on_error=False)
        for message, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):  # no rights, no room: all of this is for a later time
                raise answer
            self._outbox.sent(message.number)
        self._progress.set()

    # --- what our subscribers hear ---

    def _joined(self, inbox: Inbox) -> None:
        if inbox.subject in self._standing:
            inbox.confirm()
        else:
            self._heard = anyio.Event()
        self._changed.set()

    def _parted(self, inbox: Inbox) -> None:
        self._changed.set()

    async def _read(self) -> None:
        while not self._listeners.subjects:  # nobody listens: no connection
            await self._changed.wait()
        client = self._client()
        pubsub = client.pubsub()
        self._asked.clear()
        try:
            await pubsub.connect()
            self._reader.well()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._ask, pubsub)
                await self._listen(pubsub)
        finally:
            self._standing.clear()
            self._heard = anyio.Event()
            self._deaf = True
            with anyio.move_on_after(1, shield=True):
                await pubsub.aclose()
                await client.aclose()

    async def _ask(self, pubsub: PubSub) -> None:
        """Tells Redis what our subscribers want, whenever that changes."""
        current: set[str] = set()
        while True:
            wanted = self._listeners.subjects
            for subject in current - wanted:
                self._standing.discard(subject)
                await (pubsub.punsubscribe(_glob(subject)) if is_pattern(subject) else pubsub.unsubscribe(subject))
            for subject in wanted - current:
                self._asked[subject] += 1
                await (pubsub.psubscribe(_glob(subject)) if is_pattern(subject) else pubsub.subscribe(subject))
            current = wanted
            await self._changed.wait()

    async def _listen(self, pubsub: PubSub) -> None:
        quiet = False
        while True:
            message = await pubsub.get_message(timeout=_HEARTBEAT if not quiet else _ANSWER)
            if message is None:
                if quiet:
                    raise TimeoutError("it does not answer")
                await pubsub.ping()
            elif message["type"] in ("subscribe", "psubscribe"):
                self._confirm(message["channel"].decode(), message["type"] == "psubscribe")
            elif message["type"] in ("message", "pmessage"):
                self._deliver(message)
            quiet = message is None

    def _confirm(self, channel: str, glob: bool) -> None:
        for subject in self._listeners.subjects:
            if is_pattern(subject) == glob and (_glob(subject) if glob else subject) == channel:
                self._asked[subject] = max(self._asked[subject] - 1, 0)
                if self._asked[subject]:  # asked for, given up and asked for again: the last answer counts
                    continue
                self._standing.add(subject)
                for inbox in self._listeners.of(subject):
                    inbox.confirm()
        if self._listeners.subjects <= self._standing:
            self._heard.set()

    def _deliver(self, message: dict[str, Any]) -> None:
        """A message that several of our patterns match comes once for each of them."""
        channel = message["channel"].decode(errors="replace")
        if message["type"] == "message":
            wanted = [channel]
        else:
            glob = message["pattern"].decode()
            wanted = [s for s in self._listeners.subjects if is_pattern(s) and _glob(s) == glob and matches(s, channel)]
        for subject in wanted:
            for inbox in self._listeners.of(subject):
                inbox.put(message["data"])


def _glob(subject: str) -> str:
    """Redis's `*` also stands for dots: what it lets through is looked at again."""
    return subject.removesuffix(">") + "*" if subject.endswith(">") else subject
