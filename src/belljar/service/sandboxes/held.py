"""One living sandbox that is held open for its caller, to the end of its time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import anyio

from belljar.core import errors
from belljar.core.lasting import BoxMark
from belljar.living.interpreter import AsyncBoxInterpreter
from belljar.living.machine import LivingMachine
from belljar.protocol.living import SandboxRecord
from belljar.protocol.records import SessionRecord
from belljar.sandbox import AsyncSandbox
from belljar.service.sandboxes.again import Again
from belljar.service.sandboxes.ended import EndedSandboxes
from belljar.service.sessions import Grant, Held

_END_RECORD_SECONDS = 5.0


class HeldSandbox(Held):
    """A living sandbox that is open.

    Attributes:
        box: the sandbox.
        interpreters: those that are open, by id.
        opening: how many more are being opened.
        key: the id of the key by which it was opened; empty: there was none.
        idle_seconds: without use, after which it ends; None: it does not.
    """

    def __init__(
        self, box: AsyncSandbox, record: SessionRecord, grant: Grant, memory: int, *, idle: float | None,
        ended: EndedSandboxes,
    ) -> None:  # fmt: skip
        """Nothing is opened yet.

        Args:
            box: the sandbox.
            record: as it is told among sessions; it expires when the longest life that it may have is over.
            grant: the folder of the host that it was granted.
            memory: bytes that it may take.
            idle: seconds without use after which it ends.
            ended: where it is written down.
        """
        super().__init__(box, record, math.inf, grant, memory)
        self.box: AsyncSandbox = box
        self.key: str = ""
        self.interpreters: dict[str, AsyncBoxInterpreter] = {}
        self.opening: int = 0
        self.idle_seconds: float | None = idle
        self._ended = ended
        self._backend = ""
        self._leaving = False
        self._left: tuple[SandboxRecord, LivingMachine] | None = None  # as it was when the service was about to end

    @property
    def owner(self) -> str:
        """Whose it is, and by which credential."""
        return f"{self.record.caller}\0{self.key}"

    @property
    def began(self) -> bool:
        """Whether it was opened."""
        return bool(self._backend)

    @property
    def ended(self) -> str:
        """Says how it ended; empty while it lives."""
        return self.box.ended if self.box._machine is not None else self.reason or "it is not open"

    @property
    def machine(self) -> LivingMachine:
        """The open sandbox, or the reason why there is none, raised."""
        return self.box._alive()

    @property
    def end(self) -> float:
        """When its time is over at the latest, whoever extends it: in seconds since 1970."""
        return self.record.created + self.lifetime

    def told(self) -> SandboxRecord:
        """Returns it as its caller is told of it."""
        box = self.box
        ended = self.ended
        living = not ended
        capabilities = box.lease.capabilities if living else None
        self._backend = capabilities.backend if capabilities else self._backend
        life = box._request.living
        return SandboxRecord(
            id=self.record.id, caller=self.record.caller, backend=self._backend,
            state="paused" if living and box.paused else "running" if living else "ended",
            reason=ended, created=self.record.created, expires=self._expires(),
            idle=self.idle_seconds, labels=dict(box.labels), home=box.home, user=life.user if life else "user",
            features=tuple(sorted(capabilities.living or ())) if capabilities else (),
            interpreters=tuple(sorted(capabilities.sessions)) if capabilities else (),
            left_out=box.left_out if living else (), disk=box.lease.plan.limits.disk if living else 0,
            workspace=self.grant[0] is not None,
        )  # fmt: skip

    def _expires(self) -> float:
        """When it ends by itself; of one that is paused because its time was over, the end of the longest life."""
        box = self.box
        expires = box.expires if box._machine is not None and not box.ended else None
        return self.end if expires is None or (box.paused and expires < time.time()) else min(expires, self.end)

    def make_room(self, most: int) -> None:
        """Forgets processes that have ended, the oldest first, until the outputs of all hold no more than `most` bytes.

        Raises:
            Busy: those that run hold more.
        """
        processes = self.machine.processes
        held = sum(process.log.held for process in processes.values())
        for process in [one for one in processes.values() if not one.running]:
            if held <= most:
                return
            held -= process.log.held
            del processes[process.id]
        if held > most:
            raise errors.Busy(
                f"the outputs of this sandbox's processes hold {held} bytes, and may hold {most}", retry_after=5,
                fix="end some of them",
            )  # fmt: skip

    def in_use(self) -> AbstractContextManager[None]:
        """Says that it is used while the block runs, for longer than one call; one that is paused is used by nobody."""
        machine = self.box._machine
        return nullcontext() if machine is None or machine.paused else machine.in_use()

    def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now.

        Raises:
            PolicyDenied: that is beyond the longest life that it may have.
        """
        left = self.end - time.time()
        if seconds > left:
            raise over_lifetime(seconds, max(0.0, left))
        self.box.extend(seconds)

    async def wait_for_end(self) -> None:
        """Waits until somebody closes it, its time is over, or the longest life that it may have is."""
        machine = self.box._machine
        assert machine is not None
        self.told()  # while its backend is known
        if self._leaving:  # the service was to end before this was open
            self.leave()

        async def until_over() -> None:
            await machine.over.wait()
            self.over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_over)
            tasks.start_soon(self._note_changes, machine)
            await super().wait_for_end()
            tasks.cancel_scope.cancel()
        self.reason: str = machine.ended or self.reason or "the longest life that it may have was over"

    async def note(self) -> None:
        """Writes it down as it is now."""
        machine = self.box._machine
        if machine is not None and not machine.ended:
            await self._ended.began(self.told(), self._again(machine.mark()))

    async def _note_changes(self, machine: LivingMachine) -> None:
        while True:
            await machine.changed.wait()
            with suppress(errors.SessionEnded):
                await self.note()

    def _again(self, mark: BoxMark | None) -> Mapping[str, Any] | None:
        """What the next server needs to go on with it; None: it ends with this one."""
        lasting = self.box.lasting
        if lasting is None or mark is None:
            return None
        again = Again(
            request=self.box._request, mark=mark, latest=self.end, absence=lasting.absence, folder=self.grant[0],
            writable=self.grant[1], memory=self.memory, idle=self.idle_seconds,
        )  # fmt: skip
        return again.model_dump(mode="json", exclude_unset=True)

    def leave(self) -> None:
        """The service is about to end: has it go on, if it can."""
        machine = self.box._machine
        self._leaving = True
        if self.box.lasting is not None and machine is not None and not machine.ended:
            self._left = self.told(), machine
            machine.leaving = True

    async def settle(self) -> None:
        """Writes down how it ended, if it ever began, or that it goes on without us."""
        if not self.began:
            return
        with anyio.move_on_after(_END_RECORD_SECONDS, shield=True):
            if self._left is not None and (again := self._again(self._left[1].left)):
                await self._ended.began(self._left[0], again, left=True)
            else:
                await self._ended.ended(self.told().model_copy(update={"expires": None}))


def over_lifetime(seconds: float, left: float) -> errors.PolicyDenied:
    """Returns the refusal of a time beyond the longest life that a sandbox may have."""
    return errors.PolicyDenied(
        f"expires: {seconds:g} seconds are over what is left of the longest life, {left:.0f}",
        fix="ask for less, or have the administrator raise service.living_lifetime",
        context={"setting": "service.living_lifetime"},
    )
