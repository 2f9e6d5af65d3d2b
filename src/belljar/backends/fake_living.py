"""Living sandboxes of the fake: programs side by side, ports, pause, and files by whole paths."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from belljar.backends.fake import Fake, FakeBox, FakeProcess, Program, _ending_of
from belljar.backends.fake_tree import FakeTree
from belljar.backends.outcome import Outcome
from belljar.control.control import Control, StartedGuest
from belljar.core.plan import Command, Plan
from belljar.core.process import BoxProcess
from belljar.core.result import EventKind, File, Status
from belljar.core.values import WORKSPACE
from belljar.host.loops import lone_errors

_PIECES = 16  # that wait in a connection


class FakeLivingBox(FakeBox):
    """One pretended machine."""

    def __init__(self, backend: Fake, plan: Plan, tasks: TaskGroup) -> None:
        super().__init__(backend, plan)
        self.tree: FakeTree = FakeTree(self)
        self._tasks = tasks
        self._running: dict[int, tuple[FakeProcess, str]] = {}
        self._going_on = anyio.Event()
        self._going_on.set()

    @classmethod
    @asynccontextmanager
    async def opened(cls, backend: Fake, plan: Plan) -> AsyncIterator[FakeLivingBox]:
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                yield cls(backend, plan, tasks)
                tasks.cancel_scope.cancel()

    @property
    def own_folders(self) -> tuple[str, ...]:
        return (self.plan.home, WORKSPACE)

    @property
    def writable(self) -> tuple[str, ...]:
        return (*self.own_folders, "/tmp", "/var/tmp", "/run")

    async def _play(self, process: FakeProcess, program: Program, control: Control) -> tuple[int | None, Status | None]:
        words = " ".join(process.argv)
        self._running[process.pid] = (process, words)
        control.begin(StartedGuest(process.pid, process.receive_signal, process.resize))
        try:
            return await super()._play(process, program, control)
        finally:
            del self._running[process.pid]

    def alive(self, process: FakeProcess) -> Sequence[FakeProcess]:
        return [one for one, _ in self._running.values()]

    def chmod(self, where: str, mode: int) -> None:
        self.tree.modes[where] = mode

    def leave(self, parent: FakeProcess, program: Program, command: str) -> None:
        async def unheard(kind: EventKind, text: str) -> None:
            pass

        async def live() -> None:
            outcome = Outcome(self.id, self.plan.limits, unheard, keep_output=False)
            asked = Command(argv=(command,))
            process = FakeProcess(self, asked, self.plan.limits, outcome, Control())
            self._running[process.pid] = (process, command)

            async def die() -> None:
                await process.dying()
                tasks.cancel_scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(die)
                await _ending_of(process, program)
                tasks.cancel_scope.cancel()
            del self._running[process.pid]
            self.ports = {port: held for port, held in self.ports.items() if held[0] is not process}

        self._tasks.start_soon(live)

    def store(self, where: str, file: File) -> None:
        super().store(where, file)
        self.tree.stored(where, file)

    async def processes(self) -> tuple[BoxProcess, ...]:
        return tuple(
            BoxProcess(pid=pid, command=words, started=process.started, memory=process.figures.memory)
            for pid, (process, words) in self._running.items()
        )

    async def listens(self, port: int) -> bool:
        return port in self.ports

    async def dial(self, port: int) -> ByteStream:
        if port not in self.ports:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        here, there = _pair()

        async def serve() -> None:
            try:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
                    await self.ports[port][1](there)
            finally:
                there.close()

        self._tasks.start_soon(serve)
        return here

    async def pause(self) -> None:
        self._going_on = anyio.Event()

    async def resume(self) -> None:
        self._going_on.set()

    async def going_on(self) -> None:
        await self._going_on.wait()


class FakeStream(ByteStream):
    """One end of a pretended connection."""

    def __init__(self, incoming: MemoryObjectReceiveStream[bytes], outgoing: MemoryObjectSendStream[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._rest = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        self._rest = self._rest or await self._incoming.receive()
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return piece

    async def send(self, item: bytes) -> None:
        if item:
            await self._outgoing.send(bytes(item))

    async def send_eof(self) -> None:
        await self._outgoing.aclose()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes both directions."""
        self._outgoing.close()
        self._incoming.close()


def _pair() -> tuple[FakeStream, FakeStream]:
    out, theirs_in = anyio.create_memory_object_stream[bytes](_PIECES)
    theirs_out, into = anyio.create_memory_object_stream[bytes](_PIECES)
    return FakeStream(into, out), FakeStream(theirs_in, theirs_out)
