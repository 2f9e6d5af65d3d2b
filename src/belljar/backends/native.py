"""Linux namespaces by bubblewrap, a seccomp filter, control groups. `jail` holds the walls; this file runs guests.

A run is one bubblewrap. A box whose files will be asked for also has a holder: a process that keeps its
writable folders mounted in a namespace of its own. Nothing is ever mounted on the host, and when
Belljar dies the kernel ends guest and holder with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from belljar import errors, files, process
from belljar.backends import cgroups, jail, owner
from belljar.backends.base import Control, Emit
from belljar.backends.toolchains import Grant, Tool, Toolchains, find_bubblewrap
from belljar.models import (
    MIB,
    WORKSPACE,
    Capabilities,
    Collected,
    Command,
    Entry,
    File,
    Guarantees,
    Isolation,
    LanguageSupport,
    Limits,
    Plan,
    Result,
    Status,
)
from belljar.output import Capture
from belljar.settings import Settings

_OWN_PROCESSES = 2  # bubblewrap's monitor and the init inside count against the pids limit
_GUEST_ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "guest", "LOGNAME": "guest", "LANG": "C.UTF-8"}
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)
_MEMORY_ERROR = re.compile(r"MemoryError|out of memory|cannot allocate memory|bad_alloc", re.IGNORECASE)


def create(settings: Settings) -> Native:
    return Native(Path(settings.state_dir), first_uid=settings.user_uid, path=settings.path)


class Native:
    """The backend `native`."""

    name = "native"

    def __init__(self, state_dir: Path, *, first_uid: int, path: str, use_cgroups: bool = True) -> None:
        self.state_dir = state_dir
        self.uids = owner.private_uids(first_uid) if os.geteuid() == 0 else range(0)
        self.toolchains = Toolchains(path, as_root=bool(self.uids))
        self.bubblewrap = ""
        self.groups: cgroups.Cgroups | None = None
        self.no_groups = "" if use_cgroups else "control groups were switched off"
        self._owner: owner.Owner | None = None
        self._guarantees: Guarantees | None = None

    # --- what it can do here ---

    async def probe(self) -> Capabilities:
        """Runs a real guest and looks at what really holds around it."""
        try:
            return await self._probe()
        except errors.BelljarError as error:
            return Capabilities(backend=self.name, available=False, why_not=error.message, fix=error.fix)
        except OSError as error:
            return Capabilities(backend=self.name, available=False, why_not=str(error), fix="run `belljar doctor`")

    async def _probe(self) -> Capabilities:
        if not hasattr(os, "memfd_create"):
            raise errors.NotAvailable("native needs Linux", fix="use another backend on this system")
        jail.seccomp_filter()
        self._prepare()
        problems: list[errors.BelljarError] = []
        for candidate in find_bubblewrap():
            self.bubblewrap = candidate
            try:
                version = await self._check_version()
                self._guarantees = await self._prove()
            except errors.BelljarError as error:
                problems.append(error)
                continue
            return Capabilities(
                backend=self.name, available=True, version=f"bubblewrap {version}", guarantees=self._guarantees,
                sessions=frozenset({"python"}), workspace=True, packages=True,
                notes=(self.no_groups,) if self.no_groups else (),
            )  # fmt: skip
        if problems:
            raise problems[0]
        raise errors.NotAvailable(
            "bubblewrap is not installed", fix="apt install bubblewrap, or pip install 'belljar[native]'"
        )

    def _prepare(self) -> None:
        """Finds the control groups and signs in as an owner of sandboxes, once for each process."""
        if self._owner and self._owner.pid == os.getpid():
            return
        owner.prepare(self.state_dir)
        if self.groups is None and not self.no_groups:
            found = cgroups.detect()
            self.groups, self.no_groups = (None, found) if isinstance(found, str) else (found, "")
        owner.reap(self.state_dir, self.groups)
        self._owner = owner.Owner(self.state_dir, self.groups)

    async def _check_version(self) -> str:
        said = (await process.output([self.bubblewrap, "--version"])).stdout
        match = re.search(r"(\d+)\.(\d+)(\.\d+)?", said)
        if not match or (int(match[1]), int(match[2])) < jail.MINIMUM_BUBBLEWRAP:
            raise errors.NotAvailable(
                f"{self.bubblewrap} is {said.strip() or 'unreadable'}, and 0.8 or later is needed",
                fix="pip install 'belljar[native]' brings a current one",
            )
        return match[0]

    async def _prove(self) -> Guarantees:
        """A guest that prints what the kernel says of it. What is not seen here is not claimed."""
        plan = Plan(limits=Limits(timeout=10, memory=64 * MIB, disk=MIB))
        seen: dict[str, Any] = {}
        script = "cat /proc/self/status /proc/self/uid_map; ( : > /usr/belljar-probe ) 2>&1; cat /proc/self/mountinfo"
        try:
            async with self.open(plan) as box:
                result = await box.run(
                    Command(argv=("sh", "-c", script), cwd="/"), _ignore, Control(), note=seen.update
                )
        except errors.StartFailed as error:
            raise _explain(error) from None
        said = result.stdout
        walls = []
        for name in _NAMESPACES:
            inside, outside = seen.get(f"{name}-namespace"), os.stat(f"/proc/self/ns/{name}").st_ino
            if not inside or inside == outside:
                raise errors.NotAvailable(f"the guest was not in a {name} namespace of its own")
            walls.append(f"{name} namespace")
        proofs = {
            "user namespace": rf"^\s*{jail.GUEST_ID}\s+\d+\s+1$",
            "no capabilities": r"^CapEff:\s+0+$",
            "no new privileges": r"^NoNewPrivs:\s+1$",
            "seccomp filter": r"^Seccomp:\s+2$",
            "read-only root": r"Read-only file system|Permission denied",
        }
        for wall, pattern in proofs.items():
            if not re.search(pattern, said, re.MULTILINE):
                raise errors.NotAvailable(f"the probe could not prove: {wall}", context={"output": said[:500]})
            walls.append(wall)
        if self.uids:
            walls.append(f"a uid from {self.uids[0]} on, never root")
        return self._promise(tuple(walls))

    def _promise(self, walls: tuple[str, ...]) -> Guarantees:
        by_group = self.groups.limits if self.groups else frozenset()
        group = f"cgroup v{self.groups.version}" if self.groups else ""
        limits = {
            "memory": group if "memory" in by_group else "rlimit and watchdog",
            "pids": group if "pids" in by_group else "rlimit",
            "cpus": group if "cpus" in by_group else "not limited",
            "io": group if "io" in by_group else "not limited",
            "disk": "tmpfs size",
            "timeout": "watchdog",
            "output": "watchdog",
        }
        weaker = [self.no_groups] if self.no_groups else []
        if "memory" not in by_group and not Path(f"/proc/self/task/{os.getpid()}/children").exists():
            weaker.append("memory is limited for each process alone: this kernel does not list children")
        elif "memory" not in by_group:
            weaker.append("memory is sampled: a burst may pass the limit for a moment; files in /tmp do not count")
        weaker += [f"{name} is not limited" for name, how in limits.items() if how == "not limited"]
        return Guarantees(
            isolation=Isolation.NAMESPACE, walls=walls, limits=limits, network="none", weaker=tuple(weaker)
        )

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return await self.toolchains.support()

    async def reap(self) -> int:
        owner.prepare(self.state_dir)
        found = cgroups.detect()
        return owner.reap(self.state_dir, None if isinstance(found, str) else found)

    # --- sandboxes ---

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[NativeBox]:
        self._prepare()
        async with AsyncExitStack() as stack:
            uid = None
            if plan.workspace and not os.path.isdir(plan.workspace.path):
                raise errors.InvalidRequest(
                    f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path"
                )
            if self.uids:
                uid, claim = self._uid_for(plan)
                stack.callback(claim)
            box = NativeBox(self, plan, uid)
            if plan.packages:
                box.packages = self.toolchains.environment(plan.packages)
            if plan.keep_files or box.copies:
                await stack.enter_async_context(box.holding())
            yield box

    def _uid_for(self, plan: Plan) -> tuple[int, Callable[[], object]]:
        """A fresh uid, or the owner of a granted folder, who may read and write it; never root."""
        if plan.workspace:
            folder_owner = os.stat(plan.workspace.path).st_uid
            if folder_owner != 0:
                return folder_owner, lambda: None
        uid, claim = owner.claim_uid(self.uids)
        return uid, claim.close

    def group_for(self, limits: Limits) -> cgroups.Group | None:
        if self.groups is None:
            return None
        assert self._owner is not None
        own = limits.model_copy(update={"pids": limits.pids + _OWN_PROCESSES})
        device = cgroups.disk_of("/usr") if limits.io_bps or limits.io_iops else None
        return self.groups.create(self._owner.next_name(), own, device)


class NativeBox:
    """One sandbox of the native backend."""

    def __init__(self, backend: Native, plan: Plan, uid: int | None) -> None:
        self.id = plan.id
        self.plan = plan
        self.uid = uid
        self.packages: Grant | None = None
        self._backend = backend
        self._space = jail.Space()
        self._root = -1

    @property
    def copies(self) -> bool:
        """A folder that belongs to root is copied in (and back): the guest's uid could not use it otherwise."""
        return bool(self.plan.workspace and self._backend.uids and os.stat(self.plan.workspace.path).st_uid == 0)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Starts the process that keeps /workspace and /tmp mounted, and opens the first for us."""
        state = self._backend.state_dir
        space = jail.Space(workspace=str(state / "workspace"), tmp=str(state / "tmp"))
        ready_read, ready_write = os.pipe()
        status_read, status_write = os.pipe()
        hold_read, hold_write = os.pipe()
        with ExitStack() as fds:
            for fd in (ready_read, status_read, hold_write):
                fds.callback(os.close, fd)
            try:
                args = ["--json-status-fd", str(status_write), *jail.holder_arguments(self.plan.limits.disk, space)]
                child = process.Child(
                    [*jail.launcher((), self.uid, 0), self._backend.bubblewrap, *args],
                    stdin=hold_read, stdout=ready_write, stderr=ready_write, fds=(status_write,),
                )  # fmt: skip
            finally:
                for fd in (ready_write, status_write, hold_read):
                    os.close(fd)
            try:
                with anyio.fail_after(10):
                    said = await process.read_some(ready_read)
                    status = await process.read_some(status_read)
                if not said.startswith(b"ready"):
                    raise errors.StartFailed(
                        f"the sandbox's folders could not be made: {said.decode(errors='replace')}"
                    )
                self._space = space._replace(holder=json.loads(status.splitlines()[0])["child-pid"])
                self._root = os.open(f"/proc/{self._space.holder}/root{space.workspace}", os.O_RDONLY | os.O_DIRECTORY)
                fds.callback(os.close, self._root)
                if self.copies:
                    await self._copy_in()
                yield
            finally:
                child.kill()
                with anyio.CancelScope(shield=True):
                    await child.wait()
                self._space, self._root = jail.Space(), -1

    # --- files ---

    async def put(self, files_in: Sequence[File]) -> None:
        try:
            await anyio.to_thread.run_sync(lambda: files.write(self._folder(), files_in, owner=self.uid))
        except OSError as error:
            raise errors.ExecutionFailed(f"the file could not be written: {error.strerror}") from None

    async def get(self, patterns: Sequence[str]) -> Collected:
        return await anyio.to_thread.run_sync(files.collect, self._folder(), tuple(patterns))

    async def list(self) -> tuple[Entry, ...]:
        return await anyio.to_thread.run_sync(files.entries, self._folder())

    def _folder(self) -> int:
        if self._root < 0:
            raise errors.ExecutionFailed("this sandbox keeps no files", fix="open it with keep_files")
        return self._root

    async def _copy_in(self) -> None:
        assert self.plan.workspace
        path, limit = self.plan.workspace.path, self.plan.limits.disk
        self._copied = await anyio.to_thread.run_sync(lambda: files.tree(path, limit=limit))
        await self.put(self._copied)

    async def _copy_back(self) -> None:
        """What the guest changed in a granted folder, written by us, file by file, following no link."""
        assert self.plan.workspace
        path, before, limit = self.plan.workspace.path, self._copied, self.plan.limits.disk

        def work() -> tuple[File, ...]:
            after = files.tree(f"/proc/self/fd/{self._root}/.", limit=limit * 2)
            target = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                files.write(target, [file for file in after if file not in before])
                for gone in {file.path for file in before} - {file.path for file in after}:
                    files.remove(target, gone)
            finally:
                os.close(target)
            return after

        self._copied = await anyio.to_thread.run_sync(work)

    # --- running ---

    async def run(
        self, command: Command, emit: Emit, control: Control, note: Callable[[dict[str, Any]], None] | None = None
    ) -> Result:
        program = command.argv[0]
        tool = None if "/" in program else await self._backend.toolchains.tool_for(program, command.language)
        placeholders = self._placeholders(command)
        run = _Run(self, command, emit, control, tool)
        try:
            result = await run.go()
        finally:
            for name in placeholders:
                files.remove(self._root, name)
        if note:
            note(run.status)
        if self.copies and self.plan.workspace and self.plan.workspace.write:
            await self._copy_back()
        return result

    def _placeholders(self, command: Command) -> list[str]:
        """bubblewrap leaves an empty file under each read-only one it mounts over a kept folder."""
        if self._root < 0 or self.plan.workspace:
            return []
        there = {entry.path for entry in files.entries(self._root)}
        return [name for name in {*self.plan.files, *command.files} if name not in there]

    def command_line(self, argv: Sequence[str], limits: Limits) -> list[str]:
        first, *rest = argv
        if self.packages and first in ("python", "python3"):
            first = self.packages.python
        line = [first, *rest]
        if self._backend.groups is None:
            line = ["prlimit", f"--nproc={limits.pids + 1}", f"--data={limits.memory}", "--", *line]
        return line

    def jail(self, command: Command, limits: Limits, tool: Tool | None) -> jail.Jail:
        grants: list[str] = []
        path = _PATH
        env = dict(_GUEST_ENV)
        if tool and tool.folder:
            grants.append(tool.folder)
            path = f"{os.path.dirname(tool.path)}:{path}"
        if self.packages:
            grants += self.packages.folders
            path = f"{os.path.dirname(self.packages.python)}:{path}"
            env |= self.packages.env
        workspace = None if self.copies else self.plan.workspace
        return jail.Jail(
            env=env | {"PATH": path} | dict(command.env), cwd=command.cwd, disk=limits.disk,
            files=dict(self.plan.files) | dict(command.files), inputs=self.plan.inputs, grants=tuple(dict.fromkeys(grants)),
            workspace=workspace, space=self._space,
        )  # fmt: skip


class _Run:
    """One command in a box, from start to verdict."""

    def __init__(self, box: NativeBox, command: Command, emit: Emit, control: Control, tool: Tool | None) -> None:
        self._box = box
        self._tool = tool
        self._command = command
        self._limits = command.limits or box.plan.limits
        self._emit = emit
        self._control = control
        keep = self._limits.output if control.feed is None else None
        self._streams = {"stdout": Capture(keep), "stderr": Capture(keep)}
        self._verdict: Status | None = None
        self.status: dict[str, Any] = {}
        self._fds = ExitStack()
        self._group: cgroups.Group | None = None
        self._startup_ms = 0.0
        self._peak = 0  # as sampled, where there is no control group to ask

    async def go(self) -> Result:
        self._started = time.perf_counter()
        backend = self._box._backend
        with self._fds:
            try:
                self._group = backend.group_for(self._limits)
                child, pipes = self._start()
                try:
                    exit_ = await self._attend(child, pipes)
                except BaseException:
                    self._kill(child)
                    with anyio.CancelScope(shield=True):
                        await child.wait()
                    raise
                usage = self._group.usage() if self._group else None
            finally:
                with anyio.CancelScope(shield=True):
                    await self._sweep()
        if usage and usage.forks_refused:
            await self._emit("limit", f"pids: {usage.forks_refused} forks were refused")
        return self._result(exit_, usage)

    def _start(self) -> tuple[process.Child, dict[str, int]]:
        box, command = self._box, self._command
        args, fds = jail.arguments(box.jail(command, self._limits, self._tool), self._fds)
        pipes: dict[str, int] = {}
        theirs: dict[str, int] = {}
        with ExitStack() as child_side:
            for name in ("stdout", "stderr", "status"):
                pipes[name], theirs[name] = os.pipe()
                self._fds.callback(os.close, pipes[name])
                child_side.callback(os.close, theirs[name])
            if box.uid is not None:  # so that the guest may open /dev/stdout again
                os.fchown(theirs["stdout"], box.uid, box.uid)
                os.fchown(theirs["stderr"], box.uid, box.uid)
            if self._control.feed is None:
                stdin = jail.memory_file(command.stdin, self._fds) if command.stdin else subprocess.DEVNULL
            else:
                stdin, pipes["stdin"] = os.pipe()
                child_side.callback(os.close, stdin)
            args += ["--json-status-fd", str(theirs["status"])]
            # In a file of its own, not on the command line, where every user of the host could read the environment.
            listing = jail.memory_file(b"\0".join(arg.encode() for arg in args) + b"\0", self._fds)
            doors = self._group.doors if self._group else ()
            argv = jail.launcher(doors, box.uid, box._space.holder)
            argv += [
                box._backend.bubblewrap,
                "--args",
                str(listing),
                "--",
                *box.command_line(command.argv, self._limits),
            ]
            try:
                child = process.Child(
                    argv, stdin=stdin, stdout=theirs["stdout"], stderr=theirs["stderr"],
                    fds=(*fds, listing, theirs["status"]),
                )  # fmt: skip
            except OSError as error:
                raise errors.StartFailed(f"bubblewrap could not be started: {error}") from None
        return child, pipes

    async def _attend(self, child: process.Child, pipes: dict[str, int]) -> process.Exit:
        """Reads, feeds and watches until the guest has ended, one way or another."""
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_clock, child)
            watchers.start_soon(self._watch_control, child)
            if self._group is None:
                watchers.start_soon(self._watch_memory, child)
            if self._control.feed is not None:
                watchers.start_soon(self._feed, pipes["stdin"])
            async with anyio.create_task_group() as readers:
                readers.start_soon(self._read_status, pipes["status"])
                for name in ("stdout", "stderr"):
                    readers.start_soon(self._read, name, pipes[name], child)
            exit_ = await child.wait()
            watchers.cancel_scope.cancel()
        return exit_

    async def _read(self, name: str, fd: int, child: process.Child) -> None:
        capture = self._streams[name]
        while data := await process.read_some(fd):
            warned = capture.cut
            if text := capture.feed(data):
                await self._emit(name, text)  # type: ignore[arg-type]
            if capture.cut and not warned:
                await self._emit(
                    "limit", f"output: {name} passed {capture.limit} bytes; from here on only its end is kept"
                )
            if capture.flooded and self._verdict is None:
                self._end(child, Status.OUTPUT_LIMIT)
        if text := capture.feed(b""):
            await self._emit(name, text)  # type: ignore[arg-type]

    async def _read_status(self, fd: int) -> None:
        """bubblewrap tells the guest's pid and namespaces, and its exit code only if it really ran."""
        text = b""
        while data := await process.read_some(fd):
            text += data
            for line in text.splitlines():
                with suppress(ValueError):
                    self.status |= json.loads(line)
            if not self._startup_ms and self.status:
                self._startup_ms = (time.perf_counter() - self._started) * 1000
                await self._emit("started", self._box.id)

    async def _feed(self, fd: int) -> None:
        assert self._control.feed is not None
        try:
            async for data in self._control.feed:
                await process.write_all(fd, data)
        finally:
            os.close(fd)

    async def _watch_clock(self, child: process.Child) -> None:
        await anyio.sleep(max(0.0, self._limits.timeout - (time.perf_counter() - self._started)))
        self._end(child, Status.TIMEOUT)

    async def _watch_control(self, child: process.Child) -> None:
        self._end(child, await self._control.stopped())

    async def _watch_memory(self, child: process.Child) -> None:
        """Without control groups: adds up the private memory of all the guest's processes."""
        while True:
            used = sum(map(_private_memory, _descendants(child.pid)))
            self._peak = max(self._peak, used)
            if used > self._limits.memory:
                return self._end(child, Status.OOM_KILLED)
            await anyio.sleep(0.02)

    def _end(self, child: process.Child, verdict: Status) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._kill(child)

    def _kill(self, child: process.Child) -> None:
        tree = [] if self._group else _descendants(child.pid)
        child.kill()  # the init inside dies with it, and the whole pid namespace with the init
        if self._group:
            self._group.kill()
        for pid in tree:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, 9)

    async def _sweep(self) -> None:
        group = self._group
        if group and not group.remove() and not await anyio.to_thread.run_sync(group.destroy):
            raise errors.CleanupFailed("a process of the sandbox did not die", fix="look at the kernel's log")

    def _result(self, exit_: process.Exit, usage: cgroups.Usage | None) -> Result:
        out, err = self._streams["stdout"], self._streams["stderr"]
        code: int | None = self.status.get("exit-code")
        stderr = err.text
        if code is None and self._verdict is None:
            code = self._never_ran(exit_, usage, stderr)
        peak = usage.memory_peak if usage else self._peak or None
        cpu = usage.cpu_ms if usage else None
        return Result(
            status=self._judge(code, usage, stderr, bool(out.cut or err.cut)), exit_code=code,
            stdout=out.text, stderr=stderr, truncated=bool(out.cut or err.cut),
            duration_ms=round((time.perf_counter() - self._started) * 1000, 3), startup_ms=round(self._startup_ms, 3),
            memory_used_mb=None if peak is None else round(peak / MIB, 3), cpu_ms=None if cpu is None else round(cpu, 3),
            container_id=self._box.id,
        )  # fmt: skip

    def _never_ran(self, exit_: process.Exit, usage: cgroups.Usage | None, said: str) -> int | None:
        """No exit code was reported: was the program missing, was it ended from outside, or did we fail?"""
        missing = re.search(r"^(?:bwrap: execvp|prlimit: failed to execute) (.+): (.+)$", said, re.MULTILINE)
        if missing:
            return 127 if "No such file" in missing[2] else 126
        if usage and usage.oom_kills:
            self._verdict = Status.OOM_KILLED
            return 137
        if exit_.code < 0 or exit_.code == 137:
            self._verdict = Status.KILLED
            return None
        raise errors.StartFailed(f"the sandbox could not be built: {said.strip() or f'exit code {exit_.code}'}")

    def _judge(self, code: int | None, usage: cgroups.Usage | None, stderr: str, cut: bool) -> Status:
        if self._verdict:
            return self._verdict
        if code == 0:
            return Status.OUTPUT_LIMIT if cut else Status.SUCCESS
        if usage and usage.oom_kills:
            return Status.OOM_KILLED
        if self._group is None and _MEMORY_ERROR.search(stderr[-2000:]):
            return Status.OOM_KILLED  # the rlimit refused the memory, and the guest gave up
        if _NO_SPACE.search(stderr[-2000:]):
            return Status.DISK_LIMIT
        return Status.ERROR


