"""A living sandbox of the native backend: one machine for all its commands, which run side by side."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, TaskGroup

from belljar.backends.base import Emit
from belljar.backends.native import jail
from belljar.backends.native.box import NativeBox, NativeHost, rlimits
from belljar.backends.native.footprint import held_in_folders
from belljar.backends.native.holder import Holder, held
from belljar.backends.native.living import listing, walls
from belljar.backends.native.living.equipment import Equipment
from belljar.backends.native.living.run import NativeLivingJob, NativeLivingRun
from belljar.backends.native.living.unheard import UnheardStreams
from belljar.backends.native.run import NativeJob
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import Command, Plan
from belljar.core.process import BoxProcess
from belljar.core.request import Egress, Limits
from belljar.core.result import Result, Usage
from belljar.core.values import MIB, WORKSPACE
from belljar.host import cgroups, disk_image, files, mounted, process, procfs
from belljar.host.box_network import BoxNetwork
from belljar.host.box_tree import HostTree
from belljar.host.egress import guest
from belljar.host.loops import lone_errors

_HOLDER_LIMITS = Limits(memory=64 * MIB, pids=16)
_MEMORY_CHECK_SECONDS, _IDLE_CHECK_SECONDS = 0.02, 5.0  # while a command runs, and while none does


class NativeLivingBox(NativeBox):
    """One machine: its namespaces and its files live as long as the box does."""

    def __init__(self, host: NativeHost, plan: Plan, uid: int | None) -> None:
        super().__init__(host, plan, uid)
        self._runs: set[NativeLivingRun] = set()
        self._own_processes = 0  # of ours that are always in the machine, where there are no control groups
        self._first: Holder
        self._machine: walls.MachineSpec
        self._equipment: Equipment
        self._tasks: TaskGroup
        self._inside = -1  # /workspace, open
        self._unheard = UnheardStreams()
        self._way_out = False  # is there a way to the proxy?
        self._network: BoxNetwork
        self.tree: HostTree
        self.on_disk: bool = False  # whether its files are not memory

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Builds the machine, and keeps it while the block runs."""
        async with AsyncExitStack() as stack:
            self._group = self._host.group_to_keep(self.plan.limits, True)
            stack.push_async_callback(self._destroy, self._group)
            if self._group:
                self._group.bound(self.plan.limits)
            self._equipment = await anyio.to_thread.run_sync(
                Equipment.find, self._host.toolchains, self.plan, self.packages
            )
            self._machine = self._described()
            first = self._host.group_for(_HOLDER_LIMITS, None)
            stack.push_async_callback(self._destroy, first)
            with ExitStack() as texts:
                args, fds = walls.machine_arguments(self._machine, texts)
                opening = held(self._before_holder(first), self._host.bubblewrap, args, fds)
                self._first = await stack.enter_async_context(opening)
            await self._make_disk()
            root = stack.enter_context(files.opened(self._place))
            if self._machine.counted:
                self._limit_files(root)
            self._open_folders(root, stack)
            if self.on_disk and self._machine.home not in self._machine.writable:
                await self.tree.make_dir(self._machine.home)
            self._network = stack.enter_context(BoxNetwork.of(self._first.pid))
            stack.callback(self._unheard.close)
            stack.enter_context(lone_errors())
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._tasks.cancel_scope.cancel)
            await self.open_network()
            if self._group is None:
                self._own_processes = len(await anyio.to_thread.run_sync(listing.members, self._first.pid))
                self._tasks.start_soon(self._watch_memory)
            yield

    def _limit_files(self, root: int) -> None:
        try:
            mounted.limit_files(root, self.plan.limits.kept_inodes)
        except OSError as error:
            raise errors.StartFailed(f"the number of the sandbox's files cannot be limited: {error.strerror}") from None

    async def _make_disk(self) -> None:
        """Gives it a disk that is not memory, if the settings say so; `auto`: where that can be."""
        wanted, size = self._host.disk_backing, self.plan.limits.disk
        if wanted == "memory" or (wanted == "auto" and disk_image.why_not(self._host.state_dir, size)):
            return
        if why := disk_image.why_not(self._host.state_dir, size):
            raise errors.NotAvailable(
                f"disk: a sandbox's files cannot be kept on disk here: {why}", fix='set living.disk_backing to "auto"'
            )
        places = {f"{walls.PLACE}{folder}": mode for folder, mode in self._machine.on_disk.items()}
        await disk_image.mount_in(self._holder, self._host.state_dir, size, places, self.uid)
        self.on_disk = True

    async def _destroy(self, group: cgroups.Group | None) -> None:
        with anyio.CancelScope(shield=True):
            if group and not await anyio.to_thread.run_sync(group.destroy):
                raise errors.CleanupFailed("a process of the sandbox did not die", fix="look at the kernel's log")

    def _described(self) -> walls.MachineSpec:
        workspace = self.plan.workspace
        if workspace and self._lent:
            workspace = workspace.model_copy(update={"path": self._host.place})
        return walls.MachineSpec(
            bubblewrap=self._host.bubblewrap, limits=self.plan.limits, home=_home(self.plan.home),
            user=self.plan.user, workspace=workspace, grants=self._equipment.grants, files=dict(self.plan.files),
            links=self._equipment.links, binds=self._equipment.binds, counted=mounted.can_limit_files(),
        )  # fmt: skip

    def _open_folders(self, root: int, stack: AsyncExitStack) -> None:
        # By way of the machine, a granted one too: of a folder elsewhere bubblewrap could not mount a part in there.
        self._inside = stack.enter_context(files.below(root, WORKSPACE.lstrip("/")))
        if not self.plan.workspace:
            self._root = self._inside
        self._tmp = stack.enter_context(files.below(root, "tmp"))
        writable = self._machine.writable
        if self.plan.workspace and self.plan.workspace.write:
            writable = (*writable, WORKSPACE)
        self.tree = HostTree(root, writable, owner=self.uid)

    # --- running ---

    async def run(
        self, command: Command, emit: Emit, control: Control, note: Callable[[dict[str, Any]], None] | None = None
    ) -> Result:
        """Runs a command beside all others, to its end."""
        limits = command.limits or self.plan.limits
        holder = self._holder
        if "/" not in command.argv[0]:
            await self._host.toolchains.tool_for(command.argv[0], command.language)
        group = self._host.group_for(limits, self._group)  # last: from here on the run removes it, whatever happens
        job = NativeJob(
            id=self.id, jail=_NO_JAIL, prefix=rlimits(limits) if group is None else (), argv=self._words(command),
            stdin=command.stdin, limits=limits, bubblewrap=self._host.bubblewrap, uid=self.uid, group=group,
            around=self._group,
        )  # fmt: skip
        living = NativeLivingJob(
            self._machine, self._entry(command), holder, f"{self._place}/dev/pts/ptmx", command.pty,
            self._keep_reading, self._most_processes(1) + self._own_processes,
        )  # fmt: skip
        run = NativeLivingRun(job, living, emit, control)
        self._runs.add(run)
        try:
            self._allow_processes()
            result = await run.go()
        finally:
            self._runs.discard(run)
            self._allow_processes()
        if note:
            note(run.status)
        return result

    def _most_processes(self, more: int = 0) -> int:
        """How many processes may be in the machine: the guest's, and one of ours for each command."""
        return self.plan.limits.pids + len(self._runs) + more

    def _allow_processes(self) -> None:
        if self._group:
            with suppress(OSError):  # the machine is being closed
                self._group.allow(self._most_processes())

    async def _watch_memory(self) -> None:
        """Without control groups: adds up what the machine keeps in memory; over the limit its largest process ends."""
        while True:
            await anyio.sleep(_MEMORY_CHECK_SECONDS if self._runs else _IDLE_CHECK_SECONDS)
            if self._first.bubblewrap.ended():
                return
            if await anyio.to_thread.run_sync(self._used) > self.plan.limits.memory:
                largest = await anyio.to_thread.run_sync(listing.largest, self._first.pid, self._host.bubblewrap)
                if largest is not None and not any(run.end_of_memory(largest) for run in self._runs):
                    listing.end(largest, self._first.pid)

    def _words(self, command: Command) -> Sequence[str]:
        words = self._argv(command.argv)
        return [process.system_program("setsid"), "--ctty", *words] if command.pty else words

    def _entry(self, command: Command) -> walls.EntrySpec:
        online = guest.ENV if self.network.proxied else {}
        terminal = {"TERM": "xterm-256color"} if command.pty else {}
        return walls.EntrySpec(
            env={**self._equipment.env, **online, **terminal, **command.env},
            cwd=posixpath.join(WORKSPACE, command.cwd),
            files=dict(self.plan.files) | dict(command.files) if command.files else {},
            terminal=command.pty is not None, granted=self._inside, uid=self.uid,
        )  # fmt: skip

    def _keep_reading(self, fd: int) -> None:
        """Reads what goes on to be written to the streams of a command that has ended; nobody hears it."""
        self._unheard.add(fd, self._tasks)

    async def measure(self) -> Usage | None:
        """Returns what the whole box uses now."""
        return await anyio.to_thread.run_sync(self._measure, abandon_on_cancel=True)

    def _measure(self) -> Usage | None:
        if self._group:
            figures = procfs.of_group(self._group)
        else:
            figures = procfs.of_processes(listing.members(self._holder), self._used())
        if figures is None or self.network.proxied:
            return figures
        rx, tx = procfs.network(self._holder)
        return figures._replace(rx=rx, tx=tx)

    def _used(self) -> int:
        """Bytes of memory that all processes and files of the box take."""
        holder = self._first.pid  # which may be ending: then there is nothing to be found
        place = f"/proc/{holder}/root{walls.PLACE}"
        return procfs.private_memory(listing.members(holder)) + held_in_folders((place, f"{place}/dev/shm"))

    @property
    def _holder(self) -> int:
        """The machine's first process.

        Raises:
            StartFailed: it has ended; some process of the host may have its number by now.
        """
        if self._first.bubblewrap.ended():
            raise errors.StartFailed("the sandbox has ended: its first process is gone", fix="open another one")
        return self._first.pid

    @property
    def _place(self) -> str:
        """The root of the machine, as the host comes to it."""
        return f"/proc/{self._holder}/root{walls.PLACE}"

    # --- the machine ---

    @property
    def own_folders(self) -> tuple[str, ...]:
        """The folders that are the guest's own; /run is not among them, as it tells of what runs now."""
        return tuple(folder for folder in self._machine.writable if folder != "/run")

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the box now."""
        return await anyio.to_thread.run_sync(listing.processes, self._holder, self._host.bubblewrap)

    async def listens(self, port: int) -> bool:
        """Whether something in the box listens on a TCP port."""
        self._holder  # noqa: B018  (which raises if the machine has ended)
        return await anyio.to_thread.run_sync(self._network.listens, port)

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the box's own loopback."""
        self._holder  # noqa: B018  (which raises if the machine has ended)
        return await self._network.dial(port)

    async def pause(self) -> None:
        """Stops all processes of the box where they are."""
        await anyio.to_thread.run_sync(self._stoppable().freeze)

    async def resume(self) -> None:
        """Lets them go on."""
        await anyio.to_thread.run_sync(self._stoppable().thaw)

    def _stoppable(self) -> cgroups.Group:
        if self._group is None:
            raise errors.NotAvailable(
                "pause: this system gives us no control group that could stop a sandbox",
                fix="run Belljar as root, or delegate a control group to it: `belljar doctor` says how",
            )
        return self._group

    async def change_network(self, allowed: Egress) -> None:
        """Changes what its programs may reach, at once; those that run without a way out are told of none."""
        self.network.change(allowed)
        await self.open_network()

    async def open_network(self) -> None:
        """Opens the way to the proxy, once there is something that may be reached."""
        if self.network.proxied and not self._way_out:
            self._way_out = True
            self._tasks.start_soon(self._proxy(self._deny).serve, await self._network.listener(guest.PORT))

    async def _deny(self, words: str) -> None:
        """Nothing says which command's connection it was: all that run hear of it."""
        for run in tuple(self._runs):
            await run.deny(words)


_NO_JAIL = jail.Jail({}, "/", 0, {}, "", (), None, jail.Space())


def _home(path: str) -> str:
    """The home as a plain path.

    Raises:
        InvalidRequest: it would hide a part of the system, or is none that can be made.
    """
    home = posixpath.normpath(path)
    taken = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/dev", "/inputs", "/sys")
    if not home.startswith("/") or home.startswith("//") or f"/{home.split('/')[1]}" in taken or home in ("/", "/var"):
        raise errors.InvalidRequest(f"home: {path} cannot be a home", fix="take /home/NAME, or /root")
    return home
