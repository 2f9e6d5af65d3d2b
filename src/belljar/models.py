"""The data that crosses boundaries: what is asked, what was decided, what happened.

Everything here is frozen, refuses unknown fields, and does no I/O.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from belljar.values import GIB, KIB, MIB, WORKSPACE, Bytes, EnvName, GuestPath, HostPattern, Size, Text, guest_path

MAX_FILES = 256
INPUTS = "/inputs"  # where read-only files are when /workspace is a folder of the host: it gets no litter


class Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", defer_build=True
    )


# --- the closed sets ---------------------------------------------------------------------------


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


class Isolation(StrEnum):
    """What stands between the guest and the host's kernel, weakest first."""

    NONE = "none"
    WASM = "wasm"
    NAMESPACE = "namespace"
    KERNEL = "kernel"

    @property
    def rank(self) -> int:
        return list(type(self)).index(self)


# --- what is asked -----------------------------------------------------------------------------


class Limits(Model):
    """What a run may use, with the defaults. In a request only the fields that were set count."""

    cpus: float = Field(1.0, gt=0, le=1024)
    memory: Size = Field(512 * MIB, ge=8 * MIB, le=2**46)
    disk: Size = Field(1 * GIB, ge=64 * KIB, le=2**46)
    pids: int = Field(100, ge=1, le=2**22)
    timeout: float = Field(30.0, gt=0, le=7 * 86400, description="seconds of wall clock")
    output: Size = Field(10 * MIB, ge=0, le=GIB, description="bytes kept of stdout and stderr each")
    io_bps: Size | None = Field(None, ge=4096, description="bytes a second from the disk, each way")
    io_iops: int | None = Field(None, ge=1)
    fuel: int | None = Field(None, ge=1, le=2**62, description="WebAssembly instructions, about; the same in every run")

    @field_validator("cpus", "timeout")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    def named(self) -> dict[str, Any]:
        return self.model_dump(include=self.model_fields_set)


class Egress(Model):
    """Absent, empty and everything are three different things."""

    mode: Literal["none", "listed", "open"] = "none"
    hosts: frozenset[HostPattern] = frozenset()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.mode == "listed") != bool(self.hosts):
            raise ValueError('hosts go with mode "listed", and "listed" needs at least one host')
        return self


class Workspace(Model):
    """A host directory granted to the guest at /workspace; read-only unless `write` is set."""

    path: Text = Field(min_length=1, max_length=4096)
    write: bool = False


class Fixed(Model):
    """A world without chance: the seed of all randomness, and the time (seconds since 1970) at which the run starts."""

    seed: int = 0
    start: float = Field(1_767_225_600.0, ge=0, le=2**33, allow_inf_nan=False)


def _as_fixed(value: object) -> object:
    return (Fixed() if value else None) if isinstance(value, bool) else value


class RunRequest(Model):
    """One run as a caller asks for it: a snippet (`code`) or a `command`, never both."""

    language: str = Field("python", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9.+#_-]+$")
    code: Text | None = Field(None, max_length=16 * MIB)
    command: tuple[Text, ...] | None = Field(None, min_length=1, max_length=4096)
    files: Mapping[GuestPath, Bytes] = Field(default_factory=dict, max_length=MAX_FILES)
    stdin: Bytes = Field(b"", max_length=256 * MIB)
    env: Mapping[EnvName, Text] = Field(default_factory=dict, max_length=1024)
    limits: Limits = Field(Limits(), description="only what is named here counts; the rest comes from the settings")
    egress: Egress = Egress()
    collect: tuple[str, ...] = Field((), max_length=256)
    backend: str = Field("auto", min_length=1, max_length=64)
    isolation: Isolation = Isolation.WASM
    image: Text | None = Field(None, min_length=1, max_length=512, description="of a container; else the language's")
    runtime: str | None = Field(None, pattern=r"^[A-Za-z0-9._/-]{1,128}$", description="of containers: runc, runsc, …")
    type: str | None = Field(
        None, min_length=1, max_length=64, description="kind of work, for its image and limits: test-runner, …"
    )
    workspace: Workspace | None = None
    packages: Text | None = Field(
        None, min_length=1, max_length=4096, description="a Python environment (venv) of the host, granted read-only"
    )
    workdir: str = WORKSPACE
    deterministic: Annotated[Fixed | None, BeforeValidator(_as_fixed)] = Field(
        None, description="fixes clock and randomness, so that the run can be repeated bit for bit; true, or the seed"
    )
    profile: str | None = Field(None, max_length=64, description="packages to find imported; by default by the code")
    retry: Literal["never", "stronger"] = Field(
        "never", description="stronger: run again if `auto` chose a backend that lacks what the code turned out to need"
    )

    @field_validator("collect")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """`./out.txt` and `/workspace/out.txt` mean the topmost one; `out.txt` any of that name."""
        return tuple(("./" if p.startswith(("./", "/")) else "") + guest_path(p) for p in value)

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, value: str) -> str:
        return (
            WORKSPACE
            if PurePosixPath(value) in (PurePosixPath(WORKSPACE), PurePosixPath("."))
            else (f"{WORKSPACE}/{guest_path(value)}")
        )

    @model_validator(mode="after")
    def _one_job(self) -> Self:
        if self.code is not None and self.command is not None:
            raise ValueError("give `code` or `command`, not both")
        if self.command and not self.command[0]:
            raise ValueError("`command` needs a program as its first word")
        paths = [PurePosixPath(name) for name in self.files]
        for path in paths:
            if any(parent in paths for parent in path.parents):
                raise ValueError(f"{str(path)!r} lies below another file: a name cannot be a file and a folder")
        return self