async def _ignore(kind: str, text: str) -> None:
    return None


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _private_memory(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0


# What bubblewrap prints where it may not work -> what that means, and what to do.
_EXPLANATIONS = (
    (r"setting up uid map|No permissions to create new namespace|creating new namespace|user namespace",
     "this system does not let us create user namespaces",
     "as root: sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or kernel.apparmor_restrict_unprivileged_userns=0 "
     "(Ubuntu 24.04); inside a container start it with --security-opt seccomp=unconfined --security-opt "
     "systempaths=unconfined, or use another backend"),
    (r"mount proc|Can't mount proc",
     "this container hides parts of /proc, so the kernel refuses a new one",
     "start the container with --security-opt systempaths=unconfined, or use another backend"),
    (r"setpriv|nsenter|prlimit", "util-linux is missing", "apt install util-linux"),
    (r"belljar: .*cannot create", "the control group could not be joined", "run `belljar doctor`; or delegate a control group to us"),
)  # fmt: skip


def _explain(error: errors.BelljarError) -> errors.NotAvailable:
    for pattern, meaning, fix in _EXPLANATIONS:
        if re.search(pattern, error.message, re.IGNORECASE):
            return errors.NotAvailable(meaning, fix=fix, context={"said": error.message})
    return errors.NotAvailable(error.message, fix="see docs/security.md, or use another backend")
