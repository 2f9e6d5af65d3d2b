"""Events over NATS JetStream: a stream keeps them, each one once, in the order in which they were published.

A message is ours until the stream says that it has it. When that answer gets lost, the message is looked for in the
stream before it is sent again; its id keeps the server from storing it twice while we look. Order is kept except where
the server itself refuses one message for a while and takes the next.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Unpack

import anyio
from anyio.abc import TaskGroup

from belljar.core import errors
from belljar.core.values import MIB
from belljar.service.bus.bus import Bounds, BrokerAddress, BrokerBus, Link
from belljar.service.bus.queues import Inbox, Message

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.api import PubAck, StreamInfo
    from nats.js.client import JetStreamContext

STREAM = "BELLJAR"
SUBJECTS = "belljar.events.>"
_PREFIX = SUBJECTS.removesuffix(">")
_log = logging.getLogger("belljar")
_ANSWER = 5.0  # seconds that NATS has for an answer
_HEARTBEAT = 2  # seconds between questions whether it is still there; two without an answer are the end
_BATCH = 256, MIB // 2
_SEARCH = 5000  # messages of the stream that are looked at for ours whose answer got lost
_ABANDONED = 30.0  # seconds after which the server forgets a subscriber that is gone
_AGAIN = 1.0  # seconds after which a subscriber that the server refused asks again
_SILENCE = 20.0  # seconds without an event after which we ask whether the server still knows a subscriber
_PENDING = 16 * MIB  # bytes that the library keeps for a subscriber before we have them
_HEADERS = 256  # bytes that an id takes of what a message may have


class Follower:
    """One subscriber's place in the stream, which outlives connections."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.next: int | None = None  # the number in the stream that comes next
        self.created: datetime | None = None  # the stream that it is a number of
        self.scope: anyio.CancelScope = anyio.CancelScope()


class NatsConnection:
    """One connection."""

    def __init__(self, client: Client, stream: JetStreamContext, tasks: TaskGroup) -> None:
        self.client = client
        self.stream = stream
        self.tasks = tasks


