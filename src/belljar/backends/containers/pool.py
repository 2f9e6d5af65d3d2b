"""Containers that wait for their word: a few of each kind that was asked for lately, each for one run and no second.

Off unless the administrator sets `container.pool`. What waits belongs to the event loop that made it and to the backend
that asked for it, and goes with either; a thread that serves callers for years has one loop for all of them.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import anyio

from belljar.backends.containers import spec
from belljar.backends.containers.cleanup import Broom, Litter, remove
from belljar.backends.containers.standby import Ready
from belljar.core import errors
from belljar.core.values import WORKSPACE
from belljar.host import ownership
from belljar.host.docker_api import Address, asking, connected

if TYPE_CHECKING:
    from aiodocker import Docker

_KINDS = 4  # with more in use, the one not asked for longest makes room
_LOOK = 10.0  # seconds between two looks whether what waits is still what would be made now
_FAREWELL = 10.0
_RESPITE = 0.05  # seconds: the run that was just given one goes first
_POOL = "pool"  # in place of a run's id
_OWN = ("User", "Labels")  # what each container has for itself


class Kind:
    """One way to make a container, and those that wait."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.waiting: deque[Ready] = deque()
        self.asked = time.monotonic()
        self.failed = False  # then nobody tries again before the next look


class Pool:
    """`claim` is all that a run needs to know."""

    def __init__(self, address: Address, broom: Broom, size: int, idle: float, uids: range) -> None:
        self.address = address
        self.broom = broom
        self.size = size
        self.idle = idle
        self.uids = uids  # empty: the engine maps uids itself
        self.closed = False
        self.names: set[str] = set()  # of all that wait, in whatever loop
        self._pid = os.getpid()
        self._gardens: WeakKeyDictionary[Any, Garden] = WeakKeyDictionary()  # one for each event loop
        if size:
            atexit.register(self._leave)

    def claim(self, body: Mapping[str, Any]) -> Ready | None:
        """One that waits, if there is; and in any case more of its kind are made, for the next."""
        if not self.size or self.closed:
            return None
        loop = asyncio.get_running_loop()
        garden = self._gardens.get(loop)
        if garden is None or garden.task.done():
            self._abandon()
            garden = self._gardens[loop] = Garden(self)
        return garden.claim(body)

    def _abandon(self) -> None:
        """Lets go what waits in loops that were closed without a word to their tasks.

        A garden keeps its loop, so no dictionary forgets them by itself.
        """
        for loop, garden in list(self._gardens.items()):
            if loop.is_closed():
                self._gardens.pop(loop, None)
                left = sorted(self.names & garden.names)
                self.names.difference_update(left)
                self.broom.take(Litter(left))

    def close(self) -> None:
        """Lets all go that wait, from whatever thread. Returns at once."""
        self.closed = True
        for loop, garden in list(self._gardens.items()):
            with suppress(RuntimeError):  # a closed loop took its own with it
                loop.call_soon_threadsafe(garden.wanted.set)

    @property
    def waiting(self) -> int:
        kinds = [kind for garden in list(self._gardens.values()) for kind in list(garden.kinds.values())]
        return sum(len(kind.waiting) for kind in kinds)

    def _leave(self) -> None:
        """At the end of the process: what a loop that nobody closed has left."""
        if os.getpid() == self._pid:  # a forked child has nothing of its own here
            self.broom.take(Litter(sorted(self.names)))


