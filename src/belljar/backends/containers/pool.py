"""Keeps a few started containers of each kind used lately, so that a run need not wait for one to start.

Off unless the administrator sets `container.pool`. Each container serves one run and no second. It belongs to the event
loop that created it and to the backend that asked for it, and is removed with either; a thread that serves callers for
years has one loop for all of them.
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
from belljar.backends.containers.cleanup import Cleanup, Leftovers, remove
from belljar.backends.containers.standby import Standby
from belljar.core import errors
from belljar.core.labels import OWNER_LABEL, RUN_LABEL
from belljar.core.values import WORKSPACE
from belljar.host import ownership
from belljar.host.docker_api import asking, connected, list_containers
from belljar.host.engine_address import EngineAddress
from belljar.host.guest_uid import GuestUid, group_of

if TYPE_CHECKING:
    from aiodocker import Docker

_MAX_TEMPLATES = 4  # with more in use, the one not asked for longest makes room
_CHECK_SECONDS = 10.0  # between two looks whether what waits is still what would be made now
_EXIT_SECONDS = 10.0
_RESPITE_SECONDS = 0.05  # the run that was just given one goes first
_POOL = "pool"  # in place of a run's id
_OWN = ("User", "Labels")  # what each container has for itself


class PoolTemplate:
    """One request body, and the started containers that were made of it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.waiting: deque[Standby] = deque()
        self.asked: float = time.monotonic()
        self.failed = False  # then nobody tries again before the next look


class Pool:
    """Started containers for runs to come; a run gets one by `claim`."""

    def __init__(
        self, address: EngineAddress, cleanup: Cleanup, size: int, idle: float, uids: range, gid: int | None = None
    ) -> None:
        self.address = address
        self.cleanup = cleanup
        self.size = size
        self.idle = idle
        self.uids = uids  # empty: the engine maps uids itself
        self.gid = gid  # of all of them; None: each one's own
        self.closed: bool = False
        self.names: set[str] = set()  # of all that wait, in whatever loop
        self._pid = os.getpid()
        self._loop_pools: WeakKeyDictionary[Any, LoopPool] = WeakKeyDictionary()  # one for each event loop
        if size:
            atexit.register(self._leave)

    def claim(self, body: Mapping[str, Any]) -> Standby | None:
        """Returns a started container that was made of the same request body, if there is one.

        In any case more of the kind are started, for the next run.
        """
        if not self.size or self.closed:
            return None
        loop = asyncio.get_running_loop()
        loop_pool = self._loop_pools.get(loop)
        if loop_pool is None or loop_pool.task.done():
            self._abandon()
            loop_pool = self._loop_pools[loop] = LoopPool(self)
        return loop_pool.claim(body)

    def _abandon(self) -> None:
        """Lets go what waits in loops that were closed without a word to their tasks.

        A loop_pool keeps its loop, so no dictionary forgets them by itself.
        """
        for loop, loop_pool in list(self._loop_pools.items()):
            if loop.is_closed():
                self._loop_pools.pop(loop, None)
                left = sorted(self.names & loop_pool.names)
                self.names.difference_update(left)
                self.cleanup.remove_later(Leftovers(left))

    def close(self) -> None:
        """Lets all go that wait, from whatever thread. Returns at once."""
        self.closed = True
        for loop, loop_pool in list(self._loop_pools.items()):
            with suppress(RuntimeError):  # a closed loop took its own with it
                loop.call_soon_threadsafe(loop_pool.wanted.set)

    @property
    def waiting(self) -> int:
        """How many containers are started and wait, in all loops."""
        templates = [
            template for loop_pool in list(self._loop_pools.values()) for template in list(loop_pool.templates.values())
        ]
        return sum(len(template.waiting) for template in templates)

    def _leave(self) -> None:
        """At the end of the process: what a loop that nobody closed has left."""
        if os.getpid() == self._pid:  # a forked child has nothing of its own here
            self.cleanup.remove_later(Leftovers(sorted(self.names)))


