"""A backend without walls, which makes the mistakes of careless ones: it runs the guest on the host as it is,
kills only the process it started, follows links, and keeps all output. Only for payloads known to be harmless."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import termios
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from belljar.backends import inputs
from belljar.backends.base import Emit
from belljar.control.control import Control, StartedGuest
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.plan import INPUTS, Command, Plan
from belljar.core.result import Collected, Entry, File, Result, Status
from belljar.core.values import WORKSPACE
from belljar.host import process
from belljar.testing import escape
from leaky_machine import LeakyLife, LeakyTree, resized, signalled

PRIVATE = ("unshare", "--mount", "--uts", "--ipc", "--")  # what root does in there, the host does not see
MOST = 100 << 20


class Leaky:
    name = "leaky"

    def __init__(self, control: escape.Control) -> None:
        self.control = control

    async def probe(self) -> Capabilities:
        # A lie, without which routing would rightly refuse it; a third party's backend might tell it, too.
        lie = Guarantees(isolation=Isolation.NAMESPACE)
        return Capabilities(
            backend=self.name, available=True, workspace=True, guarantees=lie,
            living=frozenset({"dial", "pause", "pty", "watch"}),
        )  # fmt: skip

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return ()

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[LeakyBox]:
        folder = Path(tempfile.mkdtemp(prefix="belljar-leaky-"))
        try:
            yield (LeakyMachine if plan.living else LeakyBox)(plan, folder, self.control)
        finally:
            await process.output(["rm", "-rf", str(folder)])  # which copes with deep trees, as shutil does not

    async def reap(self) -> int:
        return 0


class LeakyBox:
    def __init__(self, plan: Plan, inputs: Path, control: escape.Control) -> None:
        self.id = plan.id
        self.plan = plan
        self.inputs = inputs
        self.folder = Path(plan.workspace.path) if plan.workspace else inputs
        self._control = control

    async def put(self, files: Sequence[File]) -> None:
        for file in files:
            path = self.inputs / file.path
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.content)

    async def get(self, patterns: Sequence[str]) -> Collected:
        def walk(folder: Path) -> list[Path]:
            inside = list(folder.iterdir())
            return inside + [deeper for path in inside if path.is_dir() for deeper in walk(path)]

        names = [str(path.relative_to(self.folder)) for path in walk(self.folder)]
        files = (File.model_construct(path=n, content=_read(self.folder / n)) for n in names if n != "main.py")
        return Collected(tuple(files))

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return inputs.whole(_read(self.folder / path))

    async def list(self) -> tuple[Entry, ...]:
        return ()

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        await self.put([File(path=n, content=c) for n, c in {**self.plan.files, **command.files}.items()])
        limits = command.limits or self.plan.limits
        started = time.monotonic()
        with ExitStack() as fds:
            child, pipes = self._start(command, fds)
            texts = {"stdout": bytearray(), "stderr": bytearray()}
            status: Status | None = None

            async def read(name: str) -> None:
                with suppress(OSError):  # a terminal that nobody has open any more
                    await read_all(name)

            async def read_all(name: str) -> None:
                while data := await process.read_some(pipes[name]):
                    texts[name] += data
                    if control.hear:
                        control.hear(name, data)  # type: ignore[arg-type]
                    if command.pty and b"\x1b[6n" in data:
                        os.write(pipes[name], b"\x1b[1;1R")  # as if a terminal were asked, and not a program
                    await emit(name, data.decode("utf-8", "replace"))  # type: ignore[arg-type]

            async def stop() -> None:
                nonlocal status
                status = await control.stopped()
                child.kill()
                if self.plan.living:  # else whoever holds its streams would be waited for
                    os.killpg(child.pid, signal.SIGKILL)

            control.begin(StartedGuest(child.pid, partial(signalled, child.pid), resized))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop)
                with anyio.move_on_after(limits.timeout + 7) as late:  # it is late on time limits, too
                    async with anyio.create_task_group() as readers:
                        for name in pipes:
                            readers.start_soon(read, name)
                if late.cancelled_caught:
                    status = Status.TIMEOUT
                child.kill()
                tasks.cancel_scope.cancel()
            code = await anyio.to_thread.run_sync(child.wait)
        return Result(
            status=status or (Status.ERROR if code else Status.SUCCESS), exit_code=code,
            stdout=texts["stdout"].decode("utf-8", "replace"), stderr=texts["stderr"].decode("utf-8", "replace"),
            duration_ms=(time.monotonic() - started) * 1000,
        )  # fmt: skip

    def _outside(self, word: str) -> str:
        """Where a path of the guest is on the host, there being no difference here."""
        for inside, outside in ((INPUTS, self.inputs), (WORKSPACE, self.folder)):
            if word.startswith(f"{inside}/"):
                return f"{outside}{word.removeprefix(inside)}"
        return word

    def _start(self, command: Command, fds: ExitStack) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
        forgotten = os.open("/etc/passwd", os.O_RDONLY)
        fds.callback(os.close, forgotten)
        stdin = subprocess.DEVNULL
        if self._control == "terminal":
            outer, stdin = os.openpty()
            fds.callback(os.close, outer)
            fds.callback(os.close, stdin)
        pipes: dict[str, int] = {}
        theirs: dict[str, int] = {}
        for name in () if command.pty else ("stdout", "stderr"):
            pipes[name], theirs[name] = os.pipe()
            fds.callback(os.close, pipes[name])
        if command.pty:
            pipes["stdout"], stdin = os.openpty()
            fds.callback(os.close, pipes["stdout"])
            theirs = {"terminal": stdin}
        argv = [*(PRIVATE if self._control == "root" else ()), *command.argv]
        argv = [self._outside(word) for word in argv]
        child = subprocess.Popen(
            argv, stdin=stdin, stdout=theirs.get("stdout", stdin), stderr=theirs.get("stderr", stdin), cwd=self.folder,
            env={**os.environ, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **command.env}, pass_fds=(forgotten,),
            start_new_session=True,
            preexec_fn=_take_terminal if self._control == "terminal" or command.pty else None,  # noqa: PLW1509 (only in tests)
        )  # fmt: skip
        for fd in theirs.values():
            os.close(fd)
        return child, pipes


class LeakyMachine(LeakyLife, LeakyBox):
    def __init__(self, plan: Plan, inputs: Path, control: escape.Control) -> None:
        super().__init__(plan, inputs, control)
        self.tree = LeakyTree(self.folder)


def _take_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read(path: Path) -> bytes:
    """Follows links; but even here nobody waits for a pipe, or reads an endless device to its end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    with suppress(OSError), os.fdopen(fd, "rb") as file:
        return file.read(MOST)
    return b""
