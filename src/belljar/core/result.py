"""What happened: the result of a run, the events on the way, the files and the resources it used."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import Field

from belljar.core.capabilities import Guarantees
from belljar.core.model import Model
from belljar.core.values import Bytes

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class Status(StrEnum):
    """Exactly one per run."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    OOM_KILLED = "oom_killed"
    FUEL_EXHAUSTED = "fuel_exhausted"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    KILLED = "killed"
    ABORTED = "aborted"


class ErrorType(StrEnum):
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


class Failure(Model):
    """A guest's failure, told so that an agent can act on it."""

    error_type: ErrorType
    message: str
    suggestion: str
    context: dict[str, Any] = Field(default_factory=dict)


class File(Model):
    path: str
    content: Bytes = b""
    executable: bool = False
    read_only: bool = False

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


FileTree = tuple[File, ...]


class Collected(NamedTuple):
    files: FileTree
    left_out: tuple[str, ...] = ()  # what was not taken, and why: links, devices, what was too large


class Entry(NamedTuple):
    path: str
    kind: str  # "file", "folder", "link", "pipe" or "device or socket"
    size: int


MimeBundle = dict[str, Any]


class Result(Model):
    """The outcome of one run.

    `print(result)` shows it readably, a notebook shows figures and tables, and its `repr` is exact.
    """

    status: Status
    exit_code: int | None = Field(None, description="of the guest's program; none if it was ended from outside")
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    duration_ms: float = 0.0
    startup_ms: float = 0.0
    memory_used_mb: float | None = None
    cpu_ms: float | None = None
    fuel_consumed: int | None = None
    files: FileTree = ()
    results: tuple[MimeBundle, ...] = ()
    error: Failure | None = None
    backend: str = ""
    container_id: str = ""
    guarantees: Guarantees | None = None
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


EventKind = Literal["started", "stdout", "stderr", "display", "limit", "denied", "finished"]


class Event(Model):
    """One thing that happened, in order (`seq`) within its run."""

    run: str
    seq: int
    kind: EventKind
    at: float = Field(default_factory=time.time)
    text: str = ""
    data: MimeBundle = Field(default_factory=dict)
    result: Result | None = None


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
