"""The data that crosses boundaries: what is asked, what was decided, what happened.

Everything here is frozen, refuses unknown fields, and does no I/O.
"""

from __future__ import annotations

import base64
import math
import re
import time
import uuid
from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MAX_FILES = 256
WORKSPACE = "/workspace"
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


# --- values with units -------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> object:
    """`"512M"` -> 536870912. Units are powers of 1024; a bare number is bytes."""
    if isinstance(value, bool):
        raise ValueError("is neither true nor false, but a size")
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if not match:
        raise ValueError(f'{value[:40]!r} is not a size: write bytes, or a number with a unit such as "512M" or "4G"')
    number = float(match[1]) * 1024 ** _POWERS[match[2].lower()]
    if not number < 2**63:
        raise ValueError(f"{value[:40]!r} is larger than any machine")
    return int(number)


def format_size(size: int) -> str:
    for unit in ("B", "K", "M", "G"):
        if size < 1024:
            return f"{size:g}{unit}" if unit != "B" else f"{size} bytes"
        size = size // 1024 if size % 1024 == 0 else size / 1024  # type: ignore[assignment]
    return f"{size:.7g}T"


def guest_path(value: object) -> str:
    """A name inside the box: relative, plain, never climbing out."""
    if not isinstance(value, str | PurePosixPath):
        raise ValueError("a path inside the sandbox must be a string")
    text = str(value)
    if not text or len(text.encode("utf-8", "surrogatepass")) > 1024:
        raise ValueError("a path inside the sandbox must have 1 to 1024 bytes")
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise ValueError(f"{text!r} holds a control character or half a surrogate pair: use a plain name")
    if "\\" in text:
        raise ValueError(f"{text!r} holds a backslash: separate folders with /")
    path = PurePosixPath(text)
    if path.is_absolute():
        if not path.is_relative_to(WORKSPACE):
            raise ValueError(f"{text!r} is outside {WORKSPACE}: use a path relative to it")
        path = path.relative_to(WORKSPACE)
    if ".." in path.parts:
        raise ValueError(f"{text!r} climbs out of {WORKSPACE}: leave out '..'")
    if not path.parts:
        raise ValueError(f"{text!r} names no file: give a name below {WORKSPACE}")
    if any(len(part.encode()) > 255 for part in path.parts) or len(path.parts) > 32:
        raise ValueError(f"{text[:60]!r} has a name over 255 bytes or more than 32 folders")
    return str(path)


def _env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", value):
        raise ValueError(f"{value[:40]!r} is not a variable name: use letters, digits and _")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL byte")
    return value


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode (it holds half a surrogate pair)") from None
    return value


def _as_bytes(value: object) -> object:
    """Text, or `{"base64": …}` for what is not text."""
    if isinstance(value, Mapping):
        if set(value) != {"base64"} or not isinstance(value["base64"], str):
            raise ValueError('give text, or {"base64": "…"} for bytes that are not text')
        try:
            return base64.b64decode(value["base64"], validate=True)
        except ValueError:
            raise ValueError("base64: it cannot be decoded") from None
    return value.encode() if isinstance(value, str) else value


def _in_json(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


_HOST = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _host(value: str) -> str:
    host = value.lower().rstrip(".")
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise ValueError(f"{value[:80]!r} is not a host name: write example.org, or *.example.org for what is below it")
    if re.fullmatch(r"[\d.]+", host):
        raise ValueError(f"{value!r} is an address: an allowlist takes host names only")
    return host


_ENCODED = {"type": "object", "properties": {"base64": {"type": "string"}}, "required": ["base64"]}
_SIZES = {"anyOf": [{"type": "integer"}, {"type": "string", "examples": ["512M"]}]}
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(_SIZES, mode="validation")]
Text = Annotated[str, AfterValidator(_no_nul), AfterValidator(_encodable)]
GuestPath = Annotated[str, BeforeValidator(guest_path)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Bytes = Annotated[
    bytes,
    BeforeValidator(_as_bytes),
    PlainSerializer(_in_json, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "string"}, _ENCODED | {"additionalProperties": False}]}),
]
HostPattern = Annotated[str, AfterValidator(_host)]


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
