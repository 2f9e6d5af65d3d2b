"""A backend that never runs code: trusted Python functions play the guests. For tests, yours and ours.

>>> import belljar
>>> from belljar.backends.fake import Fake
>>> belljar.run("print(1)", backend=Fake({"print(1)": lambda p: p.out("1\\n")})).stdout
'1\\n'

Everything around the guest is real: policy, limits, events, captures, verdicts. Nothing of the guest is
ever executed, so there is nothing to isolate: it declares the strongest isolation, which lets every
request through, and says on each result that it is a simulation. It is never chosen by `auto`.
"""

from __future__ import annotations

import errno
import inspect
import os
import posixpath
import shlex
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import get_args

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from belljar.backends import inputs
from belljar.backends.base import Emit
from belljar.backends.outcome import Ending, Outcome
from belljar.control.control import Control
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.languages import BUILTIN
from belljar.core.plan import Command, Plan
from belljar.core.process import Feature, PtySize, shell_text
from belljar.core.request import Limits
from belljar.core.result import Collected, Entry, File, Result, Status, StreamName, Usage
from belljar.core.values import WORKSPACE
from belljar.host.files import matches

_ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "guest", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
_SIMULATED = ("memory", "pids", "disk", "timeout", "output")


class _End(Exception):
    """Unwinds a program: it left, or a limit ended it."""

    def __init__(self, exit_code: int | None, verdict: Status | None = None) -> None:
        self.exit_code = exit_code
        self.verdict = verdict


