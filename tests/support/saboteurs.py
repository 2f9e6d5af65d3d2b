"""Fakes that break the contract, each in one way that some real sandbox once did. The suite must catch them all."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from belljar.backends import inputs
from belljar.backends.base import Emit
from belljar.backends.fake import Fake, FakeBox
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import Command, Plan
from belljar.core.request import Limits
from belljar.core.result import Collected, EventKind, File, Result, Status
from belljar.testing.conformance import scripts


class Saboteur(Fake):
    """A fake whose commands, events, results and files pass through hands that a subclass makes dirty."""

    caught_by: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(scripts())

    def plan(self, plan: Plan) -> Plan:
        return plan

    def command(self, command: Command) -> Command:
        return command

    def told(self, kind: EventKind, text: str) -> list[tuple[EventKind, str]]:
        return [(kind, text)]

    def result(self, result: Result) -> Result:
        return result

    def collected(self, box: FakeBox, found: Collected) -> Collected:
        return found

    def read(self, box: FakeBox, path: str) -> bytes | None:
        """Returns what it wrongly reads instead of the file."""
        return None

    def box(self, plan: Plan) -> FakeBox:
        return DirtyBox(self, plan)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[FakeBox]:
        async with super().open(plan):
            yield self.box(self.plan(plan))


class DirtyBox(FakeBox):
    _backend: Saboteur

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        async def tell(kind: EventKind, text: str) -> None:
            for other_kind, other_text in self._backend.told(kind, text):
                await emit(other_kind, other_text)

        return self._backend.result(await super().run(self._backend.command(command), tell, control))

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        wrong = self._backend.read(self, path)
        return super().reading(path) if wrong is None else inputs.whole(wrong)

    async def get(self, patterns: Sequence[str]) -> Collected:
        return self._backend.collected(self, await super().get(patterns))


def _with(result: Result, **changes: object) -> Result:
    return result.model_copy(update=changes)


def _limits(command: Command, **changes: object) -> Command:
    assert command.limits
    return command.model_copy(update={"limits": Limits.model_validate(command.limits.model_dump() | changes)})


class DropsStderr(Saboteur):
    caught_by = ("what is printed to stderr is in stderr and nowhere else", "a cut of stderr leaves stdout whole")

    def result(self, result: Result) -> Result:
        return _with(result, stderr="")


class SwapsStreams(Saboteur):
    caught_by = ("what is printed to stdout is in stdout and nowhere else",)

    def result(self, result: Result) -> Result:
        return _with(result, stdout=result.stderr, stderr=result.stdout)


class MergesStreams(Saboteur):
    caught_by = ("stdout and stderr written in turns are kept apart",)

    def result(self, result: Result) -> Result:
        return _with(result, stdout=result.stdout + result.stderr)


class DropsEvents(Saboteur):
    caught_by = ("events of one stream, put together, are that stream of the result",)

    def told(self, kind: EventKind, text: str) -> list[tuple[EventKind, str]]:
        return [] if kind in ("stdout", "stderr") else [(kind, text)]


class RepeatsEvents(Saboteur):
    caught_by = (
        "the first event is started and there is one of it",
        "two thousand lines arrive in the order they were printed",
    )

    def told(self, kind: EventKind, text: str) -> list[tuple[EventKind, str]]:
        return [(kind, text)] * 2


class TellsAtTheEnd(Saboteur):
    """Output that is only told when all is over."""

    caught_by = ("output is told while the guest still runs",)

    def box(self, plan: Plan) -> FakeBox:
        return LateBox(self, plan)


class LateBox(FakeBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        kept: list[tuple[EventKind, str]] = []

        async def keep(kind: EventKind, text: str) -> None:
            kept.append((kind, text))

        result = await super().run(command, keep, control)
        for kind, text in kept:
            await emit(kind, text)
        return result


class StripsOutput(Saboteur):
    caught_by = (
        "what is printed to stdout is in stdout and nowhere else",
        "line ends of all kinds are left as they are",
    )

    def result(self, result: Result) -> Result:
        return _with(result, stdout=result.stdout.strip())


class NormalisesLineEnds(Saboteur):
    caught_by = ("line ends of all kinds are left as they are",)

    def result(self, result: Result) -> Result:
        return _with(result, stdout=result.stdout.replace("\r\n", "\n"))


class AsciiOnly(Saboteur):
    caught_by = (
        "emoji, right-to-left text and combining marks come through unchanged",
        "a character split across two writes is one character, in events too",
        "bytes that are not UTF-8 become U+FFFD and harm nothing",
    )

    def result(self, result: Result) -> Result:
        return _with(result, stdout=result.stdout.encode("ascii", "ignore").decode())


class CutsSilently(Saboteur):
    """inspect_ai #4778: cut, and reported as a success."""

    caught_by = (
        "one byte over the limit is cut, flagged and has status output_limit",
        "a cut of stderr leaves stdout whole",
    )

    def result(self, result: Result) -> Result:
        status = Status.SUCCESS if result.status is Status.OUTPUT_LIMIT else result.status
        return _with(result, truncated=False, status=status)


