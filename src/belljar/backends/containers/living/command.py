"""One command of a living box: started by the engine in the box's container, fed, heard, signalled, and ended.

Its exit code is what our launcher beside it tells, and where that was killed, what the engine tells.
"""

from __future__ import annotations

import math
import os
import secrets
import signal as signals
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends.base import Emit
from belljar.backends.containers.living.marks import Marks
from belljar.backends.guest_text import shell_script
from belljar.backends.outcome import KILLED_EXIT_CODE, Ending, Outcome
from belljar.control.control import Control, StartedGuest
from belljar.core import errors
from belljar.core.plan import Command
from belljar.core.process import PtySize
from belljar.core.request import Limits
from belljar.core.result import STREAMS, Result, Status, StreamName
from belljar.host import cgroups, ownership, process, procfs
from belljar.host.docker_api import EngineRefusal, ProgramStreams, asking, refusals
from belljar.host.guest_uid import group_of
from belljar.host.loops import lone_errors
from belljar.host.process_table import number_inside

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer
    from aiodocker.execs import Exec

_START_SECONDS = 60.0  # for the launcher to say its first word
_LAST_OUTPUT_SECONDS = 1.0  # after the end of what was heard last
_KILL_SECONDS = 10.0  # for the launcher to tell the end of what was killed
_LAUNCHER_LOOK_SECONDS = 0.02
_LAST_SAID_SECONDS = 0.1  # for what was printed last, when all have ended
_KILL_FAMILY_SECONDS = 5.0
_LOOK_SECONDS = 2.0  # between questions to the engine whether the command still runs
_RESIZE_TRIES = 20
_RESIZE_PAUSE_SECONDS = 0.05
_UNKNOWN_EXIT_CODE = 255
_FOUND_LOOK_SECONDS = 0.1  # between looks at a process that nothing is heard of
_END_OF_INPUT = b"\x04"  # what Ctrl-D sends
_BECOME_SECONDS = 5.0  # that the launcher's shell may take to become the command; the start is told then in any case
_BECOME_LOOK_SECONDS = 0.002
_OURS = (b'/bin/sh\0-c\0printf "%s runs', b"/usr/bin/env\0--\0", b"/bin/env\0--\0")  # before it is the command
_LAUNCH = shell_script("containers/command")


class LivingContainer(NamedTuple):
    """The container that a command is started in, and what is known of it."""

    container: DockerContainer
    uid: int
    ended: anyio.Event  # of the container
    how: Callable[[], str]  # in words, once it has
    look: Callable[[], Awaitable[None]]  # whether it has, sooner than that would be noticed
    oom_kills: Callable[[], int]  # as far as the host's kernel tells
    full: Callable[[], bool]  # was it killed for memory, as a whole?
    group: cgroups.Group  # where the host sees the guest's processes
    left: Callable[[], bool] = lambda: False  # does it go on without us?
    told: Callable[[str], int | None] | None = None  # what launchers wrote down as exit codes, by their words