class LoopPool:
    """The started containers of one event loop, and the task that starts and removes them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.templates: OrderedDict[str, PoolTemplate] = OrderedDict()
        self.names: set[str] = set()  # of all it ever created and has not given away
        self._dead: list[Standby] = []  # found dead by `claim`, which cannot wait until they are closed
        self.wanted: asyncio.Event = asyncio.Event()
        self.task: asyncio.Task[None] = asyncio.create_task(self._maintain(), name="belljar-pool")

    def claim(self, body: Mapping[str, Any]) -> Standby | None:
        """See `Pool.claim`."""
        key = json.dumps({name: value for name, value in body.items() if name not in _OWN}, sort_keys=True)
        template = self.templates.setdefault(key, PoolTemplate(body))
        self.templates.move_to_end(key)
        template.asked = time.monotonic()
        self.wanted.set()
        while template.waiting:
            standby = template.waiting.popleft()
            if standby.alive:
                self._forget([standby.name])
                return standby
            self._dead.append(standby)
        return None

    async def _maintain(self) -> None:
        async with connected(self._pool.address) as client:
            try:
                await anyio.sleep(_RESPITE_SECONDS)
                while self.templates and not self._pool.closed:
                    await self._step(client)
            finally:
                left = [standby for template in self.templates.values() for standby in template.waiting]
                with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_SECONDS):
                    await self._clear(client, [*self._dead, *left])

    async def _step(self, client: Docker) -> None:
        """Starts one container that is lacking; if none is, waits for something to do, and evicts."""
        while self._dead:
            await self._clear(client, [self._dead.pop()])
        while len(self.templates) > _MAX_TEMPLATES:
            await self._clear(client, list(self.templates.popitem(last=False)[1].waiting))
        lacking = [each for each in self.templates.values() if not each.failed and self._lacks(each)]
        if lacking:
            await self._create(client, lacking[-1])
            return
        self.wanted.clear()
        with anyio.move_on_after(min(_CHECK_SECONDS, self._pool.idle)):
            await self.wanted.wait()
            await anyio.sleep(_RESPITE_SECONDS)
        await self._evict(client)

    def _lacks(self, template: PoolTemplate) -> bool:
        return len(template.waiting) < self._pool.size

    async def _create(self, client: Docker, template: PoolTemplate) -> None:
        name = f"bj-pool-{secrets.token_hex(8)}"
        self._pool.names.add(name)
        self.names.add(name)
        standby: Standby | None = None
        try:
            with ExitStack() as claimed:
                standby = await Standby.create(client, name, self._body(template, claimed))
                standby.holds(claimed.pop_all())
            await standby.start(local=self._pool.address.local)
            await standby.call_keeper(WORKSPACE)
            template.waiting.append(standby)
        except errors.BelljarError as error:
            template.failed = True
            logging.getLogger("belljar").warning("the pool could not be filled: %s", error.message)
        finally:
            if standby is None or standby not in template.waiting:
                self._forget([name])
                self._pool.cleanup.remove_later(Leftovers([name]))
                if standby is not None:
                    await standby.close()

    def _forget(self, names: Sequence[str]) -> None:
        self._pool.names.difference_update(names)
        self.names.difference_update(names)

    def _body(self, template: PoolTemplate, claimed: ExitStack) -> dict[str, Any]:
        """The same again, for another guest."""
        maker = template.body["Labels"][OWNER_LABEL]
        body = {**template.body, "Labels": spec.labels(maker, _POOL)}
        if self._pool.uids:
            uid, claim = ownership.claim_uid(self._pool.uids)
            claimed.callback(claim.close)
            body["User"] = f"{uid}:{group_of(GuestUid.of(uid, self._pool.gid))}"
        return body

    async def _evict(self, client: Docker) -> None:
        """Takes out what has died, what nobody asked for, and what is not of the image any more that its name means."""
        old, up = time.monotonic() - self._pool.idle, await _running(client)
        for key, template in list(self.templates.items()):
            template.failed = False
            if template.asked < old:
                del self.templates[key]
                await self._clear(client, list(template.waiting))
                continue
            image = await _image_id(client, str(template.body["Image"])) if template.waiting else ""
            gone = [standby for standby in template.waiting if standby.container.id not in up or standby.image != image]
            template.waiting = deque(standby for standby in template.waiting if standby not in gone)
            await self._clear(client, gone)

    async def _clear(self, client: Docker, gone: Sequence[Standby]) -> None:
        for standby in gone:
            await standby.close()
        names = [standby.name for standby in gone]
        if names and not await remove(client, Leftovers(names)):
            self._pool.cleanup.remove_later(Leftovers(names))
        self._forget(names)


async def _running(client: Docker) -> set[str]:
    """The ids of those of any pool that are up."""
    with suppress(errors.BelljarError):
        async with asking("the list of containers"):
            found = await list_containers(client, label=f"{RUN_LABEL}={_POOL}", running=True)
            return {str(each["Id"]) for each in found}
    return set()


async def _image_id(client: Docker, name: str) -> str:
    with suppress(errors.BelljarError):
        async with asking("the image"):
            return str((await client.images.inspect(name))["Id"])
    return ""