class KeepsOnlyTheHead(Saboteur):
    caught_by = ("of output over the limit the head and the tail are kept, and the cut is told",)

    def result(self, result: Result) -> Result:
        return _with(result, stdout=result.stdout[:500])


class LatesTimeout(Saboteur):
    """daytona #2602: the timeout fires only after the command ended."""

    caught_by = ("a guest over its time has status timeout, and its partial output is returned",)

    def command(self, command: Command) -> Command:
        assert command.limits
        return _limits(command, timeout=command.limits.timeout + 4)


class LosesPartialOutput(Saboteur):
    """inspect_ai #4108."""

    caught_by = (
        "a guest over its time has status timeout, and its partial output is returned",
        "a guest over its memory has status oom_killed, and its partial output is returned",
        "a cancelled run is aborted at once, with its partial output",
    )

    def result(self, result: Result) -> Result:
        return result if result.status in (Status.SUCCESS, Status.ERROR) else _with(result, stdout="", stderr="")


class CallsEverythingAnError(Saboteur):
    """One verdict for all that is not success."""

    caught_by = (
        "a guest over its time has status timeout, and its partial output is returned",
        "a guest over its memory has status oom_killed, and its partial output is returned",
        "a guest that dies of a full /tmp has status disk_limit",
        "a cancelled run is aborted at once, with its partial output",
    )

    def result(self, result: Result) -> Result:
        return result if result.ok else _with(result, status=Status.ERROR)


class FlattensExitCodes(Saboteur):
    caught_by = (
        "exit code 42 is told as 42",
        "exit code 255 is told as 255",
        "a guest that dies of SIGSEGV has exit code 139",
    )

    def result(self, result: Result) -> Result:
        return _with(result, exit_code=min(result.exit_code or 0, 1))


class RaisesForTheGuest(Saboteur):
    """The guest's failure in our voice."""

    caught_by = ("a program that does not exist is a result with exit code 127", "exit code 1 is told as 1")

    def result(self, result: Result) -> Result:
        if result.exit_code:
            raise errors.ExecutionFailed(f"exit code {result.exit_code}")
        return result


class IgnoresMemoryLimit(Saboteur):
    """prime-rl #389: limits that never worked."""

    caught_by = ("a guest over its memory has status oom_killed, and its partial output is returned",)

    def command(self, command: Command) -> Command:
        return _limits(command, memory=2**40)


class IgnoresPidsLimit(Saboteur):
    caught_by = ("a fork over the limit is refused to the guest, which survives it",)

    def command(self, command: Command) -> Command:
        return _limits(command, pids=4000)


class IgnoresDiskLimit(Saboteur):
    caught_by = (
        "a guest that dies of a full /workspace has status disk_limit",
        "a guest that copes with a full disk goes on",
    )

    def plan(self, plan: Plan) -> Plan:
        return plan.model_copy(update={"limits": plan.limits.model_copy(update={"disk": 2**40})})


class DropsStdin(Saboteur):
    caught_by = ("text given to stdin is read back", "two megabytes of stdin arrive whole")

    def command(self, command: Command) -> Command:
        return command.model_copy(update={"stdin": b""})


class LeaksHostEnvironment(Saboteur):
    caught_by = ("no variable of the host is visible",)

    def command(self, command: Command) -> Command:
        return command.model_copy(update={"env": {**os.environ, **command.env}})


class DropsEnvironment(Saboteur):
    caught_by = ("variables of the request are set in the guest",)

    def command(self, command: Command) -> Command:
        return command.model_copy(update={"env": {}})


class StartsInTheRoot(Saboteur):
    caught_by = ("a run starts in /workspace",)

    def command(self, command: Command) -> Command:
        return command.model_copy(update={"cwd": "/"})