class LivingCommand:
    """Runs one command. What it starts may go on after its end."""

    def __init__(
        self, box: str, machine: LivingContainer, command: Command, limits: Limits, emit: Emit, control: Control
    ) -> None:
        self._machine = machine
        self._command = command
        self._control = control
        self._limits = limits
        keep = control.feed is None and control.hear is None
        self.outcome: Outcome = Outcome(box, limits, emit, keep_output=keep)
        word = f"belljar-{secrets.token_hex(8)}".encode()
        self._word = word
        first: StreamName = "stdout" if command.pty else "stderr"
        self._marks = {name: Marks(word, begun=name != first) for name in STREAMS}
        self._teller = self._marks[first]
        self._begun = anyio.Event()
        self._fed = False  # was the launcher told to go on?
        self._over = anyio.Event()  # the launcher told its end, or the engine hung up
        self._listening = anyio.CancelScope()
        self._silent_since = time.perf_counter()
        self._first = 0  # the launcher's number on the host, once it was looked for
        self._kin: set[int] = set()  # the numbers on the host of all that it was seen to have started, and its own
        self._stopping = self._ended = False  # is all that it started to end, and has it?
        self._call: Exec
        self._streams: ProgramStreams
        self._room = AsyncExitStack()  # what the engine needs beside the command while it starts it

    @property
    def launcher(self) -> int:
        """The number inside of our process beside the command; 0: not known yet."""
        return self._teller.said.get(b"ready", 0)

    async def go(
        self, argv: list[str], cwd: str, env: Mapping[str, str], room: Callable[[], AbstractAsyncContextManager[None]]
    ) -> Result:  # fmt: skip
        """Runs it to its end.

        Args:
            argv: the program with its arguments.
            cwd: where.
            env: its variables.
            room: is entered while the engine starts it.

        Raises:
            InvalidRequest: its folder is not there.
            ExecutionFailed: the sandbox has ended, or the engine failed.
        """
        if self._control.stopping:
            self.outcome.end(self._control.reason)
            return self.outcome.result(Ending(None))
        pty = self._command.pty
        code_file = f"/run/.{self._word.decode()}" if self._goes_on else ""
        words = ["/bin/sh", "-c", _LAUNCH, self._word.decode(), cwd, "terminal" if pty else "", code_file, *argv]
        before = self._machine.oom_kills()
        with anyio.CancelScope(shield=True):
            async with asking("the command could not be started", errors.StartFailed):
                self._call = await self._machine.container.exec(
                    words, user=f"{self._machine.uid}:{group_of(self._machine.uid)}", environment=env, stdin=True,
                    tty=pty is not None, workdir="/",
                )  # fmt: skip
        try:
            await self._room.enter_async_context(room())
            stream = self._call.start(detach=False)
            async with ProgramStreams.open(stream, "the command could not be started") as self._streams:
                with lone_errors():
                    await self._attend()
            return await self._result(before)
        finally:
            await self._room.aclose()
            if (not self._over.is_set() or (self._stopping and not self._ended)) and not self._left_alone:
                with anyio.move_on_after(_KILL_SECONDS, shield=True):
                    await self._kill()
            if self._over.is_set() and self._machine.told is not None and self._goes_on:
                self._machine.told(self._word.decode())  # nobody will ask for it

    async def rejoin(self, place: Mapping[str, str | int]) -> Result:
        """Waits for the end of a command that an earlier process of ours started, and stops it as any other.

        The engine is not asked: it forgets what somebody does not hear to its end.

        Args:
            place: what that process wrote down (`StartedGuest.place`).
        """
        assert self._machine.told is not None
        before, number = self._machine.oom_kills(), int(place["runs"])
        first = int(str(place["first"]).split(".")[1])
        if ownership.name_of(first) == place["first"] and first in self._machine.group.pids():
            self._first, self._kin = first, {first}
        self._teller.said.update({b"ready": int(place["launcher"]), b"runs": number})
        self._begun.set()
        await self.outcome.begin()
        self._control.begin(StartedGuest(number, self._signal, self._resize, place))
        try:
            async with anyio.create_task_group() as watchers:
                for watch in (self._clock, self._obey):
                    watchers.start_soon(watch)
                await self._await_launcher()
                code = self._machine.told(str(place["word"]))
                self._teller.said[b"ended"] = _UNKNOWN_EXIT_CODE if code is None else code
                self._over.set()
                watchers.cancel_scope.cancel()
            return await self._result(before)
        finally:
            if not self._over.is_set() and not self._left_alone:
                with anyio.move_on_after(_KILL_SECONDS, shield=True):
                    await self._kill()

    async def _await_launcher(self) -> None:
        while True:
            if not (self._first and number_inside(self._first)) or self._machine.ended.is_set():
                return
            await anyio.sleep(_FOUND_LOOK_SECONDS)

    @property
    def _goes_on(self) -> bool:
        """Whether it is a process that goes on without us where its box does."""
        return self._machine.told is not None and self._control.feed is not None

    @property
    def _left_alone(self) -> bool:
        return self._machine.left() and self._goes_on

    async def _attend(self) -> None:
        async with anyio.create_task_group() as watchers:
            for watch in (self._clock, self._obey, self._watch_start, self._watch_end, self._watch_machine):
                watchers.start_soon(watch)
            await self._listen(watchers.start_soon)
            watchers.cancel_scope.cancel()

    # --- streams ---

    async def _listen(self, start_soon: Callable[..., object]) -> None:
        with self._listening:
            async for name, data in self._streams.parts():
                self._silent_since = math.inf
                if heard := self._marks[name].take(data):
                    await self._take(name, heard, start_soon)
                await self._follow(start_soon)
                self._silent_since = time.perf_counter()
                if self._told_end():
                    self._over.set()
                    if not self._stopping or self._ended:
                        break
        self._over.set()
        with anyio.CancelScope(shield=False):
            for each in STREAMS:
                if held := self._marks[each].rest():
                    await self._take(each, held, start_soon)
            await self.outcome.close_streams()

    async def _take(self, name: StreamName, heard: bytes, start_soon: Callable[..., object]) -> None:
        if self._control.hear is not None:
            self._control.hear(name, heard)
        flooded = await self.outcome.take(name, heard)
        if flooded and self.outcome.verdict is None:
            start_soon(self._end, Status.OUTPUT_LIMIT)

    async def _follow(self, start_soon: Callable[..., object]) -> None:
        """Does what the launcher's lines ask for."""
        if self._begun.is_set():
            return
        if number := self._teller.said.get(b"runs"):
            self._begun.set()
            await self.outcome.begin()
            start_soon(self._tell_start, number)
        elif self.launcher and not self._fed:
            self._fed = True
            start_soon(self._feed)

    async def _tell_start(self, number: int) -> None:
        """Somebody who waits for the start may signal the command right then: so what is ours must have become it."""
        if self._control.hear:
            with anyio.move_on_after(_BECOME_SECONDS):
                await anyio.to_thread.run_sync(_await_command, self._machine.group, number, abandon_on_cancel=True)
        place: dict[str, str | int] = {}
        if self._goes_on:
            first = await anyio.to_thread.run_sync(_seen_from_host, self._machine.group, self.launcher)
            place = {"first": ownership.name_of(first), "launcher": self.launcher, "runs": number}
            place["word"] = self._word.decode()
        self._control.begin(StartedGuest(number, self._signal, self._resize, place))

    def _told_end(self) -> bool:
        ended = b"ended" in self._teller.said
        return ended and (self._command.pty is not None or bool(self._marks["stdout"].said))

    async def _feed(self) -> None:
        """Gives a terminal its size, lets the launcher start the command, and gives that its input."""
        await self._room.aclose()  # the engine has started it, and the guest has not begun
        if self._command.pty:
            await self._resize(self._command.pty)
        if self.outcome.verdict is None:
            await self._streams.send(b"\n")
        if self._command.pty:
            await self._begun.wait()  # else the terminal would show the input before the command is there
        await self._streams.send(self._command.stdin)
        if self._control.feed is not None:
            async for data in self._control.feed:
                await self._streams.send(data)
        if not self._command.pty:
            self._streams.end()
        elif self._control.feed is not None or self._command.stdin:
            await self._streams.send(_END_OF_INPUT)

    async def _resize(self, size: PtySize) -> None:
        """An engine may not know the program yet that it has just started."""
        for attempt in range(_RESIZE_TRIES):
            try:
                with refusals():
                    async with asking("the terminal's size"):
                        await self._call.resize(h=size.rows, w=size.columns)
                return
            except (errors.BelljarError, EngineRefusal):
                if attempt == _RESIZE_TRIES - 1 or self._over.is_set():
                    return
            await anyio.sleep(_RESIZE_PAUSE_SECONDS)

    # --- its end ---

    async def _watch_start(self) -> None:
        with anyio.move_on_after(_START_SECONDS):
            await self._begun.wait()
            return
        self._listening.cancel()

    async def _clock(self) -> None:
        await self.outcome.time_out()
        await self._stop(Status.TIMEOUT)

    async def _obey(self) -> None:
        await self._stop(await self._control.stopped())

    async def _watch_machine(self) -> None:
        await self._machine.ended.wait()
        self._listening.deadline = anyio.current_time() + _LAST_OUTPUT_SECONDS

    async def _watch_end(self) -> None:
        """Asks the engine now and then: it may forget to hang up, and the launcher may have been killed."""
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            with suppress(Exception):
                if (await self._call.inspect()).get("Running") is False:
                    break
        rest = _LAST_OUTPUT_SECONDS
        while rest > 0:
            await anyio.sleep(rest)
            rest = min(_LAST_OUTPUT_SECONDS, _LAST_OUTPUT_SECONDS - (time.perf_counter() - self._silent_since))
        self._listening.cancel()

    async def _stop(self, verdict: Status) -> None:
        """Asks the command and all that it started to end, and ends them when its grace is over.

        What they print meanwhile is kept. The command itself may have ended long before the others.
        """
        first, grace = self.outcome.end(verdict), self._limits.grace
        self._stopping = True
        if first and grace and self._begun.is_set():
            with anyio.move_on_after(grace):
                await anyio.to_thread.run_sync(self._ask_family)
                await anyio.to_thread.run_sync(self._await_family, grace)
        await self._end(verdict)

    async def _end(self, verdict: Status) -> None:
        self.outcome.end(verdict)
        self._stopping = True
        await self._kill()
        self._listening.deadline = anyio.current_time() + _KILL_SECONDS
        if self._begun.is_set() or self._fed:
            while True:  # an engine may tell of its end late, or never
                if not (self._first and number_inside(self._first)):
                    break
                await anyio.sleep(_LAUNCHER_LOOK_SECONDS)
            self._ended = True
            rest = _LAST_SAID_SECONDS if self._told_end() else 2 * _LAST_OUTPUT_SECONDS
            self._listening.deadline = anyio.current_time() + rest

    async def _kill(self) -> None:
        """Ends all that it started. What is not begun never will be: it waits for a line of ours."""
        if self._begun.is_set() or self._fed:
            await anyio.to_thread.run_sync(self._kill_family)
        else:
            self._listening.cancel()

    # By the host's own hand: a box that is full of processes lets no other one start.

    def _look_for_family(self) -> list[int]:
        """All that was started by our process beside the command, which is not among them, as far back as was seen."""
        group = self._machine.group
        if not self._first:
            self._first = _seen_from_host(group, self.launcher)
            self._kin = {self._first} if self._first else set()
        here = group.pids()
        found = procfs.family_of(self._kin, here) if self._first else []
        before = self._kin & set(here) - {self._first}
        self._kin |= set(found)
        return [*found, *before]

    def _has_family(self) -> bool:
        return any(procfs.is_alive(pid) for pid in self._look_for_family())

    def _ask_family(self) -> None:
        """Asks all to end. Our own process has to wait for the last: Podman hears nobody else after its end."""
        self._look_for_family()
        self._tell_launcher(signals.SIGSTOP)
        self._tell_family(signals.SIGTERM)

    def _tell_launcher(self, number: int) -> None:
        if self._first and number_inside(self._first) == self.launcher:
            with suppress(ProcessLookupError):
                os.kill(self._first, number)

    def _await_family(self, seconds: float) -> None:
        """Waits until none is left, or so many seconds."""
        deadline = time.monotonic() + seconds
        while self._has_family() and time.monotonic() < deadline:
            time.sleep(_LAUNCHER_LOOK_SECONDS)

    def _tell_family(self, number: int) -> None:
        process.terminate(self._look_for_family, number=number)

    def _kill_family(self) -> None:
        """Until none is left; then our own process may go on, and tell its last."""
        deadline = time.monotonic() + _KILL_FAMILY_SECONDS
        while time.monotonic() < deadline:
            self._tell_family(signals.SIGKILL)
            if not self._has_family():
                break
            time.sleep(_BECOME_LOOK_SECONDS)
        self._tell_launcher(signals.SIGCONT)

    async def _signal(self, number: int) -> None:
        if self._over.is_set():
            raise ProcessLookupError(3, "it has ended")
        await anyio.to_thread.run_sync(_send, self._machine.group, self._teller.said[b"runs"], number)

    # --- its result ---

    async def _result(self, oom_before: int) -> Result:
        if b"no" in self._marks["stderr"].said or b"no" in self._marks["stdout"].said:
            raise errors.InvalidRequest(
                f"cwd: {self._command.cwd} is no folder in the sandbox", fix="make it first, or leave cwd out"
            )
        code = self._teller.said.get(b"ended")
        if code is None and self.outcome.verdict is None:
            await self._machine.look()
        if self._machine.ended.is_set() and code is None:
            if self._machine.full():
                return self.outcome.result(Ending(KILLED_EXIT_CODE, oom_killed=True))
            if self.outcome.verdict is None:
                raise errors.SessionEnded(f"the sandbox ended while the command ran: {self._machine.how()}")
            return self.outcome.result(Ending(None))
        if not self._begun.is_set() and self.outcome.verdict is None:
            said = self._teller.preamble.decode("utf-8", "replace").strip()
            raise errors.StartFailed(f"the command could not be started: {said[-500:] or 'its launcher said nothing'}")
        if code is None:
            code = await self._code_of_engine()
        code = min(code, _UNKNOWN_EXIT_CODE)
        killed = code == KILLED_EXIT_CODE and self._machine.oom_kills() > oom_before
        return self.outcome.result(Ending(None if self.outcome.verdict else code, killed))

    async def _code_of_engine(self) -> int:
        """The launcher's own, who was killed together with the command."""
        if self.outcome.verdict:
            return KILLED_EXIT_CODE
        async with asking("the command's end"):
            code = (await self._call.inspect()).get("ExitCode")
        return code if isinstance(code, int) else _UNKNOWN_EXIT_CODE


def _await_command(group: cgroups.Group, number: int) -> None:
    """Waits until the process with a number inside is not the launcher's shell any more, nor `env`."""
    pid = _seen_from_host(group, number)
    deadline = time.monotonic() + _BECOME_SECONDS
    with suppress(OSError):  # it has ended
        while time.monotonic() < deadline:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if line and not line.startswith(_OURS):  # it is empty for a moment
                return
            os.readlink(f"/proc/{pid}/exe")  # which what has ended has not
            time.sleep(_BECOME_LOOK_SECONDS)


def _seen_from_host(group: cgroups.Group, number: int) -> int:
    """The number on the host of the process that has a number inside; 0: it has ended."""
    return next((pid for pid in group.pids() if number_inside(pid) == number), 0)


def _send(group: cgroups.Group, number: int, signal: int) -> None:
    """Signals the process with a number inside; raises ProcessLookupError if it has ended."""
    if pid := _seen_from_host(group, number):
        handle = os.pidfd_open(pid)
        try:
            if number_inside(pid) == number:  # else its number on the host is another process' by now
                signals.pidfd_send_signal(handle, signal)
                return
        finally:
            os.close(handle)
    raise ProcessLookupError(3, "it has ended")
