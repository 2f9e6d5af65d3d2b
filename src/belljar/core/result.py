"""What happened: the result of a run, the events on the way, the files and the resources it used."""

import time
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from pydantic import Field

from belljar.core.capabilities import Guarantees
from belljar.core.model import Model
from belljar.core.values import Bytes, Moment

StreamName = Literal["stdout", "stderr"]
STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
TIMEOUT_EXIT_CODE = 124  # that of timeout(1)


class Status(StrEnum):
    """How a run ended. Every run has exactly one."""

    SUCCESS = "success"
    """It ran to its end with exit code 0."""
    ERROR = "error"
    """It ran to its end with another exit code, or by a signal of its own."""
    TIMEOUT = "timeout"
    """The wall clock ran out."""
    OOM_KILLED = "oom_killed"
    """It ran out of memory, and the kernel ended it."""
    FUEL_EXHAUSTED = "fuel_exhausted"
    """It used up its instructions (wasm)."""
    OUTPUT_LIMIT = "output_limit"
    """Its output was cut, or ended the run."""
    DISK_LIMIT = "disk_limit"
    """There was no space left in /workspace or /tmp."""
    KILLED = "killed"
    """It was ended from outside, and not by you."""
    ABORTED = "aborted"
    """You stopped it."""
    SYSTEM_FAILURE = "system_failure"
    """There is no outcome: Belljar failed or refused. Only `execute_code` answers so; others raise."""


class ErrorType(StrEnum):
    """What kind of failure a guest had."""

    TIMEOUT = "TIMEOUT"
    OOM_KILLED = "OOM_KILLED"
    NETWORK_ERROR = "NETWORK_ERROR"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    SYNTAX_ERROR = "SYNTAX_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    MISSING_PACKAGE = "MISSING_PACKAGE"
    FUEL_EXHAUSTED = "FUEL_EXHAUSTED"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    DISK_LIMIT = "DISK_LIMIT"
    PROCESS_LIMIT = "PROCESS_LIMIT"
    SYSTEM_FAILURE = "SYSTEM_FAILURE"


class GuestException(Model):
    """An exception that ended a turn of a session, as its interpreter tells it."""

    name: str
    """Its class, such as "ZeroDivisionError"."""
    value: str = ""
    """What it says."""
    traceback: str = ""
    """Where it came from, as it is printed: the guest's own frames."""


class Failure(Model):
    """A guest's failure, described so that an agent can act on it."""

    error_type: ErrorType
    """The kind of failure."""
    message: str
    """What happened, in one sentence."""
    suggestion: str
    """What to change so that the next run succeeds."""
    context: dict[str, Any] = Field(default_factory=dict)
    """Facts about it, such as the line, the exception or the missing package."""
    exception: GuestException | None = None
    """The exception that ended a session's turn; None where another thing did."""


class File(Model):
    """One file that goes into a sandbox or comes out of it."""

    path: str
    """Its name, relative to /workspace."""
    content: Bytes = b""
    """Its bytes."""
    executable: bool = False
    """Whether it may be executed."""
    read_only: bool = False
    """Whether the guest may not change it."""

    @property
    def text(self) -> str:
        """The content as text; what is not UTF-8 is replaced."""
        return self.content.decode("utf-8", "replace")


FileTree = tuple[File, ...]


class Collected(NamedTuple):
    """The files that were brought back from a sandbox, and those that were not."""

    files: FileTree
    left_out: tuple[str, ...] = ()  # what was not taken, and why: links, devices, what was too large


class Entry(NamedTuple):
    """One name in the folder of a sandbox."""

    path: str
    """Its name, relative to /workspace."""
    kind: str
    """ "file", "folder", "link", "pipe" or "device or socket"."""
    size: int
    """Bytes."""


MimeBundle = dict[str, Any]


