"""Lines, samples and alerts that wait to be written, in memory."""

from __future__ import annotations

import time
from collections import deque

from belljar.core.values import MIB
from belljar.protocol.records import Alert, LogLine
from belljar.service.store.statements import Item

EVERYTHING = "*"  # in place of a run's id, which is never this
OBJECT_BYTES = 600  # that an item takes besides its text
SHARE = 100  # items of one run in its turn


class Buffer:
    """Items by run, bounded by count and bytes.

    What comes when it is full is not taken, and counted in `dropped`; the numbers of lines show the gap.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count: int = 0
        self.size: int = 0
        self.dropped: int = 0
        self.since: float = 0.0  # when the first of those that wait came, or some were taken
        self._most, self._room = count, size
        self._by_run: dict[str, deque[Item]] = {}

    def put(self, item: Item) -> bool:
        """Takes an item; False if there is no room for it."""
        size = weigh(item)
        if self.count >= self._most or self.size + size > self._room:
            self.dropped += 1
            return False
        if not self.count:
            self.since = time.monotonic()
        self._by_run.setdefault(item.container_id, deque()).append(item)
        self.count, self.size = self.count + 1, self.size + size
        return True

    def take(self, most: int) -> list[Item]:
        """Removes and returns the next ones: some of each run in turn, so that a flood of one keeps no other back."""
        taken: list[Item] = []
        size = 0
        while self._by_run and len(taken) < most and size < MIB:
            id = next(iter(self._by_run))
            waiting = self._by_run.pop(id)
            some = [waiting.popleft() for _ in range(min(len(waiting), SHARE, most - len(taken)))]
            taken += some
            size += sum(map(weigh, some))
            if waiting:
                self._by_run[id] = waiting
        self._forget(taken)
        self.since = time.monotonic()
        return taken

    def count_of(self, id: str) -> int:
        """Returns how many items of one run wait; with `EVERYTHING`, of all runs."""
        return self.count if id == EVERYTHING else len(self._by_run.get(id, ()))

    def take_run(self, id: str) -> list[Item]:
        """Removes and returns all items of one run; with `EVERYTHING`, of all runs."""
        names = list(self._by_run) if id == EVERYTHING else [id]
        taken = [item for name in names for item in self._by_run.pop(name, ())]
        self._forget(taken)
        return taken

    def take_first(self, id: str, most: int) -> list[Item]:
        """Removes and returns the first items of one run."""
        waiting = self._by_run.get(id, deque())
        taken = [waiting.popleft() for _ in range(min(len(waiting), most))]
        if not waiting:
            self._by_run.pop(id, None)
        self._forget(taken)
        return taken

    def give_back(self, items: list[Item]) -> None:
        """Puts back items that could not be written; they were within the bounds before."""
        for item in reversed(items):
            self._by_run.setdefault(item.container_id, deque()).appendleft(item)
        self.count, self.size = self.count + len(items), self.size + sum(map(weigh, items))

    def _forget(self, items: list[Item]) -> None:
        self.count, self.size = self.count - len(items), self.size - sum(map(weigh, items))


def weigh(item: Item) -> int:
    """Returns about how many bytes of memory an item takes."""
    return OBJECT_BYTES + (len(item.message) if isinstance(item, LogLine | Alert) else 0)
