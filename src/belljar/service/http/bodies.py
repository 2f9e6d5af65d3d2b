"""Bodies of requests on their way in: how large they may be, how slow, and how many of one caller at once.

What is counted is what has arrived, not what was announced. Who sends is known before the first byte is read (the
application authenticates by the headers), and is charged for it until the request has been answered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio

from belljar.core import errors
from belljar.core.settings import ServiceSettings
from belljar.core.values import KIB
from belljar.service.budget import ByteBudget, Share

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
GONE: AsgiMessage = {"type": "http.disconnect"}
STREAMED = "belljar.streamed"  # in the scope of a request whose body is not held, and so may be of any size
_LEAST_RATE = 64 * KIB  # bytes a second, which a body has to come at after the patience with it is over
_MAY_BE_STREAMED = re.compile(r"/api/sandboxes/[^/]+/files/(content|archive)|/links/[^/]+")
_log = logging.getLogger("belljar")


class Bodies:
    """The rules for bodies of one server, and what of them is in flight."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.limit: int = settings.request_size
        self.patience: float = settings.body_patience
        self._budget = ByteBudget("bodies that are on their way", 2 * self.limit, 3 * self.limit)

    def check_declared(self, length: str, scope: AsgiMessage) -> None:
        """Raises InvalidRequest for a Content-Length over the limit. A smaller one is not believed."""
        if scope["method"] == "PUT" and _MAY_BE_STREAMED.fullmatch(scope["path"]):
            return
        if length.isdecimal() and int(length[:20]) > self.limit:
            raise self.too_large()

    def too_large(self) -> errors.InvalidRequest:
        """Returns the refusal of a body over the limit."""
        refusal = errors.InvalidRequest(
            f"the request has more than {self.limit} bytes", fix="send less, or raise service.request_size",
            context={"setting": "service.request_size", "limit": self.limit},
        )  # fmt: skip
        refusal.http_status = 413
        return refusal

    def share(self, caller: str) -> Share:
        """Returns an account for one body of this caller."""
        return self._budget.share(caller)


class Body:
    """One body. `receive` is what the application calls."""

    def __init__(self, scope: AsgiMessage, receive: Receive, bodies: Bodies, *, has_body: bool) -> None:
        self._has_body = has_body  # by the headers
        self._whole = False  # nothing of it is left to come
        self._scope = scope
        self._receive = receive
        self._bodies = bodies
        self._share: Share | None = None
        self._size = 0
        self._waited = 0.0  # seconds, for the sender: while we do not read, it cannot send

    @property
    def is_unread(self) -> bool:
        """Whether some of it may be left to come."""
        return self._has_body and not self._whole

    async def receive(self) -> AsgiMessage:
        """Returns the next message of the server.

        Raises:
            InvalidRequest: The body is too large (413), or comes too slowly (408).
            Busy: Its sender has too much on its way already.
        """
        if self._whole:
            return await self._receive()
        message = await self._next()
        if message["type"] != "http.request":
            if self.is_unread:
                self._log_gone()
            self._whole = True
            return message
        self._whole = not message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        return message

    async def _next(self) -> AsgiMessage:
        start = anyio.current_time()
        left = self._bodies.patience + self._size / _LEAST_RATE - self._waited
        with anyio.move_on_after(left):
            message = await self._receive()
            self._waited += anyio.current_time() - start
            return message
        raise _too_slow(self._size)

    def _count(self, size: int) -> None:
        self._size += size
        if self._scope.get(STREAMED):
            return
        if self._size > self._bodies.limit:
            raise self._bodies.too_large()
        caller = self._scope.get("caller")
        if caller is None:  # a route that anybody may ask
            return
        if self._share is None:
            self._share = self._bodies.share(caller.name)
        self._share.add(size)

    def _log_gone(self) -> None:
        caller = self._scope.get("caller")
        path = bytes(self._scope.get("raw_path") or b"").decode("latin-1")[:200]
        who = caller.name if caller else "somebody"
        _log.info("%s hung up in the middle of the body of %s %s", who, self._scope.get("method"), path)

    def close(self) -> None:
        """Says that the request was answered."""
        if self._share is not None:
            self._share.close()


def _too_slow(size: int) -> errors.InvalidRequest:
    refusal = errors.InvalidRequest(
        f"the body came too slowly: {size} bytes so far", fix=f"send at least {_LEAST_RATE} bytes a second",
        context={"setting": "service.body_patience"},
    )  # fmt: skip
    refusal.http_status = 408
    return refusal
