"""What is sent and answered about living sandboxes over HTTP: the bodies of requests, then those of answers."""

from __future__ import annotations

import signal as signals
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt

from belljar.core import errors
from belljar.core.model import Model
from belljar.core.net_change import NetworkChange
from belljar.core.net_entries import NetEntryText
from belljar.core.package_names import Packages
from belljar.core.process import HOME, PROCESS_NAME, Chunk, FileStat, PtySize, User, words
from belljar.core.request import (
    MAX_LABELS,
    MAX_LIFE_SECONDS,
    LabelName,
    LabelText,
    LanguageName,
    Patterns,
    SnapshotName,
    Words,
)
from belljar.core.result import Result
from belljar.core.values import MIB, Moment, Text
from belljar.protocol.requests import Environment, Files, RequestBody, SandboxFields, Timeout, Turn

MAX_STDIN_BYTES = MIB  # of one request
MAX_FRAME_BYTES = 64 * 1024  # that a client may send over a WebSocket at once
MAX_WAIT_SECONDS = 60.0  # that one request waits for something to happen
MAX_LINK_SECONDS = 7 * 86400.0
DEFAULT_EXPIRES_SECONDS = 3600.0
_OUR_IDS = ("bj-", "bs-", "server-")

Labels = Annotated[dict[LabelName, LabelText], Field(max_length=MAX_LABELS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_LIFE_SECONDS, allow_inf_nan=False, strict=True)]
PathInside = Annotated[Text, Field(min_length=1, max_length=4096, description="whole, below /workspace, or ~/…")]


def _no_id_of_ours(value: str) -> str:
    if value.startswith(_OUR_IDS):
        raise ValueError(f"{value[:40]!r} looks like an id of the service: choose another name")
    return value


def _known_signal(value: str | int) -> str | int:
    if isinstance(value, str) and not isinstance(getattr(signals, f"SIG{value.removeprefix('SIG')}", None), int):
        raise ValueError(f'there is no signal {value!r}: write "TERM", or a number')
    return value


ProcessName = Annotated[str, Field(pattern=rf"^({PROCESS_NAME.pattern})?$"), AfterValidator(_no_id_of_ours)]
Line = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda value: words(value) if isinstance(value, str) else value, Text | tuple[Text, ...]),
]
Characters = Annotated[int, Field(ge=1, le=4096, strict=True)]
Signal = Annotated[
    Annotated[str, Field(pattern=r"^(SIG)?[A-Z][A-Z0-9]{1,9}$")] | Annotated[StrictInt, Field(ge=1, le=64)],
    AfterValidator(_known_signal),
]


# --- requests ---


class OpenSandbox(SandboxFields):
    """A living sandbox to be opened: one machine for all its commands, and what they leave running lives on."""

    home: Text = Field(HOME, max_length=256, description="of its programs, writable")
    user: User = "user"
    labels: Labels = Field(default_factory=dict, description="names and values of your own, to find it by")
    expires: Seconds | None = Field(
        DEFAULT_EXPIRES_SECONDS, description="seconds from its opening until it ends; null: as long as may be"
    )
    on_expire: Literal["remove", "pause"] = Field("remove", description="what becomes of it then")
    idle: Seconds | None = Field(None, description="seconds without any use, after which it ends as well")
    snapshot: SnapshotName = Field("", description="the snapshot whose files it begins with")
    packages: Packages = Field(
        None, description="names of packages to be there, or a Python environment of the server below a project root"
    )

    def options(self) -> dict[str, Any]:
        """Returns the fields as keyword arguments of `AsyncSandbox`.

        Raises:
            InvalidRequest: files are named without their content.
        """
        life = {name: getattr(self, name) for name in ("home", "user", "labels", "expires", "on_expire", "packages")}
        rest = {"idle": self.idle} if self.idle is not None else {}
        return self.sandbox_options() | life | rest | {"snapshot": self.snapshot or None, "living": True}


class Extend(RequestBody):
    """More time for a sandbox."""

    seconds: Seconds = Field(description="from now until it ends")


class ChangeNetwork(RequestBody):
    """What a sandbox may reach from now on, in this order: another list, what comes to it, what is refused."""

    net: tuple[NetEntryText, ...] | None = Field(None, description="the whole list instead")
    allow: tuple[NetEntryText, ...] = Field((), description="entries that come to it")
    deny: tuple[NetEntryText, ...] = Field((), description="entries that are refused, though others may allow them")

    def change(self) -> NetworkChange:
        """The change that is asked for."""
        return NetworkChange(net=self.net, allow=self.allow, deny=self.deny)


class SandboxTurn(Turn):
    """One command or snippet in a living sandbox, beside whatever runs there."""

    command: Line | None = Field(None, description="a line of shell, or a program with its arguments")
    cwd: PathInside | None = None
    environment: Environment = Field(default_factory=dict)
    context_files: Files | None = None
    collect: Patterns = Field((), description="patterns of files to bring back")

    def options(self) -> dict[str, Any]:
        """Returns the fields, but what is run, as keyword arguments of `AsyncSandbox.run`.

        Raises:
            InvalidRequest: files are named without their content.
        """
        files = self.context_files or {}
        if None in files.values():
            raise errors.InvalidRequest("context_files: a sandbox takes contents, not names", fix="send a map")
        return {
            "language": self.language, "timeout": self.timeout_seconds, "stdin": self.stdin, "args": self.args,
            "workdir": self.cwd, "env": self.environment or None, "files": files or None,
            "collect": self.collect or None,
        }  # fmt: skip


