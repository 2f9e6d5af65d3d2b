"""Queues of messages on their way to a broker or to a subscriber. All are bounded, and adding to one never waits.

Outbox      what is to be sent: the oldest go first when it is full, counted
Inbox       what one subscriber has not read yet: what it missed, it is told
Listeners   which inbox hears which subject
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import anyio
from pydantic_core import PydanticSerializationError, to_json

from belljar.core import errors

_log = logging.getLogger("belljar")
_WORD = r"[A-Za-z0-9_:\-]+"
_SUBJECT = re.compile(rf"{_WORD}(\.{_WORD})*", re.ASCII)
_WANTED = re.compile(rf"({_WORD}|\*)(\.({_WORD}|\*))*(\.>)?", re.ASCII)
_OVERHEAD = 256  # bytes that Python takes for a message besides its text: many small ones count, too


def encode(subject: str, body: dict[str, Any]) -> bytes | None:
    """Returns a message as JSON, or None if it cannot be encoded: publishing must not fail."""
    try:
        if not _SUBJECT.fullmatch(subject):
            raise ValueError(f"{subject[:80]!r} is no subject")
        try:
            return to_json(body, fallback=str, inf_nan_mode="null")  # five times as quick as what follows
        except (PydanticSerializationError, ValueError):  # half characters, which guests do print
            return json.dumps(body, separators=(",", ":"), default=str, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        _log.error("a message for the bus was dropped: %s", error)
        return None


def decode(payload: bytes) -> dict[str, Any] | None:
    """Returns the message that was published, or None if it is not one of ours."""
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def check_wanted(subject: str) -> None:
    if not _WANTED.fullmatch(subject):
        raise errors.InvalidRequest(
            f"{subject[:80]!r} is no subject", fix="write words with dots between them; * is any word, .> any rest"
        )


def is_pattern(subject: str) -> bool:
    return "*" in subject or ">" in subject


def matches(wanted: str, subject: str) -> bool:
    """Returns whether a subject matches a pattern by the rules of NATS: `*` is one word, `>` at the end one or more."""
    words, given = wanted.split("."), subject.split(".")
    if words[-1] == ">":
        words = words[:-1]
        if len(given) <= len(words):
            return False
        given = given[: len(words)]
    return len(words) == len(given) and all(word in ("*", is_) for word, is_ in zip(words, given, strict=True))


class Signal:
    """An event that one task waits for again and again."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()


class Message(NamedTuple):
    number: int
    subject: str
    body: bytes
    size: int


class Outbox:
    """Messages in order, each with a number. One that is being sent stays until it is said to have arrived."""

    def __init__(self, count: int, size: int) -> None:
        if count < 1 or size < 1:
            raise errors.InvalidRequest("a buffer has room for at least one message and one byte")
        self.dropped: int = 0
        self._limits = count, size
        self._messages: deque[Message] = deque()
        self._size = 0
        self._last = 0
        self._flying = 0  # the last number that may have left
        self._overtaken: list[int] = []  # dropped while flying: if they arrived after all, they were not lost

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, subject: str, body: bytes) -> None:
        count, size = self._limits
        self._last += 1
        weight = len(body) + len(subject) + _OVERHEAD
        if weight > size:
            self.dropped += 1
            return
        self._messages.append(Message(self._last, subject, body, weight))
        self._size += weight
        while len(self._messages) > count or self._size > size:
            gone = self._pop()
            self.dropped += 1
            if gone.number <= self._flying:
                self._overtaken.append(gone.number)

    def _pop(self) -> Message:
        message = self._messages.popleft()
        self._size -= message.size
        return message

    def next(self, count: int, size: int) -> list[Message]:
        """Returns the oldest messages, at least one if there is any; the same ones until `sent` removes them."""
        batch: list[Message] = []
        for message in islice(self._messages, count):
            size -= message.size
            if batch and size < 0:
                break
            batch.append(message)
        self._flying = batch[-1].number if batch else 0
        self._overtaken.clear()
        return batch

    def sent(self, number: int) -> None:
        """Removes all messages up to this number, which have arrived."""
        while self._messages and self._messages[0].number <= number:
            self._pop()
        arrived = [each for each in self._overtaken if each <= number]
        self.dropped -= len(arrived)
        self._overtaken = [each for each in self._overtaken if each > number]

    def refused(self, number: int) -> None:
        """Removes a message that the broker will never take, so that it does not hold up the others."""
        for message in self._messages:
            if message.number == number:
                self._messages.remove(message)
                self._size -= message.size
                self.dropped += 1
                break


class Inbox:
    """The messages that one subscriber has not read yet.

    Where messages are missing it reads `{"gap": 3}` first, or `{"gap": None}` if their number is not known.
    """

    def __init__(self, subject: str, count: int, size: int) -> None:
        self.subject = subject
        self.ready: anyio.Event = anyio.Event()  # from here on nothing is missed unsaid
        self.late: bool = False  # the subscriber did not wait for that
        self._limits = count, size
        self._items: deque[bytes] = deque()
        self._size = 0
        self._missed = 0
        self._unknown = False
        self._closed = False
        self._signal = Signal()

    def put(self, payload: bytes) -> None:
        count, size = self._limits
        self._items.append(payload)
        self._size += len(payload) + _OVERHEAD
        while len(self._items) > count or self._size > size:
            self._size -= len(self._items.popleft()) + _OVERHEAD
            self._missed += 1
        self._signal.set()

    def gap(self) -> None:
        self._unknown = True
        self._signal.set()

    def confirm(self) -> None:
        """Notes that the broker sends messages from now on; unless this is the first time, some may be missing."""
        if self.late or self.ready.is_set():
            self.gap()
        self.late = False
        self.ready.set()

    def close(self) -> None:
        """Takes no more messages. Those that are there can still be read."""
        self._closed = True
        self._signal.set()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while True:
            if self._missed or self._unknown:
                missed = None if self._unknown else self._missed
                self._missed, self._unknown = 0, False
                return {"gap": missed}
            if self._items:
                payload = self._items.popleft()
                self._size -= len(payload) + _OVERHEAD
                if (body := decode(payload)) is not None:
                    return body
            elif self._closed:
                raise StopAsyncIteration
            else:
                await self._signal.wait()


class Listeners:
    """The inboxes by the subject or pattern that each of them subscribed to."""

    def __init__(self) -> None:
        self._inboxes: dict[str, set[Inbox]] = {}
        self._patterns: set[str] = set()

    def __iter__(self) -> Iterator[Inbox]:
        return iter([inbox for inboxes in self._inboxes.values() for inbox in inboxes])

    @property
    def subjects(self) -> set[str]:
        return set(self._inboxes)

    def add(self, inbox: Inbox) -> None:
        self._inboxes.setdefault(inbox.subject, set()).add(inbox)
        if is_pattern(inbox.subject):
            self._patterns.add(inbox.subject)

    def remove(self, inbox: Inbox) -> None:
        if inboxes := self._inboxes.get(inbox.subject):
            inboxes.discard(inbox)
            if not inboxes:
                del self._inboxes[inbox.subject]
                self._patterns.discard(inbox.subject)

    def of(self, wanted: str) -> Iterable[Inbox]:
        """Returns the inboxes that subscribed to exactly this subject or pattern."""
        return tuple(self._inboxes.get(wanted, ()))

    def hearing(self, subject: str) -> list[Inbox]:
        """Returns the inboxes whose subject or pattern matches this subject."""
        found = list(self._inboxes.get(subject, ()))
        for pattern in self._patterns:
            if matches(pattern, subject):
                found += self._inboxes[pattern]
        return found