class NatsBus(BrokerBus):
    name = "nats"

    def __init__(
        self, url: str, *, max_age: float = 7 * 86400, max_bytes: int = 1024 * MIB, duplicates: float = 600,
        **bounds: Unpack[Bounds],
    ) -> None:  # fmt: skip
        super().__init__(**bounds)
        addresses = [BrokerAddress.parse(each, "NATS", ("nats", "tls")) for each in url.split(",")]
        if max_age <= 0 or max_bytes <= 0:
            raise errors.InvalidRequest("the stream of events needs an age and a size above zero")
        self._urls = [each.strip() for each in url.split(",")]
        self._limits = max_age, max_bytes, min(duplicates, max_age)
        _require_library()
        whose = f"NATS at {', '.join(each.shown for each in addresses)}"
        secrets = tuple(secret for each in addresses for secret in each.secrets)
        self._link = Link(whose, self._progress.set, secrets=secrets, problem=f"{whose}: not connected yet")
        self._links = [self._link]
        self._session: NatsConnection | None = None
        self._followers: dict[Inbox, Follower] = {}
        self._origin = uuid.uuid4().hex
        self._doubtful: dict[str, int] = {}  # ids and numbers of what was sent, and perhaps stored
        self._seen = 0  # the stream's last number before those
        self._created: datetime | None = None

    def publish(self, subject: str, body: dict[str, object]) -> None:
        """Subjects below `belljar.events`: no stream takes the others, and they would hold up what follows."""
        if subject.startswith(_PREFIX):
            super().publish(subject, body)
        else:
            _log.error("an event was dropped: its subject %.80r is not below %s", subject, SUBJECTS)
            self._unsendable += 1

    def _start(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._link.keep, self._connect)

    # --- the connection ---

    async def _connect(self) -> None:
        from nats.aio.client import Client
        from nats.errors import NoServersError

        client = Client()
        lost = anyio.Event()
        reasons: list[Exception] = []

        async def on_error(error: Exception) -> None:
            reasons[:] = [error]

        async def on_end() -> None:
            lost.set()

        try:
            with anyio.fail_after(2 * _ANSWER):
                await client.connect(
                    list(self._urls),
                    name="belljar",
                    allow_reconnect=False,  # it is we who try again: the library would keep more than our bounds
                    max_reconnect_attempts=1,  # 0 would mean for ever
                    reconnect_time_wait=0,
                    connect_timeout=int(_ANSWER),
                    ping_interval=_HEARTBEAT,
                    max_outstanding_pings=2,
                    error_cb=on_error,
                    closed_cb=on_end,
                )
            await self._serve(client, lost)
        except NoServersError:
            raise (reasons or [ConnectionError("it cannot be reached")])[0] from None
        finally:
            self._session = None
            with anyio.move_on_after(1, shield=True), suppress(Exception):
                await client.close()

    async def _serve(self, client: Client, lost: anyio.Event) -> None:
        stream = client.jetstream(timeout=_ANSWER)
        found = await self._ensure(stream)
        await self._settle(stream, found)
        async with anyio.create_task_group() as tasks:
            self._session = NatsConnection(client, stream, tasks)
            for follower in self._followers.values():
                tasks.start_soon(self._follow, follower, self._session, found)  # before anything is sent
            tasks.start_soon(self._write, client, stream)
            self._link.well()
            await lost.wait()
            raise ConnectionError(str(client.last_error or "the connection was closed"))

    async def _ensure(self, stream: JetStreamContext) -> StreamInfo:
        """The stream as it is, or a new one. Several of us may make it at once, and an administrator made it better."""
        from nats.js.api import StreamConfig
        from nats.js.errors import BadRequestError, NotFoundError, ServiceUnavailableError

        max_age, max_bytes, duplicates = self._limits
        config = StreamConfig(
            STREAM, subjects=[SUBJECTS], max_age=max_age, max_bytes=max_bytes, duplicate_window=duplicates
        )
        try:
            try:
                return await stream.stream_info(STREAM)
            except NotFoundError:
                with suppress(BadRequestError):
                    return await stream.add_stream(config)
            return await stream.stream_info(STREAM)
        except ServiceUnavailableError:
            raise errors.NotAvailable("it runs without JetStream, or has no room for it") from None

    # --- what we publish ---

    async def _settle(self, stream: JetStreamContext, found: StreamInfo) -> None:
        """Looks in the stream for what may have arrived without our hearing of it."""
        from nats.js.errors import NotFoundError

        if self._doubtful and found.created == self._created:
            last = found.state.last_seq
            number = self._seen
            with suppress(NotFoundError):  # there is none after it
                for _ in range(_SEARCH):
                    if number >= last or not self._doubtful:
                        break
                    message = await stream.get_msg(STREAM, number + 1, subject=SUBJECTS, next=True)
                    number = message.seq or last
                    arrived = self._doubtful.pop((message.headers or {}).get("Nats-Msg-Id", ""), 0)
                    self._outbox.sent(arrived)  # and so did all before it: one connection, one order
        self._doubtful.clear()
        self._seen, self._created = found.state.last_seq, found.created

    async def _write(self, client: Client, stream: JetStreamContext) -> None:
        while True:
            if batch := self._outbox.next(*_BATCH):
                await self._send(client, stream, batch)
            else:
                await self._posted.wait()

    async def _send(self, client: Client, stream: JetStreamContext, batch: list[Message]) -> None:
        answers: list[asyncio.Future[PubAck]] = []
        sent: list[Message] = []
        try:
            for message in batch:
                if len(message.body) + _HEADERS > client.max_payload:
                    self._refuse(message, f"its {len(message.body)} bytes are more than the server takes")
                    continue
                id = f"{self._origin}-{message.number}"
                self._doubtful[id] = message.number
                sent.append(message)
                answers.append(await stream.publish_async(message.subject, message.body, headers={"Nats-Msg-Id": id}))
            if answers:
                await asyncio.wait(answers, timeout=_ANSWER)
        finally:
            refusal = self._count(sent, answers)
            self._progress.set()
        if refusal:
            raise refusal
        if not all(answer.done() for answer in answers):
            raise TimeoutError("it does not answer")

    def _count(self, sent: list[Message], answers: list[asyncio.Future[PubAck]]) -> BaseException | None:
        """Takes what arrived out of the outbox. What the server refuses for now is returned: it is tried again."""
        refusal: BaseException | None = None
        for message, answer in zip(sent, answers, strict=False):
            if not answer.done() or answer.cancelled():
                break
            problem = answer.exception()
            if problem is None and refusal is None:
                self._outbox.sent(message.number)
                self._seen = max(self._seen, answer.result().seq)
                self._doubtful.pop(f"{self._origin}-{message.number}", None)
            elif problem is not None and getattr(problem, "code", None) == 400:
                self._refuse(message, str(problem))
            else:
                refusal = refusal or problem
        return refusal

    def _refuse(self, message: Message, why: str) -> None:
        _log.error("an event for %s was dropped: %s", message.subject, why)
        self._outbox.refused(message.number)
        self._doubtful.pop(f"{self._origin}-{message.number}", None)

    # --- what our subscribers hear ---

    def _joined(self, inbox: Inbox) -> None:
        if not inbox.subject.startswith(_PREFIX):
            self._listeners.remove(inbox)
            raise errors.InvalidRequest(f"{inbox.subject!r} is not below belljar.events", fix=f"ask for {SUBJECTS}")
        follower = self._followers[inbox] = Follower(inbox)
        if self._session:
            self._session.tasks.start_soon(self._follow, follower, self._session)

    def _parted(self, inbox: Inbox) -> None:
        if follower := self._followers.pop(inbox, None):
            follower.scope.cancel()

    async def _follow(self, follower: Follower, session: NatsConnection, found: StreamInfo | None = None) -> None:
        """Until its subscriber leaves or the connection ends. What goes wrong for one subscriber is its own affair."""
        from nats.errors import Error

        with anyio.CancelScope() as follower.scope:
            while follower.inbox in self._followers:
                try:
                    self._find_place(follower, found or await session.stream.stream_info(STREAM))
                    await self._listen(follower, session)
                except Error as error:
                    _log.warning("a subscriber of %s is connected again: %s", follower.inbox.subject, error)
                    await anyio.sleep(_AGAIN)
                found = None

    def _find_place(self, follower: Follower, found: StreamInfo) -> None:
        """Where it was, if the stream still has that; otherwise where the stream begins, and it is told so."""
        first, last = found.state.first_seq, found.state.last_seq
        if follower.next is None:
            follower.next = last + 1
            if follower.inbox.late:
                follower.inbox.gap()
        elif follower.created != found.created or not first <= follower.next <= last + 1:
            follower.next = max(first, 1)
            follower.inbox.gap()
        follower.created = found.created

    async def _listen(self, follower: Follower, session: NatsConnection) -> None:
        """Returns when a message is missing: then it is asked for again."""
        from nats.errors import TimeoutError as Silence

        subscription = await self._subscribe(follower, session)
        count = 0
        try:
            while True:
                try:
                    message = await subscription.next_msg(timeout=_SILENCE)
                except Silence:
                    await subscription.consumer_info()  # raises if the server forgot us
                    continue
                count += 1
                if message.metadata.sequence.consumer != count:
                    return
                follower.inbox.put(message.data)
                follower.next = message.metadata.sequence.stream + 1
        finally:
            with anyio.move_on_after(1, shield=True), suppress(Exception):
                await subscription.unsubscribe()

    async def _subscribe(self, follower: Follower, session: NatsConnection) -> JetStreamContext.PushSubscription:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=follower.next,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_ABANDONED,
            mem_storage=True,
            num_replicas=1,
        )
        subscription = await session.stream.subscribe(
            follower.inbox.subject, stream=STREAM, config=config, pending_bytes_limit=_PENDING
        )
        follower.inbox.late = False
        follower.inbox.ready.set()
        return subscription


def _require_library() -> None:
    if find_spec("nats") is None:
        raise errors.NotAvailable("the bus over NATS needs a library", fix="pip install 'belljar-sandbox[nats]'")