class SplitsWords(Saboteur):
    """Shell injection through names: llm-sandbox #147."""

    caught_by = ("a command's words reach the program untouched by any shell",)

    def command(self, command: Command) -> Command:
        return command.model_copy(update={"argv": tuple(word for arg in command.argv for word in arg.split(" "))})


class FilesAsText(Saboteur):
    caught_by = ("text and binary files arrive byte for byte",)

    def command(self, command: Command) -> Command:
        plain = {name: data.decode("utf-8", "replace").encode() for name, data in command.files.items()}
        return command.model_copy(update={"files": plain})

    def plan(self, plan: Plan) -> Plan:
        plain = {name: data.decode("utf-8", "replace").encode() for name, data in plan.files.items()}
        return plan.model_copy(update={"files": plain})


class ReturnsInputs(Saboteur):
    caught_by = ("inputs and the code itself are not returned as outputs",)

    def collected(self, box: FakeBox, found: Collected) -> Collected:
        inputs = tuple(File(path=name, content=data) for name, data in box.plan.files.items())
        return Collected(found.files + inputs, found.left_out)


class FollowsLinks(Saboteur):
    """Judge0 CVE-2024-28185 and its kin."""

    caught_by = (
        "a symbolic link is not followed, and that is told",
        "reading a link that the guest made reads nothing",
    )

    def collected(self, box: FakeBox, found: Collected) -> Collected:
        followed = tuple(File(path=name, content=b"root:x:0:0") for name in box.links)
        return Collected(found.files + followed, ())

    def read(self, box: FakeBox, path: str) -> bytes | None:
        return b"root:x:0:0" if path in box.links else None


class ForgetsExecutable(Saboteur):
    caught_by = ("the executable flag is kept",)

    def collected(self, box: FakeBox, found: Collected) -> Collected:
        return Collected(tuple(file.model_copy(update={"executable": False}) for file in found.files), found.left_out)


class SharesState(Saboteur):
    """sandbox-sdk #235: a box that has the state of an older one."""

    caught_by = (
        "nothing is left in /workspace, /tmp or /dev/shm from one run to the next",
        "nothing is left from one sandbox to the next",
        "two sandboxes share no files",
    )

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, File] = {}

    def box(self, plan: Plan) -> FakeBox:
        box = super().box(plan)
        box.disk = self.shared
        return box


class ForgetsBetweenCommands(Saboteur):
    caught_by = ("what a command leaves is there for the next one and for the caller",)

    def box(self, plan: Plan) -> FakeBox:
        return ForgetfulBox(self, plan)


class ForgetfulBox(FakeBox):
    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        result = await super().run(command, emit, control)
        self.disk.clear()
        return result


class ReusesIds(Saboteur):
    caught_by = ("every sandbox has an id of its own, and its runs tell it",)

    def result(self, result: Result) -> Result:
        return _with(result, container_id="box-1")


class InventsFigures(Saboteur):
    caught_by = (
        "the startup took some time, and the whole run no less",
        "the cpu time is what the guest used, or is not told",
        "the memory figure is plausible, or is not told",
    )

    def result(self, result: Result) -> Result:
        return _with(result, startup_ms=0.0, cpu_ms=0.0, memory_used_mb=-1.0)


class MixesRuns(Saboteur):
    """Two runs at once write into each other's output."""

    caught_by = ("eight runs at once mix neither output nor files of the same name",)

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def result(self, result: Result) -> Result:
        before, self.last = self.last, result.stdout
        return _with(result, stdout=before or result.stdout)


class TakesProgramsForCode(Saboteur):
    """Only code can be run, and the last word of a command is taken for its file."""

    caught_by = ("a program is run as one, or is denied, and its last word is never taken for code",)

    def result(self, result: Result) -> Result:
        return _with(result, stdout="taken for code\n")


class SeesTheHost(Saboteur):
    """The guest's table of processes is the host's."""

    caught_by = ("no process of the host is visible",)

    def result(self, result: Result) -> Result:
        return _with(result, stdout="200\n")


class ConnectsAnyway(Saboteur):
    caught_by = (
        "a port on the host's loopback cannot be reached",
        "an address of the internet cannot be reached",
        "no name can be resolved",
    )

    def result(self, result: Result) -> Result:
        return _with(result, stdout="connected\n")


SABOTEURS: tuple[type[Saboteur], ...] = tuple(Saboteur.__subclasses__())
