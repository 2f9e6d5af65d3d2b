"""Removes containers and volumes that are no longer needed, in a thread of its own, so that no answer waits for it.

What an engine does not let go of is asked for again; what it never lets go of carries our label, and is found by
`orphans`: when a backend is first asked what it can do, and from then on at intervals, by the same thread.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakMethod

import anyio

from belljar.core import errors
from belljar.host.docker_api import NOT_FOUND, asking, connected, status_of
from belljar.host.engine_address import EngineAddress

if TYPE_CHECKING:
    from aiodocker import Docker

_TRIES = 6
_PAUSE_SECONDS = 0.2  # doubled with each try
_BATCH_SIZE = 16
_BATCH_SECONDS = 2.0  # until the next batch no longer waits for this one: an engine may be stuck with one container
_BATCHES_AT_ONCE = 4
_ANSWER_SECONDS = 30.0
_EXIT_SECONDS = 20.0  # the longest that the end of the process waits for it


class Leftovers(NamedTuple):
    """Containers and volumes to remove, by name; containers first: they have the volumes mounted."""

    containers: Sequence[str] = ()
    volumes: Sequence[str] = ()


class Cleanup:
    """Removes in the background what `remove_later` is given, and looks for orphans at intervals."""

    def __init__(self, address: EngineAddress, reap: Callable[[], Awaitable[object]], interval: float) -> None:
        self.address = address
        self._reap = WeakMethod(reap)  # a backend that nobody uses any more is not kept alive by its cleanup
        self._interval = interval
        self._waiting: queue.Queue[Leftovers] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._batches = threading.BoundedSemaphore(_BATCHES_AT_ONCE)
        self._pid = os.getpid()
        self.left: list[Leftovers] = []  # what would not go
        atexit.register(self.drain, _EXIT_SECONDS)

    def remove_later(self, leftovers: Leftovers) -> None:
        """Removes these as soon as the thread comes to it. Returns at once."""
        if not (leftovers.containers or leftovers.volumes):
            return
        self._waiting.put(leftovers)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="belljar-cleanup", daemon=True)
                self._thread.start()

    def retry(self) -> None:
        """Asks again for what the engine would not let go of earlier. Returns at once."""
        left, self.left = self.left, []
        for leftovers in left:
            self.remove_later(leftovers)

    def drain(self, seconds: float) -> bool:
        """Waits until all is gone; False if something still is there."""
        if os.getpid() != self._pid:  # a forked child has no thread, and nothing of its own here
            return True
        deadline = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks and not self.left

    def _work(self) -> None:
        due = time.monotonic() + self._interval
        while True:
            if (rest := due - time.monotonic()) <= 0:
                due += self._interval
                with suppress(Exception):  # an engine that is down has its next round too
                    asyncio.run(self._reap_orphans())
                continue
            try:
                batch = [self._waiting.get(timeout=rest)]
            except queue.Empty:
                continue
            with suppress(queue.Empty):
                while len(batch) < _BATCH_SIZE:
                    batch.append(self._waiting.get_nowait())
            self._batches.acquire()
            worker = threading.Thread(target=self._work_on, args=(batch,), name="belljar-cleanup-batch", daemon=True)
            worker.start()
            worker.join(_BATCH_SECONDS)

    def _work_on(self, batch: Sequence[Leftovers]) -> None:
        try:
            asyncio.run(self._remove_all(batch))
        except Exception:  # whatever an engine does to us, the next one gets its turn
            self.left += batch
        finally:
            self._batches.release()
            for _ in batch:
                self._waiting.task_done()

    async def _reap_orphans(self) -> None:
        if reap := self._reap():
            await reap()

    async def _remove_all(self, batch: Sequence[Leftovers]) -> None:
        async with connected(self.address) as client, anyio.create_task_group() as tasks:
            for leftovers in batch:
                tasks.start_soon(self._remove, client, leftovers)

    async def _remove(self, client: Docker, leftovers: Leftovers) -> None:
        if not await remove(client, leftovers):
            self.left.append(leftovers)


async def remove(client: Docker, leftovers: Leftovers) -> bool:
    """Tries until the engine itself says that nothing is there any more."""
    paths = [f"containers/{name}?force=true&v=true" for name in leftovers.containers]
    gone = all([await _gone(client, path, f"containers/{path[11:].partition('?')[0]}/json") for path in paths])
    return all(
        [gone, *[await _gone(client, f"volumes/{name}?force=true", f"volumes/{name}") for name in leftovers.volumes]]
    )


async def _gone(client: Docker, path: str, look: str) -> bool:
    for attempt in range(_TRIES):
        for method, where in (("DELETE", path), ("GET", look)):
            try:
                async with asking("removal", seconds=_ANSWER_SECONDS):
                    status = await status_of(client, method, where)
            except errors.BelljarError:
                break
            if status == NOT_FOUND:
                return True
            if status >= 400:
                break
        await anyio.sleep(_PAUSE_SECONDS * 2**attempt)
    return False