class StartProcess(RequestBody):
    """A process to be started, which goes on until it ends by itself, is ended, or its sandbox ends."""

    command: Annotated[Text, Field(min_length=1, max_length=128 * 1024)] | Words = Field(
        description="a line of shell, or a program with its arguments"
    )
    cwd: PathInside | None = None
    environment: Environment = Field(default_factory=dict)
    pty: PtySize | None = Field(None, description="gives it a terminal of this size")
    timeout_seconds: Timeout | None = Field(None, description="after which it is ended; none unless given")
    labels: Labels = Field(default_factory=dict)
    id: ProcessName = Field("", description="its name in the sandbox; a new one unless given")


class SendSignal(RequestBody):
    """A signal for a process."""

    signal: Signal = Field(description='"TERM", "INT", 9, …')


class Resize(RequestBody):
    """Another size for a terminal."""

    columns: Characters
    rows: Characters


class ControlMessage(RequestBody):
    """A message of text from whoever is attached to a process: what is to be done besides input."""

    resize: tuple[Characters, Characters] | None = Field(None, description="columns and rows")
    signal: Signal | None = None
    eof: StrictBool = Field(False, description="ends its standard input, after what was sent before")


class MakeDir(RequestBody):
    """A folder to be made, with those above it."""

    path: PathInside


class MoveFile(RequestBody):
    """A file or folder to be renamed or copied."""

    path: PathInside
    to: PathInside


class MakeLink(RequestBody):
    """A link by which whoever has it can read or write one file for a while, without a key."""

    path: PathInside
    method: Literal["GET", "PUT"] = "GET"
    seconds: StrictFloat | StrictInt = Field(600, gt=0, le=MAX_LINK_SECONDS)


class MakeSnapshot(RequestBody):
    """A snapshot to be made of a sandbox's files."""

    labels: Labels = Field(default_factory=dict, description="names and values of your own, to find it by")


class ForkSandbox(RequestBody):
    """A second sandbox with the files of this one."""

    labels: Labels | None = Field(None, description="its own; the same unless given")
    expires: Seconds | None = Field(None, description="until it ends; as asked of this one unless given")


class OpenInterpreter(RequestBody):
    """An interpreter that keeps its variables, in a living sandbox."""

    language: LanguageName = "python"
    environment: Environment = Field(default_factory=dict)


class InterpreterTurn(RequestBody):
    """One turn of an interpreter."""

    code: Annotated[Text, Field(max_length=16 * MIB)]
    timeout_seconds: Timeout | None = Field(None, description="after which it is interrupted; none unless given")
    wait: StrictBool = Field(True, description="answer when it has ended; otherwise at once, with its id")


class Complete(RequestBody):
    """A half-typed name."""

    text: Text = Field(max_length=200)


# --- answers ---


class SandboxRecord(Model):
    """One living sandbox, as it is now, or how it ended."""

    id: str
    caller: str
    backend: str = ""
    state: Literal["running", "paused", "ended", "lost"] = Field(
        "running", description="lost: the service that had it is gone"
    )
    reason: str = Field("", description="why it ended")
    created: Moment
    expires: Moment | None = Field(None, description="when it ends by itself, as things are")
    idle: float | None = Field(None, description="seconds without use after which it ends as well")
    labels: dict[str, str] = Field(default_factory=dict)
    home: str = HOME
    user: User = "user"
    features: tuple[str, ...] = Field((), description="what it can do beside starting processes: pty, dial, pause, …")
    interpreters: tuple[str, ...] = Field((), description="languages that it has interpreters of")
    disk: int = Field(0, description="bytes that each of its folders of its own may hold")
    left_out: tuple[str, ...] = Field((), description="what a fork or snapshot had, and it has not")
    workspace: bool = Field(False, description="whether a folder of the server is granted at /workspace")


class ProcessRecord(Model):
    """One process that was started in a living sandbox."""

    id: str
    pid: int = Field(0, description="its number inside; 0: it never ran")
    command: str
    labels: dict[str, str] = Field(default_factory=dict)
    pty: PtySize | None = Field(None, description="the size that its terminal began with")
    state: Literal["running", "ended", "lost"]
    started: Moment
    last: int = Field(0, description="the number of the newest piece of its output")
    exit_code: int | None = None
    status: str | None = None
    result: Result | None = Field(None, description="when it has ended; its outputs are what is kept of them")
    problem: dict[str, Any] | None = Field(None, description="how it was lost")
    found: bool = Field(
        False,
        description="an earlier server started it: what it prints is not heard any more, and it gets no input",
    )


class SignalSent(Model):
    """Whether there was a process to get a signal."""

    sent: bool


class StdinWritten(Model):
    """How much of what was sent a process has taken."""

    written: int


class OutputPage(Model):
    """Some of a process' output."""

    chunks: tuple[Chunk, ...]
    last: int = Field(description="the number of the newest piece")
    over: bool = Field(description="whether nothing comes after these pieces")


class FilePage(Model):
    """Some entries of a folder, sorted by path."""

    files: tuple[FileStat, ...]
    more: bool = Field(False, description="whether there are more: ask for what is after the last path")


class Exists(Model):
    """Whether there is something of a name."""

    exists: bool


class Made(Model):
    """Whether a folder was made; else it was there."""

    made: bool


class SignedLink(Model):
    """A link to one file of a living sandbox."""

    url: str = Field(description="relative to the server")
    method: Literal["GET", "PUT"]
    expires: Moment


class Listening(Model):
    """Whether something listens on a port."""

    listening: bool


class InterpreterRecord(Model):
    """One interpreter of a living sandbox."""

    id: str
    language: str
    turns: int = 0
    busy: bool = False
    ended: str = Field("", description="how it ended; empty while it lives")


class Interrupted(Model):
    """Whether a turn was under way and was interrupted."""

    interrupted: bool


class Names(Model):
    """What a half-typed name may become."""

    names: tuple[str, ...]
