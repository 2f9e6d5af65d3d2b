"""Fakes whose living sandboxes break the contract, each in one way that some real one did or could."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

from anyio.abc import ByteStream, TaskGroup
from anyio.lowlevel import checkpoint

from belljar.backends.base import Emit
from belljar.backends.fake import Fake, FakeBox, FakeProcess, Program, Serve
from belljar.backends.fake_living import FakeLivingBox, _pair
from belljar.backends.fake_tree import FakeTree
from belljar.control.control import Control, StartedGuest
from belljar.core import errors
from belljar.core.plan import Command, Plan
from belljar.core.process import BoxProcess, FileChange, FileStat, PtySize
from belljar.core.result import File, Result, Status, StreamName
from belljar.testing.conformance import scripts


class LivingSaboteur(Fake):
    """A fake with living sandboxes of a class that a subclass names."""

    caught_by: tuple[str, ...] = ()
    machine: type[FakeLivingBox] = FakeLivingBox

    def __init__(self) -> None:
        super().__init__(scripts())

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[FakeBox]:
        if not plan.living:
            async with super().open(plan) as plain:
                yield plain
            return
        async with self.machine.opened(self, plan) as box:
            yield box


class _CommandBox(FakeLivingBox):
    """Its commands pass through hands that a subclass makes dirty."""

    def changed(self, command: Command) -> Command:
        return command

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        return await super().run(self.changed(command), emit, control)


# --- processes ---


class _OneAtATime(FakeLivingBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        if self._running:
            raise errors.Busy("one command at a time", retry_after=1.0)
        return await super().run(command, emit, control)


class RunsOneAtATime(LivingSaboteur):
    caught_by = (
        "commands of one sandbox run side by side",
        "a process goes on while commands come and go, until it is ended",
    )
    machine = _OneAtATime


class _EndsBackground(FakeLivingBox):
    def leave(self, parent: FakeProcess, program: Program, command: str) -> None:
        return None


class EndsTheBackground(LivingSaboteur):
    """What a command leaves running dies with it."""

    caught_by = (
        "what a command leaves in the background outlives it",
        "a command ends at its own end, whoever still has its output open",
    )
    machine = _EndsBackground


class _ExitsWell(FakeLivingBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        result = await super().run(command, emit, control)
        return result.model_copy(update={"exit_code": 0, "status": Status.SUCCESS})


class LosesExitCodes(LivingSaboteur):
    caught_by = (
        "an exit code is the one that the process ended with",
        "starting a program that does not exist is a result with exit code 127",
        "the exit code of a process that dies of a signal tells which",
        "many processes run at once, and each ends with its own result",
    )
    machine = _ExitsWell


class _SignalsAll(FakeLivingBox):
    async def _play(self, process: FakeProcess, program: Program, control: Control) -> tuple[int | None, Status | None]:
        begin = control.begin

        async def signal_all(number: int) -> None:
            for other, _ in tuple(self._running.values()):
                await other.receive_signal(number)

        control.begin = lambda guest: begin(StartedGuest(guest.pid, signal_all, guest.resize))  # type: ignore[method-assign]
        return await super()._play(process, program, control)


class SignalsEverybody(LivingSaboteur):
    """A signal to one process goes to the whole container."""

    caught_by = ("a signal reaches its process, and no other",)
    machine = _SignalsAll


class _EndsAll(FakeLivingBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        result = await super().run(command, emit, control)
        if result.status in (Status.ABORTED, Status.TIMEOUT):
            for other, _ in tuple(self._running.values()):
                await other.receive_signal(9)
            while self._running:
                await checkpoint()
        return result


class EndsTheBoxWithACommand(LivingSaboteur):
    """A timeout, or an end, of one command is that of all."""

    caught_by = (
        "killing a process ends what it started, and nothing else",
        "a process' timeout ends it alone, and its output is returned",
    )
    machine = _EndsAll


class _ListsItself(FakeLivingBox):
    async def processes(self) -> tuple[BoxProcess, ...]:
        return (BoxProcess(pid=1, command="init"), *await super().processes())


class ListsItsOwnProcesses(LivingSaboteur):
    caught_by = ("the list of processes has what runs, by the kernel's word, and nothing of ours",)
    machine = _ListsItself


class _NoVariables(_CommandBox):
    def changed(self, command: Command) -> Command:
        return command.model_copy(update={"env": {}})


class ForgetsVariables(LivingSaboteur):
    caught_by = ("variables are those of the sandbox, and of the process before them",)
    machine = _NoVariables


class _Elsewhere(_CommandBox):
    def changed(self, command: Command) -> Command:
        return command.model_copy(update={"cwd": "/"})


class StartsElsewhere(LivingSaboteur):
    caught_by = ("a process starts in /workspace, or in the folder that was named",)
    machine = _Elsewhere


# --- output and input ---


class _HearsText(FakeLivingBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        hear = control.hear

        def as_text(stream: StreamName, data: bytes) -> None:
            if hear:
                hear(stream, data.decode("utf-8", "replace").encode())

        control.hear = as_text if hear else None
        return await super().run(command, emit, control)


class TakesOutputForText(LivingSaboteur):
    """llm-sandbox #145 and its kin."""

    caught_by = ("output is bytes, and what is not UTF-8 is kept as it is",)
    machine = _HearsText


