"""Publishes lines of output and events to subscribers: inside this process, over Redis, or over NATS.

`publish` never waits and never fails. While a broker is down, `status` says so, and messages for it are kept within
bounds (the oldest are dropped first, and counted in `dropped`); it gets them in order once it is back:

LocalBus    one process; nothing can be down
RedisBus    lines: pub/sub, which has no memory; a message whose answer got lost with the connection is sent again
NatsBus     events: a JetStream stream keeps them, each one once

A subscriber that was slow, or whose broker was away, reads `{"gap": n}` or `{"gap": None}` where something is missing.
All of it is for one event loop: `publish` is called where the bus was opened.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypedDict
from urllib.parse import SplitResult, urlsplit

import anyio
from anyio.abc import TaskGroup

from belljar.core import errors
from belljar.core.values import MIB
from belljar.service.bus.queues import Inbox, Listeners, Outbox, Signal, check_wanted, encode

_log = logging.getLogger("belljar")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to connect
_READY = 3.0  # seconds that a subscriber waits for a broker at most; after that it is told of a gap


class Bus(Protocol):
    name: str

    @property
    def status(self) -> str: ...  # empty when well
    @property
    def dropped(self) -> int: ...  # messages that nobody will get
    @property
    def waiting(self) -> int: ...  # messages that are not out yet; once it is closed: that nobody got
    @property
    def heard(self) -> bool: ...  # somebody may hear a message; else there is no need to make one

    def publish(self, subject: str, body: dict[str, Any]) -> None: ...
    def subscribe(self, subject: str) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalBus:
    """A bus inside one process. A message without a subscriber is dropped, as on the other buses."""

    name = "local"
    status = ""
    waiting = 0

    def __init__(self, *, inbox_count: int = 1000, inbox_size: int = 4 * MIB) -> None:
        self.dropped: int = 0
        self._inbox = inbox_count, inbox_size
        self._listeners = Listeners()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        for inbox in self._listeners:
            inbox.close()

    @property
    def heard(self) -> bool:
        return bool(self._listeners.subjects)

    def publish(self, subject: str, body: dict[str, Any]) -> None:
        inboxes = self._listeners.hearing(subject)
        payload = encode(subject, body) if inboxes and not self._closed else b""
        if payload is None or self._closed:
            self.dropped += 1
            return
        for inbox in inboxes:
            inbox.put(payload)

    @asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        check_wanted(subject)
        inbox = Inbox(subject, *self._inbox)
        self._listeners.add(inbox)
        if self._closed:
            inbox.close()
        try:
            yield inbox
        finally:
            self._listeners.remove(inbox)


class Link:
    """A connection that is made again whenever it breaks. `problem` is empty while it stands."""

    def __init__(
        self, whose: str, on_change: Callable[[], None], *, secrets: tuple[str, ...] = (), problem: str = ""
    ) -> None:
        self.problem: str = problem
        self.failed: bool = False
        self._whose = whose
        self._on_change = on_change
        self._secrets = secrets
        self._pause = _FIRST_PAUSE
        self._now = Signal()

    def nudge(self) -> None:
        """Connects at once: another connection found that the broker is back."""
        self._now.set()

    def well(self) -> None:
        if self.failed:
            _log.info("%s: connected again", self._whose)
        self.problem, self.failed, self._pause = "", False, _FIRST_PAUSE
        self._on_change()

    async def keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` again and again: it connects, calls `well`, and goes on until the connection breaks."""
        while True:
            try:
                await work()
                reason = "the connection was closed"
            except Exception as error:  # whatever it was, the next attempt may do
                reason = self._describe(error)
            if not self.failed:
                _log.warning("%s: %s; what is published is kept within bounds", self._whose, reason)
            self.problem, self.failed = f"{self._whose}: {reason}", True
            self._on_change()
            with anyio.move_on_after(self._pause * random.uniform(0.8, 1.2)):
                await self._now.wait()
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _describe(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = error.message if isinstance(error, errors.BelljarError) else str(error)
        reason = reason or type(error).__name__
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        return reason[:300]


class BrokerAddress(NamedTuple):
    """The address of a broker without secrets, which may be shown, and the secrets of its URL."""

    shown: str
    secrets: tuple[str, ...]

    @classmethod
    def parse(cls, url: str, name: str, schemes: tuple[str, ...]) -> BrokerAddress:
        try:
            parts = urlsplit(url.strip())
            shown = _shown(parts, schemes)
        except ValueError as error:  # which never quotes the password
            raise errors.InvalidRequest(
                f"the URL of {name} makes no sense: {error}", fix=f"write it as {schemes[0]}://HOST:PORT"
            ) from None
        return cls(shown, tuple(secret for secret in (parts.password, parts.username) if secret))


def _shown(parts: SplitResult, schemes: tuple[str, ...]) -> str:
    if parts.scheme not in schemes:
        raise ValueError(f"it starts with none of {', '.join(f'{scheme}://' for scheme in schemes)}")
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("it names no socket")
        return f"unix://{parts.path}"
    try:
        port = parts.port
    except ValueError:
        raise ValueError("its port is no number up to 65535") from None
    if not parts.hostname:
        raise ValueError("it names no host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


class Bounds(TypedDict, total=False):
    """The bounds of a bus: messages kept to be sent and for each subscriber, and seconds that closing may take."""

    count: int
    size: int
    inbox_count: int
    inbox_size: int
    closing: float


class BrokerBus:
    """The base of the buses with a broker: the outbox, the tasks in the background, and closing."""

    name = "broker"
    heard = True  # who listens to a broker, it does not tell
    _tasks: TaskGroup

    def __init__(
        self, *, count: int = 10_000, size: int = 16 * MIB, inbox_count: int = 1000, inbox_size: int = 4 * MIB,
        closing: float = 3.0,
    ) -> None:  # fmt: skip
        self._outbox = Outbox(count, size)
        self._listeners = Listeners()
        self._inbox = inbox_count, inbox_size
        self._closing = closing
        self._closed = False
        self._links: list[Link] = []
        self._posted = Signal()  # there is something to send
        self._progress = Signal()  # something was sent, or a connection came or went
        self._unsendable = 0

    @property
    def status(self) -> str:
        return next((link.problem for link in self._links if link.problem), "")

    @property
    def dropped(self) -> int:
        return self._outbox.dropped + self._unsendable

    @property
    def waiting(self) -> int:
        return len(self._outbox)

    def publish(self, subject: str, body: dict[str, Any]) -> None:
        payload = None if self._closed else encode(subject, body)
        if payload is None:
            self._unsendable += 1
            return
        self._outbox.add(subject, payload)
        self._posted.set()

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._start(self._tasks)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends what is left for some seconds, unless the broker is down."""
        with anyio.move_on_after(self._closing, shield=True):
            while self._outbox and not any(link.failed for link in self._links):
                await self._progress.wait()
        self._closed = True
        if self.waiting:
            _log.warning("%s: closed with %d messages left that nobody got", self.name, self.waiting)
        for inbox in self._listeners:
            inbox.close()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)  # what the body raised is not for a group of exceptions

    def _start(self, tasks: TaskGroup) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Waits for the broker, unless it is known to be down: then the subscriber is told of a gap once it is back."""
        check_wanted(subject)
        inbox = Inbox(subject, *self._inbox)
        self._listeners.add(inbox)
        try:
            self._joined(inbox)
            if self._closed:
                inbox.close()
            elif not any(link.failed for link in self._links):
                with anyio.move_on_after(_READY):
                    await inbox.ready.wait()
            inbox.late = not inbox.ready.is_set()
            yield inbox
        finally:
            self._listeners.remove(inbox)
            self._parted(inbox)

    def _joined(self, inbox: Inbox) -> None:
        raise NotImplementedError

    def _parted(self, inbox: Inbox) -> None:
        raise NotImplementedError


class Buses(NamedTuple):
    """The two buses of the service: one for lines of output, one for events."""

    lines: Bus
    events: Bus


@asynccontextmanager
async def open_bus(*, redis: str = "", nats: str = "") -> AsyncIterator[Buses]:
    """Opens both buses. Without a URL a bus is local. A broker that is down is no error here.

    Raises:
        BelljarError: a URL makes no sense, or a library is missing.
    """
    lines: Bus = LocalBus()
    events: Bus = LocalBus()
    if redis:
        from belljar.service.bus.redis import RedisBus

        lines = RedisBus(redis)
    if nats:
        from belljar.service.bus.nats import NatsBus

        events = NatsBus(nats)
    async with lines, events:
        yield Buses(lines, events)
