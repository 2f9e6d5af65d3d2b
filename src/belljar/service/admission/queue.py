"""When it is whose turn: what may run at once, and who waits.

A run takes a place. It gets one if fewer than `max_containers` run, and its CPUs and memory still fit; otherwise it
waits. Callers take turns, each with its own oldest run, so that a hundred of one are one step for another; who has all
the places it may have is passed over, and one with a key never has the last quarter of them. Apart from that nobody
overtakes: a large run that waits for room gets it, since those before it end. A run that would be alone is never kept
waiting, however large.

Memory is looked up (what the host and our own control group have left), not added up, since few guests use what they
may; only runs and sessions of the last second count in full, since what they will use does not show yet. It is looked
up when a place is asked for or given back, and each half second while somebody waits.

All of it happens in one event loop, between awaits: there is nothing to lock.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from belljar.core import errors
from belljar.core.settings import Settings
from belljar.protocol.records import Caller
from belljar.service.admission.memory import free_memory
from belljar.service.admission.rates import Rate, Rates

RECHECK = 0.5  # seconds between two looks while somebody waits
LOOK = 0.1  # seconds that a look at the memory counts, and one at a long queue: it may cost a millisecond
FEW = 20  # who wait: their positions are always exact
YOUNG = 1.0  # seconds in which a run is taken to use no memory yet
_WEIGHT = 0.2  # of the latest run in the average

OnPosition = Callable[[int], None]


class Ticket:
    """One run that waits for a place, has one, or was refused."""

    def __init__(self, caller: Caller, cpus: float, memory: int, on_position: OnPosition | None, asked: float) -> None:
        self.caller: Caller = caller
        self.cpus: float = cpus
        self.memory: int = memory
        self.on_position: OnPosition | None = on_position
        self.asked: float = asked
        self.position: int | None = None
        self.since: float | None = None  # when it got its place
        self.refusal: Exception | None = None
        self.settled: anyio.Event | None = None  # somebody waits for it

    @property
    def has_place(self) -> bool:
        """Whether its run may begin."""
        return self.since is not None

    @property
    def waited(self) -> float:
        """Seconds between its question and its place."""
        return 0.0 if self.since is None else self.since - self.asked

    def admit(self, at: float) -> None:
        """Gives it its place."""
        self.since, self.position = at, None
        self._settle()

    def refuse(self, why: Exception) -> None:
        """Says that it gets none."""
        self.refusal = why
        self._settle()

    def _settle(self) -> None:
        if self.settled is not None:
            self.settled.set()


class Admission:
    """`memory` says how many bytes are left (None: nobody knows, and it is not looked at), `clock` counts seconds."""

    def __init__(
        self,
        settings: Settings,
        *,
        memory: Callable[[], int | None] = free_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = settings.service
        self._most = settings.max_containers
        self._cpus = settings.service.cpu_overcommit * _cpus()
        self._memory, self._clock = memory, clock
        self._rates = Rates(clock)
        self._lines: dict[str, deque[Ticket]] = {}  # who waits, by caller; the caller whose turn it is comes first
        self._running: dict[str, set[Ticket]] = {}  # the same for those with a place
        self._seen: tuple[float, int | None] = (-math.inf, None)  # the last look at the memory
        self._numbered = -math.inf  # when those who wait were last told where
        self._average = 1.0  # seconds that a run takes
        self.draining: bool = False
        self._kept: deque[tuple[float, int]] = deque()  # when boxes of sessions were opened, and what they may use
        self.held = 0  # boxes that sessions keep open: their turns (no CPUs, no memory of their own) need no place

    @property
    def running(self) -> int:
        return sum(map(len, self._running.values()))

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    def drain(self) -> None:
        """From now on nobody gets a place, and whoever waits is told so. What runs goes on."""
        self.draining = True
        for line in self._lines.values():
            for ticket in line:
                ticket.refuse(self._going_away())
        self._lines.clear()

    @asynccontextmanager
    async def place(
        self, caller: Caller, *, cpus: float, memory: int, on_position: OnPosition | None = None
    ) -> AsyncIterator[None]:
        """Gives the caller a place while the block runs; for what is given and raised, see `ask` and `wait`."""
        ticket = self.ask(caller, cpus=cpus, memory=memory, on_position=on_position)
        try:
            await self.wait(ticket)
            yield
        finally:  # also of a place that was given at the moment of a cancellation
            self.leave(ticket)

    def ask(self, caller: Caller, *, cpus: float, memory: int, on_position: OnPosition | None = None) -> Ticket:
        """Asks for a place, at once or in the queue. What this returns is to be given to `leave`, however it goes.

        Args:
            caller: Whose quotas count.
            cpus: That it takes; none: it has its place already, as the turns of sessions do.
            memory: Bytes that it may use.
            on_position: Called with its position in the queue whenever that changes; it must not wait.

        Raises:
            Busy: 429: too much of this caller; 503: too much of all, or the service is about to end.
        """
        if self.draining:
            raise self._going_away()
        self._count(caller)
        ticket = Ticket(caller, cpus, memory, on_position, self._clock())
        try:
            self._enqueue(ticket)
            if ticket.refusal is not None:
                raise ticket.refusal
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    async def wait(self, ticket: Ticket) -> None:
        """Returns when a ticket has its place.

        Raises:
            Busy: It lost its turn to others, or the service is about to end.
        """
        while not ticket.has_place and ticket.refusal is None:
            ticket.settled = anyio.Event()
            with anyio.move_on_after(RECHECK) as late:
                await ticket.settled.wait()
            if late.cancelled_caught:
                self._admit()
                self._renumber()
        if ticket.refusal is not None:
            raise ticket.refusal

    def keep(self, memory: int) -> None:
        """Counts the memory of a box that a session is about to keep; alone, it may be of any size.

        Args:
            memory: bytes that it may use, its files among them.

        Raises:
            Busy: 503: there is not that much.
        """
        if (self.running or self.held) and not self._has_memory(memory):
            raise errors.Busy("there is no memory left for another session", retry_after=RECHECK * 10, status=503)
        self._kept.append((self._clock(), memory))

    # --- in and out --------------------------------------------------------------------------

    async def count(self, caller: Caller) -> None:
        """One more request of this caller, or `Busy` 429."""
        self._count(caller)

    def _count(self, caller: Caller) -> None:
        rate = Rate.parse(caller.rate or self._service.rate)
        if wait := self._rates.hit(caller.name, rate):
            most = f"more than {rate.amount} runs in {rate.seconds} seconds"
            again = _seconds(min(wait, rate.seconds))  # who has used up all of it at once may be told so twice
            raise errors.Busy(most, retry_after=again, fix="ask less often")

    def _enqueue(self, ticket: Ticket) -> None:
        self._lines.setdefault(ticket.caller.name, deque()).append(ticket)
        self._admit()
        if self.waiting > self._service.queue:
            self._shorten(ticket)
        self._renumber()
        if ticket.since is None and ticket.position is None and ticket.refusal is None:
            _report_position(ticket, self.waiting)  # at most

    def _shorten(self, latest: Ticket) -> None:
        """The queue is full: whoever has most in it loses their latest, so that no one caller can shut out another."""
        longest = max(self._lines.values(), key=len)
        own = self._lines[latest.caller.name]
        victim = own if len(own) == len(longest) else longest
        ticket = victim.pop()
        if not victim:
            del self._lines[ticket.caller.name]
        retry = _seconds(self._average * (self.waiting + 1) / self._most)
        if ticket is not latest:
            ticket.refuse(errors.Busy("the queue is full, and most of it is yours", retry_after=retry))
        elif self._has_all(ticket.caller):
            most = self._most_of(ticket.caller)
            ticket.refuse(errors.Busy(f"{most} runs of yours are under way, and no more can wait", retry_after=retry))
        else:
            ticket.refuse(errors.Busy("the queue is full", retry_after=retry, status=503))

    def leave(self, ticket: Ticket) -> None:
        """Gives a place back, or leaves the queue."""
        name = ticket.caller.name
        if ticket.since is not None:
            self._average += _WEIGHT * (self._clock() - ticket.since - self._average)
            self._running[name].discard(ticket)
            if not self._running[name]:
                del self._running[name]
        elif ticket in self._lines.get(name, ()):
            self._lines[name].remove(ticket)
            if not self._lines[name]:
                del self._lines[name]
        self._admit()
        self._renumber()

    def _going_away(self) -> errors.Busy:
        retry = _seconds(self._service.drain)
        return errors.Busy("this service is about to end", retry_after=retry, status=503, fix="try again, or elsewhere")

    # --- whose turn it is ----------------------------------------------------------------------

    def _admit(self) -> None:
        before = self.waiting
        while (ticket := self._next()) is not None and self._fits(ticket):
            name = ticket.caller.name
            line = self._lines.pop(name)
            line.popleft()
            if line:
                self._lines[name] = line  # at the end: the others come first now
            self._running.setdefault(name, set()).add(ticket)
            ticket.admit(self._clock())
        if self.waiting != before:
            self._renumber()

    def _next(self) -> Ticket | None:
        return next((line[0] for line in self._lines.values() if not self._has_all(line[0].caller)), None)

    def _has_all(self, caller: Caller) -> bool:
        return len(self._running.get(caller.name, ())) >= self._most_of(caller)

    def _most_of(self, caller: Caller) -> float:
        """How many places a caller may have. From one with a key a quarter of all is kept for somebody else."""
        own = caller.concurrency or self._service.concurrency or math.inf
        return min(own, self._most - self._most // 4) if caller.key else own

    def _fits(self, ticket: Ticket) -> bool:
        running = [other for line in self._running.values() for other in line if other.cpus]
        if not running or not ticket.cpus:
            return True
        if len(running) + self.held >= self._most or sum(other.cpus for other in running) + ticket.cpus > self._cpus:
            return False
        return self._has_memory(ticket.memory)

    def _has_memory(self, memory: int) -> bool:
        """Whether so many bytes are left, with all that those of the last second may use."""
        now = self._clock()
        if now - self._seen[0] >= LOOK:
            self._seen = now, self._memory()
        left = self._seen[1]
        if left is None:
            return True
        while self._kept and now - self._kept[0][0] >= YOUNG:
            self._kept.popleft()
        running = (other for line in self._running.values() for other in line if other.cpus)
        unspent = sum(other.memory for other in running if other.since is not None and now - other.since < YOUNG)
        unspent += sum(kept for _, kept in self._kept)
        return memory + unspent + self._service.memory_headroom <= left

    def _renumber(self) -> None:
        """Positions as if every caller could go on: who has all its places is passed over when it comes to it. Many who
        wait are told now and then, not at each step of each: that would be most of what we do."""
        now = self._clock()
        if self.waiting > FEW and now - self._numbered < LOOK:
            return
        self._numbered = now
        number = 0
        for turn in range(max(map(len, self._lines.values()), default=0)):
            for line in list(self._lines.values()):
                if turn < len(line):
                    number += 1
                    _report_position(line[turn], number)


def _report_position(ticket: Ticket, number: int) -> None:
    if ticket.position == number:
        return
    ticket.position = number
    if ticket.on_position is None:
        return
    try:
        ticket.on_position(number)
    except Exception as error:  # it is that run's trouble, not of the one whose turn made it move
        ticket.refuse(error)


def _seconds(wait: float) -> float:
    return float(max(1, math.ceil(wait)))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