class _HearsOneStream(FakeLivingBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        hear = control.hear
        control.hear = (lambda _, data: hear("stdout", data)) if hear else None
        return await super().run(command, emit, control)


class MergesLivingStreams(LivingSaboteur):
    caught_by = ("output is numbered from one, both streams in the order in which it came",)
    machine = _HearsOneStream


# --- terminals ---


class _NoTerminal(_CommandBox):
    def changed(self, command: Command) -> Command:
        return command.model_copy(update={"pty": None})


class GivesNoTerminal(LivingSaboteur):
    caught_by = ("a process has a terminal of the size that was asked for, or none",)
    machine = _NoTerminal


class _UsualSize(_CommandBox):
    def changed(self, command: Command) -> Command:
        return command.model_copy(update={"pty": command.pty and PtySize()})


class ForgetsTheSize(LivingSaboteur):
    caught_by = ("a process has a terminal of the size that was asked for, or none",)
    machine = _UsualSize


# --- ports ---


class _OnePortForAll(FakeLivingBox):
    shared: ClassVar[dict[int, tuple[FakeProcess, Serve]]] = {}

    def __init__(self, backend: Fake, plan: Plan, tasks: TaskGroup) -> None:
        super().__init__(backend, plan, tasks)
        self.ports = self.shared


class SharesPorts(LivingSaboteur):
    """All sandboxes are on one network."""

    caught_by = ("sandboxes have the same port side by side, each its own",)
    machine = _OnePortForAll


class _DialsAnything(FakeLivingBox):
    async def dial(self, port: int) -> ByteStream:
        if port in self.ports:
            return await super().dial(port)
        near, far = _pair()
        near.close()
        far.close()
        return near


class DialsAnything(LivingSaboteur):
    """A relay that takes every connection, and finds out later that nobody is there."""

    caught_by = ("dialling a port that nobody listens on is refused, as a program would see it",)
    machine = _DialsAnything


# --- files ---


class _DirtyTreeBox(FakeLivingBox):
    trees: type[FakeTree] = FakeTree

    def __init__(self, backend: Fake, plan: Plan, tasks: TaskGroup) -> None:
        super().__init__(backend, plan, tasks)
        self.tree = self.trees(self)


class _FollowingTree(FakeTree):
    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return super().reading(self._links.get(path, path))


class _FollowingBox(_DirtyTreeBox):
    trees = _FollowingTree


class FollowsLinksOutside(LivingSaboteur):
    """Judge0 CVE-2024-28185 and its kin."""

    caught_by = ("no link is followed, neither to read nor to write nor to remove",)
    machine = _FollowingBox


class _ForgetfulTree(FakeTree):
    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        self.modes.pop(path, None)
        await super().write(path, content)


class _ForgetfulTreeBox(_DirtyTreeBox):
    trees = _ForgetfulTree


class ForgetsPermissions(LivingSaboteur):
    caught_by = (
        "a file has the permissions that it was given, and keeps them when it is written again",
        "files are touched with its programs' rights, and no more",
        "a sandbox begins with the files of a snapshot, as they were, and with no process",
    )
    machine = _ForgetfulTreeBox


class _FlatTree(FakeTree):
    async def list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        return await super().list(path, 1)


class _FlatTreeBox(_DirtyTreeBox):
    trees = _FlatTree


class ListsOneLevel(LivingSaboteur):
    caught_by = ("a list goes as deep as it was asked to, sorted by whole path",)
    machine = _FlatTreeBox


class _OpenTree(FakeTree):
    def _writable(self, path: str) -> None:
        return None


class _OpenTreeBox(_DirtyTreeBox):
    trees = _OpenTree


class WritesTheSystem(LivingSaboteur):
    """Files are written as root of the container, wherever."""

    caught_by = (
        "the system's own files can be read and not be changed",
        "the kernel's files are no files of the sandbox",
    )
    machine = _OpenTreeBox


class _TrustingTree(FakeTree):
    async def _lay(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        where = posixpath.normpath(f"{path}/{member.name}")
        self._box.store(where, File(path=posixpath.relpath(where, "/workspace"), content=b""))


class _TrustingTreeBox(_DirtyTreeBox):
    trees = _TrustingTree


class UnpacksAnything(LivingSaboteur):
    """An archive is unpacked as its names say."""

    caught_by = (
        "an archive that leads out of its folder, or holds a device, is refused",
        "a folder is packed with permissions and links, and unpacked as it was",
    )
    machine = _TrustingTreeBox


class _DeepWatchTree(FakeTree):
    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[FileChange]]:
        async with super().watch(path, recursive=True) as changes:
            yield changes


class _DeepWatchBox(_DirtyTreeBox):
    trees = _DeepWatchTree


class TellsTooMuch(LivingSaboteur):
    caught_by = ("folders below are watched if that was asked for, also new ones",)
    machine = _DeepWatchBox


# --- life and limits ---


class _SharesDisk(FakeLivingBox):
    shared: ClassVar[dict[str, File]] = {}

    def __init__(self, backend: Fake, plan: Plan, tasks: TaskGroup) -> None:
        super().__init__(backend, plan, tasks)
        self.disk = self.shared


class SharesFiles(LivingSaboteur):
    """sandbox-sdk #235: a sandbox that has the state of another."""

    caught_by = ("two sandboxes see nothing of each other's files and processes",)
    machine = _SharesDisk


class _NeverStands(FakeLivingBox):
    async def pause(self) -> None:
        return None


class NeverPauses(LivingSaboteur):
    """It says that it is paused."""

    caught_by = ("a paused sandbox stands still, and goes on where it was",)
    machine = _NeverStands


class _EachItsLimit(FakeLivingBox):
    def alive(self, process: FakeProcess) -> Sequence[FakeProcess]:
        return (process,)


class LimitsEachCommand(LivingSaboteur):
    """The limit of the sandbox is given to each command anew."""

    caught_by = ("processes are limited for all commands together, and one that is refused goes on",)
    machine = _EachItsLimit


class _OtherHome(FakeLivingBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        return await super().run(command.model_copy(update={"env": {"HOME": "/tmp", **command.env}}), emit, control)


class HasItsHomeElsewhere(LivingSaboteur):
    caught_by = ("HOME, ~ and the user's entry are one folder, which can be written to",)
    machine = _OtherHome


LIVING_SABOTEURS: tuple[type[LivingSaboteur], ...] = tuple(LivingSaboteur.__subclasses__())