class Result(Model):
    """The outcome of one run.

    `print(result)` shows it readably, a notebook shows figures and tables, and its `repr` is exact.
    """

    status: Status
    """How the run ended."""
    exit_code: int | None = Field(None, description="of the guest's program; 124 at a timeout, none if it was stopped")
    stdout: str = ""
    """What the guest printed; head and tail if `truncated`."""
    stderr: str = ""
    """What it printed to stderr."""
    truncated: bool = False
    """Whether output is missing in the middle."""
    duration_ms: float = 0.0
    """Milliseconds that the guest ran."""
    startup_ms: float = 0.0
    """Milliseconds that the sandbox took to start."""
    memory_used_mb: float | None = None
    """The most memory it held, in MB; None where that is not known."""
    cpu_ms: float | None = None
    """Milliseconds of CPU time; None where that is not known."""
    fuel_consumed: int | None = None
    """Instructions it used (wasm)."""
    files: FileTree = ()
    """The files that `collect` named."""
    results: tuple[MimeBundle, ...] = ()
    """Values and figures of a session's turn, by MIME type."""
    error: Failure | None = None
    """Why it failed; None if it did not."""
    backend: str = ""
    """The backend that ran it."""
    container_id: str = ""
    """The id of its sandbox."""
    guarantees: Guarantees | None = None
    """What isolated and limited it, as the backend's probe proved."""
    reasons: tuple[str, ...] = Field((), description="why this backend ran it")
    denied: tuple[str, ...] = Field((), description="network connections that were refused, and why")
    left_out: tuple[str, ...] = Field((), description="files that were not brought back, and why")
    warnings: tuple[str, ...] = Field((), description="what went wrong without ending the run")

    @property
    def ok(self) -> bool:
        """Whether the guest ended well by itself."""
        return self.status is Status.SUCCESS

    def __str__(self) -> str:
        from belljar.core import display  # needed by people only, not by programs

        return display.as_text(self)

    def _repr_html_(self) -> str:
        from belljar.core import display

        return display.as_html(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


class SandboxHealth(Model):
    """Whether code can be run, found out by running some."""

    healthy: bool
    """Whether a real snippet ran and printed what it should."""
    backend: str = ""
    """The backend that ran it."""
    duration_ms: float | None = None
    """Milliseconds that it took, the sandbox's start included."""
    problem: str = ""
    """What is wrong; empty if nothing is."""
    fix: str = ""
    """What to do about it."""


LifeKind = Literal[  # of a living sandbox
    "opened", "paused", "resumed", "snapshot", "forked", "expired", "closed", "left", "found"
]
LIFE_KINDS: tuple[LifeKind, ...] = get_args(LifeKind)
EventKind = (
    Literal["progress", "started", "stdout", "stderr", "display", "limit", "denied", "alert", "finding", "finished"]
    | LifeKind
)


class Event(Model):
    """One thing that happened, in order (`seq`) within its run."""

    run: str
    """The id of the run."""
    seq: int
    """Its number within the run, from 1."""
    kind: EventKind
    """What happened."""
    at: Moment = Field(default_factory=lambda: round(time.time(), 6))
    """When, in seconds since 1970; in JSON as ISO 8601 text."""
    text: str = ""
    """What was printed, or what happened in words."""
    data: MimeBundle = Field(default_factory=dict)
    result: Result | None = None
    """The result, with `finished`."""


class Usage(NamedTuple):
    """What a command uses. None: that cannot be known here, which is not the same as nothing.

    Counters count from the command's start, or, where one process serves many guests, from the first look at this one.
    """

    cpu_ms: float | None = None
    memory: int | None = None  # bytes that it holds now, without what the kernel could take back at any time
    rx: int | None = None
    tx: int | None = None
    disk_read: int | None = None
    disk_write: int | None = None


@runtime_checkable
class Measurable(Protocol):
    """A box that can tell what its running command uses."""

    async def measure(self) -> Usage | None:
        """Returns what the command uses now, or None if none runs or nothing is known. It is cheap."""
        ...