class Garden:
    """What waits in one event loop, and the task that tends it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.kinds: OrderedDict[str, Kind] = OrderedDict()
        self.names: set[str] = set()  # of all it ever planted and has not given away
        self.wanted = asyncio.Event()
        self.task = asyncio.create_task(self._tend(), name="belljar-pool")

    def claim(self, body: Mapping[str, Any]) -> Ready | None:
        key = json.dumps({name: value for name, value in body.items() if name not in _OWN}, sort_keys=True)
        kind = self.kinds.setdefault(key, Kind(body))
        self.kinds.move_to_end(key)
        kind.asked = time.monotonic()
        self.wanted.set()
        while kind.waiting:
            ready = kind.waiting.popleft()
            self._forget([ready.name])
            if ready.alive:
                return ready
            self._pool.broom.take(Litter([ready.name]))
        return None

    async def _tend(self) -> None:
        async with connected(self._pool.address) as client:
            try:
                await anyio.sleep(_RESPITE)
                while self.kinds and not self._pool.closed:
                    while len(self.kinds) > _KINDS:
                        await self._clear(client, list(self.kinds.popitem(last=False)[1].waiting))
                    lacking = [kind for kind in self.kinds.values() if not kind.failed and self._lacks(kind)]
                    if lacking:
                        await self._plant(client, lacking[-1])
                        continue
                    self.wanted.clear()
                    with anyio.move_on_after(min(_LOOK, self._pool.idle)):
                        await self.wanted.wait()
                        await anyio.sleep(_RESPITE)
                    await self._weed(client)
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(_FAREWELL):
                    await self._clear(client, [ready for kind in self.kinds.values() for ready in kind.waiting])

    def _lacks(self, kind: Kind) -> bool:
        return len(kind.waiting) < self._pool.size

    async def _plant(self, client: Docker, kind: Kind) -> None:
        name = f"bj-pool-{secrets.token_hex(8)}"
        self._pool.names.add(name)
        self.names.add(name)
        ready: Ready | None = None
        try:
            with ExitStack() as claimed:
                ready = await Ready.create(client, name, self._body(kind, claimed))
                ready.holds(claimed.pop_all())
            await ready.start(local=self._pool.address.local)
            await ready.call_keeper(WORKSPACE)
            kind.waiting.append(ready)
        except errors.BelljarError as error:
            kind.failed = True
            logging.getLogger("belljar").warning("the pool could not be filled: %s", error.message)
        finally:
            if ready is None or ready not in kind.waiting:
                self._forget([name])
                self._pool.broom.take(Litter([name]))
                if ready is not None:
                    await ready.close()

    def _forget(self, names: Sequence[str]) -> None:
        self._pool.names.difference_update(names)
        self.names.difference_update(names)

    def _body(self, kind: Kind, claimed: ExitStack) -> dict[str, Any]:
        """The same again, for another guest."""
        maker = kind.body["Labels"][f"{spec.LABEL}.owner"]
        body = {**kind.body, "Labels": spec.labels(maker, _POOL)}
        if self._pool.uids:
            uid, claim = ownership.claim_uid(self._pool.uids)
            claimed.callback(claim.close)
            body["User"] = f"{uid}:{uid}"
        return body

    async def _weed(self, client: Docker) -> None:
        """Takes out what has died, what nobody asked for, and what is not of the image any more that its name means."""
        old, up = time.monotonic() - self._pool.idle, await _running(client)
        for key, kind in list(self.kinds.items()):
            kind.failed = False
            if kind.asked < old:
                del self.kinds[key]
                await self._clear(client, list(kind.waiting))
                continue
            image = await _image_id(client, str(kind.body["Image"])) if kind.waiting else ""
            gone = [ready for ready in kind.waiting if ready.container.id not in up or ready.image != image]
            kind.waiting = deque(ready for ready in kind.waiting if ready not in gone)
            await self._clear(client, gone)

    async def _clear(self, client: Docker, gone: Sequence[Ready]) -> None:
        for ready in gone:
            await ready.close()
        names = [ready.name for ready in gone]
        if names and not await remove(client, Litter(names)):
            self._pool.broom.take(Litter(names))
        self._forget(names)


async def _running(client: Docker) -> set[str]:
    """The ids of those of any pool that are up."""
    with suppress(errors.BelljarError):
        async with asking("the list of containers"):
            filters = {"label": [f"{spec.LABEL}.run={_POOL}"]}
            return {str(each.id) for each in await client.containers.list(filters=filters)}
    return set()


async def _image_id(client: Docker, name: str) -> str:
    with suppress(errors.BelljarError):
        async with asking("the image"):
            return str((await client.images.inspect(name))["Id"])
    return ""
