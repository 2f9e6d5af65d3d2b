"""The only file that starts host processes: argv lists, a cleared environment, a deadline."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread

from belljar.core import errors

_ENV = "/usr/bin/env"  # coreutils' from 8.31 on (2019)
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class Child:
    """A started process. Its holder must `wait` for it, or `kill` it and then `wait`."""

    def __init__(
        self, argv: Sequence[str], *, stdin: int, stdout: int, stderr: int, fds: Sequence[int] = (),
        env: Mapping[str, str] = _ENVIRONMENT,
    ) -> None:  # fmt: skip
        # No preexec_fn, user or group: any of them would make Python fork a copy of this whole process
        # instead of using vfork, which stays fast however large the process is. A session of its own: Ctrl-C on a
        # terminal goes to all of ours, and what becomes of a guest then is for us to decide; and a guest that begins
        # no session by itself finds no terminal of ours behind /dev/tty.
        self._popen = subprocess.Popen(
            list(argv), stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=tuple(fds), env=dict(env), cwd="/",
            start_new_session=True,
        )  # fmt: skip
        self.pid: int = self._popen.pid
        self._exit: int | None = None
        self._reaping = threading.Lock()
        try:
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
            self._pidfd = None

    def ended(self) -> bool:
        """Whether it has exited, without waiting."""
        if self._exit is None and self._pidfd is not None and select.select([self._pidfd], [], [], 0)[0]:
            self._reap(os.WNOHANG)
        return self._exit is not None

    def kill(self) -> None:
        """Sends SIGKILL, if it has not ended."""
        if self._exit is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def kill_group(self) -> None:
        """Sends SIGKILL to it and to what it started, if it has not ended."""
        with self._reaping:  # until it is reaped, its group's number is nobody else's
            if self._exit is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Waits for its end; returns its exit code, or the negative number of the signal that ended it."""
        if self._exit is None:
            if self._pidfd is not None:
                await anyio.wait_readable(self._pidfd)
                self._reap(os.WNOHANG)
            else:
                await anyio.to_thread.run_sync(self._reap, 0, abandon_on_cancel=True)
        assert self._exit is not None
        return self._exit

    def reap(self, seconds: float) -> bool:
        """Waits for the end of what was killed, without an event loop; True if it has come."""
        if self._exit is None and self._pidfd is not None:
            select.select([self._pidfd], [], [], seconds)
        return self.ended()

    def _reap(self, flags: int) -> None:
        with self._reaping:  # where there are no pidfds, a wait that was given up goes on in its thread
            if self._exit is None:
                _, status = os.waitpid(self.pid, flags)
                self._exit = self._popen.returncode = os.waitstatus_to_exitcode(status)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


_HEARD = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM) if hasattr(signal, "SIGHUP") else ()


def hearing() -> tuple[str, ...]:
    """Returns the command line before a program that lets it hear the signals that we ignore.

    What a process ignores, all that it starts ignores too, and a shell cannot undo that: under `&` or `nohup` nothing
    could interrupt a guest. Empty where we ignore none, or where `env` cannot do it.
    """
    names = tuple(number.name.removeprefix("SIG") for number in _HEARD if signal.getsignal(number) is signal.SIG_IGN)
    words = (_ENV, f"--default-signal={','.join(names)}") if names else ()
    return words if words and _works(words) else ()


@cache
def system_program(name: str) -> str:
    """Returns the whole path of a program of the system's, for where a guest's own PATH would be searched.

    Raises:
        NotAvailable: this system does not have it.
    """
    for folder in ("/usr/bin", "/bin"):
        if os.access(path := f"{folder}/{name}", os.X_OK):
            return path
    raise errors.NotAvailable(f"this system has no {name}", fix="install util-linux")


@cache
def _works(words: Sequence[str]) -> bool:
    try:
        return (
            subprocess.run([*words, "true"], env=_ENVIRONMENT, capture_output=True, timeout=10, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def terminate(
    members: Callable[[], Sequence[int]], spare: Sequence[int] = (), number: int = signal.SIGTERM
) -> int:  # fmt: skip
    """Sends a signal to processes of a guest, and to nobody who got the number of one that has ended meanwhile.

    Args:
        members: Lists the guest's processes. It is asked again when a handle on each is held.
        spare: Those of them that get no signal.
        number: The signal.

    Returns:
        How many got it.
    """
    with ExitStack() as stack:
        handles: dict[int, int] = {}
        for pid in set(members()) - set(spare):
            with suppress(OSError):
                handles[pid] = os.pidfd_open(pid)
                stack.callback(os.close, handles[pid])
        told = 0
        for pid in handles.keys() & set(members()):
            with suppress(OSError):
                signal.pidfd_send_signal(handles[pid], number)
                told += 1
    return told


class Output(NamedTuple):
    """What a host command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str


async def output(
    argv: Sequence[str], *, deadline: float = 10.0, limit: int = 1 << 20, env: Mapping[str, str] = _ENVIRONMENT,
    fds: Sequence[int] = (),
) -> Output:  # fmt: skip
    """Runs a trusted host command to its end.

    Args:
        argv: the program and its arguments.
        deadline: seconds after which it is killed, and what it started.
        limit: bytes that are kept of each stream.
        env: its variables.
        fds: descriptors that it keeps open.

    Raises:
        TimeoutError: it did not end in time.
        OSError: it could not be started.
    """
    with ExitStack() as pipes:
        child, stdout, stderr = _piped(argv, pipes, fds, env)
        texts: dict[int, bytes] = {stdout: b"", stderr: b""}

        async def read(fd: int) -> None:
            while data := await read_some(fd):
                texts[fd] = (texts[fd] + data)[:limit]

        try:
            with anyio.fail_after(deadline):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read, stdout)
                    tasks.start_soon(read, stderr)
                code = await child.wait()
        finally:
            child.kill_group()
            with anyio.CancelScope(shield=True):
                await child.wait()
    return Output(code, texts[stdout].decode("utf-8", "replace"), texts[stderr].decode("utf-8", "replace"))


def _piped(argv: Sequence[str], ours: ExitStack, fds: Sequence[int], env: Mapping[str, str]) -> tuple[Child, int, int]:
    """Starts a process with our ends of its stdout and stderr, which are closed with `ours`."""
    with ExitStack() as child_side:
        pipes = []
        for _ in range(2):
            pipes.append(os.pipe())
            ours.callback(os.close, pipes[-1][0])
            child_side.callback(os.close, pipes[-1][1])
        (stdout, out), (stderr, err) = pipes
        started = Child(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, fds=fds, env=env)
        return started, stdout, stderr


async def read_some(fd: int, size: int = 1 << 16) -> bytes:
    """Waits for the next bytes of a pipe and returns them; they are empty at its end.

    Whatever else is to be done is done before: who writes faster than we read must not be all that we hear.
    """
    os.set_blocking(fd, False)
    await anyio.lowlevel.checkpoint()
    while True:
        try:
            return os.read(fd, size)
        except BlockingIOError:
            await anyio.wait_readable(fd)


async def write_all(fd: int, data: bytes) -> None:
    """Writes all of data to a pipe; a reader that went away is not an error."""
    os.set_blocking(fd, False)
    view = memoryview(data)
    with suppress(BrokenPipeError):
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                await anyio.wait_writable(fd)