class FakeProcess:
    """What a program sees of its sandbox, and all that it can do there.

    An exception that a program lets out is the guest's: it is printed as Python would, and the exit code is 1.
    """

    def __init__(self, box: FakeBox, command: Command, limits: Limits, outcome: Outcome, control: Control) -> None:
        own = {"HOME": box.plan.home, "USER": box.plan.user} if box.plan.living else {}
        self.argv: tuple[str, ...] = command.argv
        self.env: Mapping[str, str] = MappingProxyType({**_ENV, **own, **command.env})
        self.cwd: str = command.cwd
        self.stdin: bytes = command.stdin  # what was given at the start; what comes later: `receive`
        self.limits = limits
        self.memory_peak: int = 0
        self.forks_refused: int = 0
        self.figures: Usage = Usage(0.0, 0, 0, 0, 0, 0)
        self.memory: int = 0  # bytes that it has now
        self.processes: int = 1  # itself, and those that live as long as it does
        self.pid: int = box.next_pid()
        self.pty: PtySize | None = command.pty
        self.started: float = time.time()
        self._traps: dict[int, Callable[[], object]] = {}
        self._dying = anyio.Event()
        self._signal = 0
        self._box = box
        self._outcome = outcome
        self._control = control
        given, where = {**box.plan.files, **command.files}, box.plan.inputs
        self._inputs = {f"{where}/{name}": File(path=name, content=data) for name, data in given.items()}

    @property
    def files(self) -> Mapping[str, bytes]:
        """/workspace as it is now, by relative path, the read-only inputs included."""
        there = {**self._box.disk, **self._inputs}
        prefix = f"{WORKSPACE}/"
        return MappingProxyType({k.removeprefix(prefix): f.content for k, f in there.items() if k.startswith(prefix)})

    async def out(self, data: str | bytes) -> None:
        await self._print("stdout", data)

    async def err(self, data: str | bytes) -> None:
        await self._print("stderr", data)

    def read(self, path: str) -> bytes:
        """A file of /workspace or /tmp; a relative path starts at `cwd`."""
        where = posixpath.join(self.cwd, path)
        file = self._inputs.get(where) or self._box.disk.get(where)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return file.content

    def write(self, path: str, content: bytes, *, executable: bool = False, read_only: bool = False) -> None:
        """Writes a file of /workspace or /tmp. A full disk is an OSError, and `disk_limit` if it is let out."""
        where = self._writable(path)
        name = posixpath.relpath(where, WORKSPACE)
        self._box.store(where, File(path=name, content=content, executable=executable, read_only=read_only))

    def link(self, path: str, target: str) -> None:
        """A symbolic link in /workspace; nothing here ever follows it."""
        self._box.links[posixpath.relpath(self._writable(path), WORKSPACE)] = target

    def chmod(self, path: str, mode: int) -> None:
        """Gives a file of a living sandbox other permissions."""
        self._box.chmod(self._writable(path), mode)

    def make_pipe(self, path: str) -> None:
        """Makes a named pipe in a living sandbox; nothing here ever writes to it."""
        self._box.pipes.add(self._writable(path))

    def allocate(self, size: int) -> None:
        """Takes memory; over the limit of the sandbox the guest is ended, as by the kernel."""
        self.memory += size
        self.memory_peak = max(self.memory_peak, min(self.memory, self.limits.memory))
        self.figures = self.figures._replace(memory=min(self.memory, self.limits.memory))
        if sum(one.memory for one in self._box.alive(self)) > self.limits.memory:
            raise _End(137, Status.OOM_KILLED)

    def spend(self, *, cpu_ms: float = 0.0, rx: int = 0, tx: int = 0, disk_read: int = 0, disk_write: int = 0) -> None:
        """Adds to what is told to those who measure."""
        before = self.figures
        self.figures = Usage(
            (before.cpu_ms or 0) + cpu_ms, before.memory, (before.rx or 0) + rx, (before.tx or 0) + tx,
            (before.disk_read or 0) + disk_read, (before.disk_write or 0) + disk_write,
        )  # fmt: skip

    def spawn(self, count: int = 1) -> None:
        """Starts processes that live as long as this one."""
        if sum(one.processes for one in self._box.alive(self)) + count > self.limits.pids:
            self.forks_refused += 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.processes += count

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        await self._box.going_on()

    async def receive(self) -> bytes:
        """What is written to its stdin next; empty at its end."""
        if self._control.feed is None:
            given, self.stdin = self.stdin, b""
            return given
        try:
            return await self._control.feed.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            return b""

    def on_signal(self, number: int, action: Callable[[], object]) -> None:
        """Does that when the signal comes, instead of dying of it. Nothing helps against 9."""
        self._traps[number] = action

    def listen(self, port: int, serve: Serve) -> None:
        """Listens on a port, and serves each connection with the function, as long as this process lives."""
        if port in self._box.ports:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._box.ports[port] = (self, serve)

    async def connect(self, port: int) -> ByteStream:
        """Connects to a port that some process of this living sandbox listens on."""
        return await self._box.dial(port)

    def background(self, program: Program, command: str = "background") -> None:
        """Starts a process that outlives this one in a living sandbox; in any other it does not."""
        self._box.leave(self, program, command)

    async def receive_signal(self, number: int) -> None:
        if number in self._traps and number != 9:
            self._traps[number]()
        elif number != 0:
            self._signal = number
            self._dying.set()

    def told_to_end(self) -> bool:
        """Gives it SIGTERM because it is stopped; False: it does nothing with it, and is ended at once."""
        if 15 in self._traps:
            self._traps[15]()
        return 15 in self._traps

    async def resize(self, size: PtySize) -> None:
        self.pty = size
        if 28 in self._traps:
            self._traps[28]()

    async def dying(self) -> int:
        """Waits for a signal that ends it, and returns the exit code that a shell tells then."""
        await self._dying.wait()
        return 128 + self._signal

    def exit(self, code: int = 0) -> None:
        raise _End(code & 255)

    def signal(self, number: int) -> None:
        """Dies of a signal, with the exit code that a shell would tell."""
        raise _End(128 + number)

    async def _print(self, stream: StreamName, data: str | bytes) -> None:
        raw = data.encode() if isinstance(data, str) else data
        stream = "stdout" if self.pty else stream
        await self._box.going_on()
        if self._control.hear:
            self._control.hear(stream, raw)
        if await self._outcome.take(stream, raw) and not self._control.hear:
            raise _End(None, Status.OUTPUT_LIMIT)
        await anyio.lowlevel.checkpoint()  # a program that prints for ever must still meet its timeout

    def _writable(self, path: str) -> str:
        where = posixpath.normpath(posixpath.join(self.cwd, path))
        if where in self._inputs or not where.startswith(tuple(f"{folder}/" for folder in self._box.writable)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return where


Program = Callable[[FakeProcess], Awaitable[int | None] | int | None]
Serve = Callable[[ByteStream], Awaitable[None]]


class Fake:
    """`programs` maps the exact code of a snippet, or a command as a shell would spell it, to who plays it."""

    name = "fake"

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.programs: dict[str, Program] = dict(programs)
        self.open_boxes: int = 0  # what a test looks at to see that nothing is left open

    async def probe(self) -> Capabilities:
        guarantees = Guarantees(
            isolation=Isolation.KERNEL,
            walls=("nothing is executed",),
            limits=dict.fromkeys(_SIMULATED, "simulated") | {"cpus": "not limited", "io": "not limited"},
            weaker=("a simulation: results are scripted",),
        )
        return Capabilities(
            backend=self.name, available=True, version="simulation", guarantees=guarantees,
            living=frozenset(get_args(Feature)),
        )  # fmt: skip

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return tuple(LanguageSupport(name=name, available=True, version="simulation") for name in BUILTIN)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[FakeBox]:
        self.open_boxes += 1
        try:
            if plan.living:
                from belljar.backends.fake_living import FakeLivingBox  # here: it is one of these boxes, and more

                async with FakeLivingBox.opened(self, plan) as box:
                    yield box
            else:
                yield FakeBox(self, plan)
        finally:
            self.open_boxes -= 1

    async def reap(self) -> int:
        return 0


class FakeBox:
    """One pretended sandbox: a dictionary for a disk."""

    def __init__(self, backend: Fake, plan: Plan) -> None:
        self.id: str = plan.id
        self.plan = plan
        self.disk: dict[str, File] = {}
        self.links: dict[str, str] = {}
        self.pipes: set[str] = set()
        self.ports: dict[int, tuple[FakeProcess, Serve]] = {}
        self._backend = backend
        self._current: FakeProcess | None = None
        self._last_pid = 1

    @property
    def writable(self) -> tuple[str, ...]:
        """The folders that programs may write to."""
        return (WORKSPACE, "/tmp")

    def next_pid(self) -> int:
        self._last_pid += 1
        return self._last_pid

    def alive(self, process: FakeProcess) -> Sequence[FakeProcess]:
        """The processes whose memory and number count together with those of this one, itself among them."""
        return (process,)

    def chmod(self, where: str, mode: int) -> None:
        """Changes the permissions of a file; here nobody asks for them."""

    async def going_on(self) -> None:
        """Waits while the sandbox is paused."""

    def leave(self, parent: FakeProcess, program: Program, command: str) -> None:
        """Starts what outlives its parent; here nothing does."""

    async def dial(self, port: int) -> ByteStream:
        """Connects to a port; here nothing goes on that could listen."""
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    async def measure(self) -> Usage | None:
        return self._current.figures if self._current else None

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        limits = command.limits or self.plan.limits
        outcome = Outcome(self.id, limits, emit, keep_output=control.hear is None)
        process = FakeProcess(self, command, limits, outcome, control)
        await outcome.begin()
        self._current = process
        try:
            code, verdict = await self._play(process, self._program(command), control)
        finally:
            self._current = None
            self.ports = {port: held for port, held in self.ports.items() if held[0] is not process}
        await outcome.close_streams()
        await outcome.tell_forks_refused(process.forks_refused)
        return outcome.result(Ending(code, status=verdict, memory_peak=process.memory_peak))

    def _program(self, command: Command) -> Program:
        given = f"{self.plan.inputs}/"
        words = [word.removeprefix(given) for word in command.argv] if command.language else []
        code = next((command.files[word] for word in words if word in command.files), None)
        source = code.decode() if code is not None else shell_text(command.argv) or shlex.join(command.argv)
        return self._backend.programs.get(source, _missing)

    async def _play(self, process: FakeProcess, program: Program, control: Control) -> tuple[int | None, Status | None]:
        """How the program ended: its exit code, and the verdict if something else ended it."""
        outcome: tuple[int | None, Status | None] = (None, Status.TIMEOUT)
        stopped: Status | None = None

        async def die() -> None:
            nonlocal outcome
            outcome = (await process.dying(), None)
            tasks.cancel_scope.cancel()

        async def obey() -> None:
            nonlocal outcome, stopped
            stopped = await control.stopped()
            if process.told_to_end():
                await anyio.sleep(process.limits.grace)
            outcome = (None, stopped)
            tasks.cancel_scope.cancel()

        with anyio.move_on_after(process.limits.timeout):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(obey)
                tasks.start_soon(die)
                await anyio.lowlevel.checkpoint()  # who was stopped before the start never starts
                code, verdict = await _ending_of(process, program)
                outcome = (code, stopped or verdict)
                tasks.cancel_scope.cancel()
        return outcome

    async def put(self, files: Sequence[File]) -> None:
        inputs.check_writable(self.plan, files)
        for file in files:
            self._check_kind(file.path)
            old = self.disk.get(f"{WORKSPACE}/{file.path}")
            if old and old.read_only:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file.path)
            kept = file.model_copy(update={"executable": True}) if old and old.executable else file
            self.store(f"{WORKSPACE}/{file.path}", kept)

    def _check_kind(self, path: str) -> None:
        """Raises what opening a folder, or a name below a file, gives."""
        names = [file.path for file in self._files()]
        if any(name.startswith(f"{path}/") for name in names):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if any(path.startswith(f"{name}/") for name in names):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        if path in self.links:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        self._check_kind(path)
        if own := inputs.reading(self.plan, path):
            return own
        for file in self._files():
            if file.path == path:
                return inputs.whole(file.content)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def store(self, where: str, file: File) -> None:
        """/workspace and /tmp have a disk each, of the size that the plan allows."""
        folder = posixpath.join("/", where.split("/")[1], "")
        others = sum(len(f.content) for name, f in self.disk.items() if name.startswith(folder) and name != where)
        if others + len(file.content) > self.plan.limits.disk:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
        self.links.pop(file.path, None)
        self.disk[where] = file

    async def get(self, patterns: Sequence[str]) -> Collected:
        links = [name for name in self.links if matches(name, patterns)]
        left_out = tuple(f"{name}: link, only regular files leave a sandbox" for name in links)
        return Collected(tuple(file for file in self._files() if matches(file.path, patterns)), left_out)

    async def list(self) -> tuple[Entry, ...]:
        entries = {Entry(file.path, "file", len(file.content)) for file in self._files()}
        entries |= {Entry(name, "link", len(target)) for name, target in self.links.items()}
        folders = {str(folder) for entry in entries for folder in PurePosixPath(entry.path).parents} - {"."}
        return inputs.listed(self.plan, sorted(entries | {Entry(name, "folder", 0) for name in folders}))

    def _files(self) -> Iterator[File]:
        """What was written to /workspace, in the order of names."""
        for where, file in sorted(self.disk.items()):
            if where.startswith(f"{WORKSPACE}/") and file.path not in self.links:
                yield file


async def _ending_of(process: FakeProcess, program: Program) -> tuple[int | None, Status | None]:
    try:
        answer = program(process)
        code = await answer if inspect.isawaitable(answer) else answer
    except _End as end:
        return end.exit_code, end.verdict
    except Exception as error:
        said = "".join(traceback.format_exception_only(error))
        await process.err(f'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\n{said}')
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        return 1, Status.DISK_LIMIT if full else None
    return code or 0, None


async def _missing(process: FakeProcess) -> int:
    await process.err(f"fake: {process.argv[0]}: no program was scripted for this\n")
    return 127