# --- what was decided --------------------------------------------------------------------------


class Needs(Model):
    """What code seems to need, by its text: a hint for routing, never a promise and never a security control."""

    modules: frozenset[str] = Field(frozenset(), description="top-level names of what it imports")
    system: tuple[str, ...] = Field((), description='what wants an operating system: "may start threads (…)"')


class Plan(Model):
    """A finished decision. A backend needs nothing else, and reads no settings."""

    id: str = Field(default_factory=lambda: f"bj-{uuid.uuid4().hex[:16]}")
    limits: Limits = Limits()
    egress: Egress = Egress()
    files: Mapping[GuestPath, Bytes] = Field(default_factory=dict, description="read-only context files")
    workspace: Workspace | None = None
    packages: str | None = None
    keep_files: bool = Field(False, description="files will be put or got, or more than one command run")
    isolation: Isolation = Isolation.WASM
    image: str | None = None
    runtime: str | None = None
    type: str | None = Field(None, description="the kind of work that was named; it says the image of containers")
    seccomp_profile: str = Field("", description="the language's own; a backend that cannot take it cannot run it")
    backend: str = "auto"
    command: bool = Field(False, description="a program of the sandbox is to be run, not code")
    language: str | None = Field(None, description="the language of the code, where it is known")
    deterministic: bool = False
    profile: str | None = None
    needs: Needs = Needs()

    @property
    def inputs(self) -> str:
        """The folder in which the guest finds its read-only files."""
        return INPUTS if self.workspace else WORKSPACE


class Command(Model):
    """One program to start in a box."""

    argv: tuple[Text, ...] = Field(min_length=1)
    env: Mapping[EnvName, Text] = Field(default_factory=dict)
    stdin: bytes = b""
    cwd: str = WORKSPACE
    language: str | None = Field(None, description="whose toolchain the program belongs to")
    type: str | None = Field(None, description="the kind of work, if not the plan's")
    fixed: Fixed | None = None
    limits: Limits | None = Field(None, description="instead of the plan's, for this command")
    files: Mapping[GuestPath, Bytes] = Field(default_factory=dict, description="read-only, for this command only")


# --- what happened -----------------------------------------------------------------------------


class Failure(Model):
    """A guest's failure, told so that an agent can act on it."""

    error_type: ErrorType
    message: str
    suggestion: str
    context: dict[str, Any] = Field(default_factory=dict)


class Guarantees(Model):
    """What held for this run, each line proved by the backend's probe."""

    isolation: Isolation
    walls: tuple[str, ...] = Field((), description="what stands around the guest")
    limits: Mapping[str, str] = Field(default_factory=dict, description="limit -> the mechanism that enforces it")
    network: str = "none"
    weaker: tuple[str, ...] = Field((), description="what is not enforced here, in words")


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
    """What a run came to; the mission's field names."""

    status: Status
    exit_code: int | None = None
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
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCESS


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


# --- what a backend says of itself -------------------------------------------------------------


class LanguageSupport(Model):
    """Whether a backend runs a language here, and how to get it if not."""

    name: str
    available: bool
    version: str = ""
    program: str = ""
    fix: str = ""


class Capabilities(Model):
    """What a backend can do here: data, never an exception."""

    backend: str
    available: bool
    why_not: str = ""
    fix: str = ""
    version: str = ""
    guarantees: Guarantees | None = None
    egress: frozenset[Literal["none", "listed", "open"]] = frozenset({"none"})
    sessions: frozenset[str] = frozenset()
    workspace: bool = False
    packages: bool = False
    commands: bool = Field(True, description="can it run programs, or only code?")
    processes: bool = Field(True, description="can a guest start processes and threads, get signals, open sockets?")
    fuel: bool = Field(False, description="can it count instructions, and fix clock and chance?")
    checkpoints: bool = Field(False, description="can a session be copied, forked and rolled back?")
    profiles: frozenset[str] = Field(frozenset(), description="what a run can find imported")
    setup: str = Field("", description="what must be done once before it is available, if it can be done here")
    modules: frozenset[str] | None = Field(
        None, repr=False, description="what Python code can import; None: whatever the installation has"
    )
    memory: int | None = Field(None, description="the most bytes a guest can ever have; None: what the machine has")
    least_memory: int = Field(0, description="bytes below which no guest can start")
    languages: frozenset[str] | None = Field(None, description="None: what `Backend.languages` says")
    images: bool = Field(False, description="does it run in an image that can be chosen?")
    runtimes: Mapping[str, Guarantees] = Field(default_factory=dict, description="what each container runtime proved")
    partly: Mapping[str, str] = Field(default_factory=dict, description="language -> what it is here, if not the usual")
    notes: tuple[str, ...] = ()
