"""One sandbox of the native backend: its files, and what it was granted.

A run is one bubblewrap. A box whose files are kept also has a holder: a process that keeps its writable folders mounted
in a namespace of its own. Nothing is ever mounted on the host, and when Belljar dies the kernel ends guest and holder
with it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends import inputs
from belljar.backends.base import Emit
from belljar.backends.native import jail
from belljar.backends.native.holder import held
from belljar.backends.native.run import NativeJob, NativeRun
from belljar.backends.native.toolchains import Grant, Tool, Toolchains
from belljar.backends.pipe_interpreter import PipeInterpreter
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import Command, Plan
from belljar.core.request import Egress, Limits, Workspace
from belljar.core.result import Collected, Entry, File, Result, Usage
from belljar.core.settings import DiskBacking
from belljar.core.values import WORKSPACE
from belljar.host import box_files, cgroups, files, lending, process
from belljar.host.egress import guest
from belljar.host.egress.access import NetworkAccess, Outside
from belljar.host.egress.judgement import Told
from belljar.host.egress.proxy import Proxy
from belljar.host.lending import LentFolder

_GUEST_ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "guest", "LOGNAME": "guest", "LANG": "C.UTF-8"}
_HOLDER_PIDS = 16
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class NativeHost(NamedTuple):
    """What a box needs of the backend that opened it."""

    bubblewrap: str
    state_dir: Path
    place: str
    toolchains: Toolchains
    group_for: Callable[[Limits, cgroups.Group | None], cgroups.Group | None]  # limits, and the group to be inside of
    group_to_keep: Callable[[Limits, bool], cgroups.Group | None]  # limits, and whether it may be paused
    outside: Outside  # what the administrator says of the way out
    disk_backing: DiskBacking = "memory"  # of living sandboxes


class NativeBox:
    """One sandbox of the native backend. `packages` are those of the host that it may read."""

    def __init__(self, host: NativeHost, plan: Plan, uid: int | None) -> None:
        self.id: str = plan.id
        self.plan = plan
        self.uid = uid
        self.packages: Grant | None = None
        self.network: NetworkAccess = NetworkAccess(plan.egress, host.outside)
        self._host = host
        self._space = jail.Space()
        self._root = self._tmp = -1
        self._lent: LentFolder | None = None
        self._one_at_a_time = anyio.Lock()
        self._current: NativeRun | None = None
        self._group: cgroups.Group | None = None  # of the box, around those of its commands

    @asynccontextmanager
    async def granted(self, workspace: Workspace) -> AsyncIterator[None]:
        """Opens the granted folder for us and, if it belongs to root, lends it to the guest's uid."""
        with ExitStack() as stack:
            self._root, self._lent = await anyio.to_thread.run_sync(
                lending.open_grant, workspace.path, self.uid, self._host.place, stack
            )
            try:
                yield
            finally:
                self._lent, self._root = None, -1

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Keeps /workspace and /tmp, and one control group for all that the box has in memory, while the block runs."""
        limits = self.plan.limits
        self._group = group = self._host.group_to_keep(limits, False)
        try:
            inner = self._host.group_for(limits.model_copy(update={"pids": _HOLDER_PIDS}), group) if group else None
            async with self._folders_held(inner):
                yield
        finally:
            self._group = None
            with anyio.CancelScope(shield=True):
                if group and not await anyio.to_thread.run_sync(group.destroy):
                    raise errors.CleanupFailed("a process of the sandbox did not die", fix="look at the kernel's log")

    @asynccontextmanager
    async def _folders_held(self, group: cgroups.Group | None) -> AsyncIterator[None]:
        """Starts the process that keeps /workspace and /tmp mounted, and opens both for us."""
        kept = "" if self.plan.workspace else self._host.place
        space = jail.Space(workspace=kept, tmp=str(self._host.state_dir / "tmp"))
        args = jail.holder_arguments(self.plan.limits, space)
        before = self._before_holder(group)
        async with held(before, self._host.bubblewrap, args) as holder:
            with ExitStack() as fds:
                self._space = space._replace(holder=holder.pid)
                inside = f"/proc/{holder.pid}/root"
                if kept:
                    self._root = fds.enter_context(files.opened(inside + kept))
                self._tmp = fds.enter_context(files.opened(inside + space.tmp))
                try:
                    yield
                finally:
                    self._space, self._tmp = jail.Space(), -1
                    self._root = self._root if self.plan.workspace else -1

    def _before_holder(self, group: cgroups.Group | None) -> list[str]:
        """The command line before a holder's bubblewrap."""
        join_files = group.join_files if group else ()
        return [*jail.unkillable(), *jail.launcher(join_files, self.uid, 0, self._namespace)]

    # --- files ---

    async def put(self, files_in: Sequence[File]) -> None:
        """Writes files into /workspace, as the guest would."""
        inputs.check_writable(self.plan, files_in)
        await anyio.to_thread.run_sync(lambda: box_files.put(self._folder(), files_in, owner=self.uid))

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file of /workspace as the guest would."""
        return inputs.reading(self.plan, path) or box_files.reading(self._folder(), path, owner=self.uid)

    async def get(self, patterns: Sequence[str]) -> Collected:
        """Reads the regular files of /workspace that match."""
        return await anyio.to_thread.run_sync(lambda: files.collect(self._folder(), tuple(patterns), owner=self.uid))

    async def figures(self, limit: int) -> Collected:
        """Reads the pictures that the last program left in /tmp."""
        return await anyio.to_thread.run_sync(lambda: box_files.figures(self._tmp, limit, owner=self.uid))

    def _folder(self) -> int:
        if self._root < 0:
            raise errors.ExecutionFailed("this sandbox keeps no files", fix="open it with keep_files")
        return self._root

    # --- running ---

    def interpreter(self, env: Mapping[str, str], lifetime: float, language: str = "python") -> PipeInterpreter:
        return PipeInterpreter(self, self.plan, env, lifetime, language)

    async def run(
        self, command: Command, emit: Emit, control: Control, note: Callable[[dict[str, Any]], None] | None = None
    ) -> Result:
        """Runs a command to its end; `note` is called with what bubblewrap told of the guest."""
        # One at a time: while a guest runs, it could swap a link under a name that bubblewrap is about to mount on.
        async with self._one_at_a_time:
            result, status = await self._run(command, emit, control)
            if note:
                note(status)
            return result

    async def _run(self, command: Command, emit: Emit, control: Control) -> tuple[Result, dict[str, Any]]:
        limits = command.limits or self.plan.limits
        tool = None
        if "/" not in command.argv[0]:
            tool = await self._host.toolchains.tool_for(command.argv[0], command.language)
        walls = self._jail(command, limits, tool)
        placeholders = await anyio.to_thread.run_sync(self._clear_the_way, walls) if self._space.holder else ()
        if self._group and limits.memory > self.plan.limits.memory:
            self._group.hold(limits.memory)
        group = self._host.group_for(limits, self._group)  # last: from here on the run removes it, whatever happens
        job = NativeJob(
            id=self.id, jail=walls, prefix=rlimits(limits) if group is None else (), argv=self._argv(command.argv),
            stdin=command.stdin, limits=limits, bubblewrap=self._host.bubblewrap, uid=self.uid, group=group,
            around=self._group, namespace="" if self._space.holder else self._namespace,
            proxy=self._proxy if self.network.proxied else None,
        )  # fmt: skip
        run = self._current = NativeRun(job, emit, control)
        try:
            return await run.go(), run.status
        finally:
            self._current = None
            files.discard(self._root, placeholders)

    async def change_network(self, allowed: Egress) -> None:
        """Changes what its guests may reach, at once."""
        if allowed.mode != "none" and not self.network.proxied and self._current:
            raise errors.NotAvailable(
                "network: what runs in this sandbox began without a way out", fix="open it with net=[...] of one host"
            )
        self.network.change(allowed)

    async def measure(self) -> Usage | None:
        """Returns what the running command uses; None if none runs."""
        return await self._current.measure() if self._current else None

    def _clear_the_way(self, walls: jail.Jail) -> Sequence[str]:
        """Makes the places for mounts in kept folders safe, and says which of them to remove afterwards.

        bubblewrap follows links while it builds the jail, when the host is still in its reach. A guest of an
        earlier command may have left one under a name that is mounted on now: the link goes.
        """
        os.fchmod(self._tmp, 0o755)  # an earlier guest may have locked the next one out
        granted = [path.removeprefix("/tmp/") for path in walls.grants if path.startswith("/tmp/")]
        files.clear(self._tmp, granted, folders=True)
        if self.plan.workspace:
            return ()
        os.fchmod(self._root, 0o755)
        made = files.missing(self._root, walls.files)
        files.clear(self._root, walls.files)
        if walls.cwd.startswith(f"{WORKSPACE}/"):
            files.make_folder(self._root, walls.cwd.removeprefix(f"{WORKSPACE}/"), owner=self.uid)
        return made

    @property
    def _namespace(self) -> str:
        return self._lent.path if self._lent else ""

    def _argv(self, argv: Sequence[str]) -> Sequence[str]:
        first, *rest = argv
        python = self.packages.python if self.packages else ""
        return [python if python and first in ("python", "python3") else first, *rest]

    def _proxy(self, told: Told) -> Proxy:
        return Proxy(self.network, told, self.plan.limits)

    def _jail(self, command: Command, limits: Limits, tool: Tool | None) -> jail.Jail:
        grants: list[str] = []
        path = _PATH
        online = self.network.proxied
        env = _GUEST_ENV | (guest.ENV if online else {})
        if tool and tool.folder:
            grants.append(tool.folder)
            path = f"{os.path.dirname(tool.path)}:{path}"
        if self.packages:
            grants += self.packages.folders
            path = ":".join((*self.packages.bins, path))
            env = {**env, **self.packages.env}
        workspace = self.plan.workspace
        if workspace and self._lent:
            workspace = workspace.model_copy(update={"path": self._host.place})
        return jail.Jail(
            env=_joined(env | {"PATH": path}, command.env), cwd=command.cwd, disk=limits.disk,
            files=dict(self.plan.files) | dict(command.files), inputs=self.plan.inputs,
            grants=tuple(dict.fromkeys(grants)), workspace=workspace, space=self._space, online=online,
            granted=self._root, uid=self.uid, binds=self.packages.binds if self.packages else {},
        )  # fmt: skip

    async def list(self) -> tuple[Entry, ...]:
        """Lists what is in /workspace."""
        found = await anyio.to_thread.run_sync(lambda: files.entries(self._folder(), owner=self.uid))
        return inputs.listed(self.plan, found)


def rlimits(limits: Limits) -> Sequence[str]:
    """The command that sets rlimits. Inside its own user namespace the guest's processes are counted from zero."""
    return [process.system_program("prlimit"), f"--nproc={limits.pids + 1}", f"--data={limits.memory}", "--"]


def _joined(env: dict[str, str], over: Mapping[str, str]) -> dict[str, str]:
    """The command's variables over ours; but where both name Python's search path, both count."""
    paths = [where["PYTHONPATH"] for where in (over, env) if where.get("PYTHONPATH")]
    return env | dict(over) | ({"PYTHONPATH": ":".join(paths)} if paths else {})
