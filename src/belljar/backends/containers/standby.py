"""A started container that awaits its command, with a program of ours in it that puts files in place.

A run starts one and gives it its command at once. The pool starts them beforehand, so that a run only has to give the
command.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from belljar.backends.containers import archive as docker_files
from belljar.backends.containers import inside, spec
from belljar.core import errors
from belljar.host import cgroups, process
from belljar.host.docker_api import ProgramStreams, asking
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

_MOVE_SECONDS = 60.0  # for files to go in
_KILL_SECONDS = 15.0  # for a container to die
_PATIENCE_SECONDS = 1.0  # that an engine has to kill it
_SIGNAL_SECONDS = 2.0  # that an engine has to start the program that sends a signal inside
_TERMINATE = ("/bin/sh", "-c", "kill -s TERM -- -1")  # all that may be signalled, but for the first and itself
_LOOK_SECONDS = 0.02  # between looks at its processes
_COMPLAINT_BYTES = 4096  # kept of what a program inside complains of


class Standby:
    """One container, from its creation to its end. Whoever made it removes it."""

    def __init__(self, container: DockerContainer, name: str, user: str) -> None:
        self.container = container
        self.name = name
        self._user = user  # uid:gid of the guest
        self.first: int = 0  # of its processes, where this process can see them
        self.up: bool = False
        self.image: str = ""  # the id
        self.group: cgroups.Group | None = None  # where this process can see it
        self.streams: ProgramStreams
        self._keeper: ProgramStreams | None = None
        self._open = AsyncExitStack()

    @classmethod
    async def create(cls, client: Docker, name: str, body: Mapping[str, Any]) -> Standby:
        """Creates a container from a request body; it is not started yet."""
        with anyio.CancelScope(shield=True):  # half a creation would be a container that nobody knows of
            async with asking("the container could not be created", errors.StartFailed):
                container = await client.containers.create(body, name=name)
        return cls(container, name, str(body["User"]))

    async def start(self, *, local: bool, attached: bool = True) -> None:
        """Starts the container, which then awaits its command.

        Args:
            local: its processes are on this machine.
            attached: it gets its command by its stdin, and ends with it.
        """
        if attached:
            stream = self.container.attach(stdin=True, stdout=True, stderr=True)
            self.streams = await self._open.enter_async_context(ProgramStreams.open(stream, "the container's streams"))
        async with asking("the container could not be started", errors.StartFailed):
            await self.container.start()
            facts = await self.container.show()
        self.note(facts, local=local)

    def note(self, facts: Mapping[str, Any], *, local: bool) -> None:
        """Notes what the engine says of the container, which runs."""
        self.image = str(facts["Image"])
        if local:
            self.first = int(facts["State"]["Pid"])
            self.group = cgroups.group_of(self.first, str(self.container.id))
        self.up = True

    async def call_keeper(self, folder: str) -> None:
        """Starts the program that will lay files into a folder, and waits for them."""
        keeper, argv = f"{spec.KEEPER}:{spec.KEEPER}", ["/bin/sh", "-c", docker_files.LAY_AND_SAY, folder]
        async with asking("the input files", seconds=_MOVE_SECONDS):
            call = await self.container.exec(argv, user=keeper, stdin=True, workdir="/")
        self._keeper = await self._open.enter_async_context(
            ProgramStreams.open(call.start(detach=False), "the input files")
        )

    async def lay(self, archive: bytes, folder: str) -> None:
        """Unpacks an archive into a folder; returns when all is in place."""
        if self._keeper is None:
            await self.call_keeper(folder)
        assert self._keeper is not None
        complaint = bytearray()
        with lone_errors():
            async with asking("the input files", seconds=_MOVE_SECONDS), anyio.create_task_group() as tasks:
                tasks.start_soon(self._keeper.supply, archive)
                async for name, data in self._keeper.parts():
                    if name == "stdout":
                        tasks.cancel_scope.cancel()
                        return
                    complaint += data[: _COMPLAINT_BYTES - len(complaint)]
                tasks.cancel_scope.cancel()
        said = complaint.decode("utf-8", "replace").strip().splitlines() or ["the keeper ended early"]
        raise errors.ExecutionFailed(f"the input files could not be moved: {said[-1]}")

    def holds(self, claim: ExitStack) -> None:
        """Keeps something claimed until the container is closed."""
        self._open.enter_context(claim)

    @property
    def alive(self) -> bool:
        """As far as can be told without asking."""
        return self.streams.connected and (self._keeper is None or self._keeper.connected)

    async def terminate(self, *, own_kernel: bool) -> None:
        """Sends SIGTERM to all processes of the guest's; who cannot be reached will be killed soon.

        Args:
            own_kernel: The processes that this machine sees are those of a kernel in user space, not the guest's.
        """
        # With the first one all the others would be gone at once. Without root, nobody hears us.
        if self.group and not own_kernel and process.terminate(self.group.pids, spare=(self.first,)):
            return
        with suppress(errors.BelljarError), anyio.move_on_after(_SIGNAL_SECONDS):
            await inside.execute(self.container, _TERMINATE, int(self._user.partition(":")[0]), b"", strict=False)

    async def kill(self) -> bool:
        """Ends all that runs in the container, and returns whether it is known to be dead.

        The engine is told. Where the container's processes can be seen from here, nobody waits for an engine that is
        busy: what lives after a second is killed by us, and when nothing does, the container is dead, whatever the
        engine knows of it. (Docker's shim hears up to a minute late that a fork bomb on gVisor has died, and answers
        no question about that container meanwhile.)
        """
        dead = False

        async def first(way: Callable[[], Awaitable[bool]]) -> None:
            nonlocal dead
            dead = await way() or dead
            if dead:
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first, self._killed_by_engine)
            if self.group:
                tasks.start_soon(first, partial(self._empty, self.group))
        return dead

    async def _killed_by_engine(self) -> bool:
        """What the engine says does not matter, as long as it says something: the container will be removed."""
        try:
            async with asking("kill", seconds=_KILL_SECONDS):
                await self.container.kill(signal="KILL")
        except errors.BackendTimeout:
            return False
        except errors.BelljarError:
            pass
        return True

    async def _empty(self, group: cgroups.Group) -> bool:
        """Waits until nothing runs in the group, and kills what the engine leaves alive there."""
        deadline = anyio.current_time() + _KILL_SECONDS
        patience = anyio.current_time() + _PATIENCE_SECONDS
        while not group.is_empty() and anyio.current_time() < deadline:
            if anyio.current_time() > patience:
                group.kill()
            await anyio.sleep(_LOOK_SECONDS)
        return group.is_empty()

    async def close(self) -> None:
        """Hangs up. Whoever made the container removes it."""
        with anyio.CancelScope(shield=True):
            await self._open.aclose()
