"""What a caller asks for: one run, its limits, its network and the folder it is granted."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)

from belljar.core.capabilities import Isolation
from belljar.core.model import Apart, Model, ours
from belljar.core.net_entries import ANY_HOST, NetEntryText, PlainNetEntry
from belljar.core.package_names import Packages
from belljar.core.process import HOME, User
from belljar.core.values import (
    GIB,
    KIB,
    MIB,
    WORKSPACE,
    Bytes,
    EnvName,
    EnvText,
    GuestPath,
    Size,
    Text,
    guest_path,
    whole_path,
)

MAX_FILES, MAX_VARIABLES = 256, 1024
MOST_CONNECTIONS = 64  # of a guest, to listed hosts: each is two descriptors of ours
MAX_LABELS = 64
MAX_LIFE_SECONDS = 30 * 86400.0
MAX_TIMEOUT_SECONDS = 7 * 86400.0
_LEAST_INODES = 1024
_BYTES_FOR_INODE = 2 * KIB
_NO_HOMES = frozenset(
    ("proc", "sys", "dev", "inputs", "etc", "usr", "bin", "sbin", "lib", "lib64", "tmp", "run", "boot")
)


def _patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    """`./out.txt` and `/workspace/out.txt` mean the topmost one; `out.txt` any of that name."""
    return tuple(("./" if p.startswith(("./", "/")) else "") + guest_path(p) for p in value)


# The values of a request, as every surface checks them.
LanguageName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9.+#_-]+$")]
Code = Annotated[Text, Field(max_length=16 * MIB)]
Words = Annotated[tuple[Text, ...], Field(min_length=1, max_length=4096)]
Arguments = Annotated[tuple[Text, ...], Field(max_length=4096)]
Input = Annotated[Bytes, Field(max_length=256 * MIB)]
Patterns = Annotated[tuple[str, ...], Field(max_length=256), AfterValidator(_patterns)]
BackendName = Annotated[str, Field(min_length=1, max_length=64)]
ImageName = Annotated[Text, Field(min_length=1, max_length=512)]
RuntimeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]
TypeName = Annotated[str, Field(min_length=1, max_length=64)]
Folder = Annotated[Text, Field(min_length=1, max_length=4096)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,127}$")]
ProfileName = Annotated[str, Field(max_length=64)]

LabelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$")]
LabelText = Annotated[Text, Field(max_length=256)]


def _snapshot_name(value: str) -> str:
    if value and not re.fullmatch(r"snap-[0-9a-f]{16}", value):
        raise ValueError(f"{value[:80]!r} is no id of a snapshot: they look like snap-0123456789abcdef")
    return value


SnapshotName = Annotated[str, AfterValidator(_snapshot_name)]


class Limits(Model):
    """How much a run may use, with the defaults. In a request only the fields that were set count."""

    cpus: float = Field(1.0, gt=0, le=1024)
    """Processors, such as 0.5 or 2."""
    memory: Size = Field(512 * MIB, ge=8 * MIB, le=2**46)
    """Bytes of memory, or text such as "512M"."""
    disk: Size = Field(1 * GIB, ge=64 * KIB, le=2**46)
    """The size of /workspace and of /tmp, each; in a sandbox that is kept no more than `memory`."""
    pids: int = Field(100, ge=1, le=2**22)
    """The most processes and threads at once."""
    timeout: float = Field(30.0, gt=0, le=MAX_TIMEOUT_SECONDS, description="seconds of wall clock")
    grace: float = Field(
        0.5, ge=0, le=600, description="seconds between SIGTERM and SIGKILL when it is stopped; 0: none"
    )
    output: Size = Field(10 * MIB, ge=0, le=GIB, description="bytes kept of stdout and stderr each")
    io_bps: Size | None = Field(None, ge=4096, description="bytes a second from the disk, each way")
    io_iops: int | None = Field(None, ge=1)
    """Disk operations a second."""
    net_connections: int = Field(
        MOST_CONNECTIONS, ge=1, le=MOST_CONNECTIONS, description="to listed hosts at once; more have to wait"
    )
    net_bandwidth: Size | None = Field(None, ge=KIB, description="bytes a second to and from listed hosts, each way")
    net_bytes: Size | None = Field(None, ge=KIB, description="bytes to and from listed hosts in all")
    fuel: int | None = Field(None, ge=1, le=2**62, description="WebAssembly instructions, about; the same in every run")

    @field_validator("cpus", "timeout", "grace")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @property
    def kept_bytes(self) -> int:
        """The size of /workspace and of /tmp, each, in a sandbox that is kept: its files are memory that it holds."""
        return min(self.disk, self.memory)

    @property
    def kept_inodes(self) -> int:
        """How many files and folders each of them may have: one takes about a kilobyte of the kernel's memory."""
        return max(_LEAST_INODES, self.kept_bytes // _BYTES_FOR_INODE)

    @property
    def kept_box_bytes(self) -> int:
        """How much memory a sandbox that is kept may take: its own, and that of files which others put into it."""
        return self.memory + self.kept_bytes

    def named(self) -> dict[str, Any]:
        """Returns the limits that were set, by name."""
        return self.model_dump(include=self.model_fields_set) if self.model_fields_set else {}


class Egress(Model):
    """What a guest may reach: nothing (`none`), the hosts that are listed (`listed`), or any public host (`open`)."""

    mode: Literal["none", "listed", "open"] = "none"
    hosts: frozenset[NetEntryText] = frozenset()
    """Hosts, addresses and named sets: `example.org:8443`, `http://example.org`, `192.0.2.0/24:443`, `git-hosts`."""
    denied: frozenset[PlainNetEntry] = frozenset()
    """What is refused although the rest would allow it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if ANY_HOST in self.hosts:
            raise ValueError('any host is mode "open", not an entry')
        if (self.mode == "listed") != bool(self.hosts):
            raise ValueError('hosts go with mode "listed", and "listed" needs at least one host')
        return self

    @classmethod
    def of(cls, entries: Iterable[str], denied: Iterable[str] = ()) -> Self:
        """Returns what a list of entries stands for: none of them is no network, and `*` any host."""
        listed = frozenset(entries)
        if ANY_HOST in listed:
            return cls(mode="open", denied=frozenset(denied))
        return cls(mode="listed", hosts=listed, denied=frozenset(denied)) if listed else cls()

    @property
    def entries(self) -> tuple[str, ...]:
        """The list that stands for it."""
        return (ANY_HOST,) if self.mode == "open" else tuple(sorted(self.hosts))


class Workspace(Model):
    """A host directory granted to the guest at /workspace; read-only unless `write` is set."""

    path: Folder
    """The folder of the host."""
    write: bool = False
    """Whether the guest may change it, but for git's configuration and hooks."""
    write_git: bool = False
    """Whether it may change these, too: what the host's next `git` runs there."""

    @model_validator(mode="after")
    def _some_of_all(self) -> Self:
        if self.write_git and not self.write:
            raise ValueError("write_git goes with write")
        return self


class Deterministic(Model):
    """Deterministic mode: fixes clock and randomness, so that a run can be repeated bit for bit."""

    seed: int = 0
    """The seed of all randomness."""
    start: float = Field(1_767_225_600.0, ge=0, le=2**33, allow_inf_nan=False)
    """The time at which the run starts, in seconds since 1970."""


def _home(value: str) -> str:
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or ":" in value:
        raise ValueError(f"{value[:80]!r} is no home: write a whole path, such as {HOME}")
    if path.parts[1] in _NO_HOMES or path == PurePosixPath(WORKSPACE):
        raise ValueError(f"{value[:80]!r} is taken: choose another, such as {HOME}")
    return str(path)


class Life(Model):
    """What makes a sandbox a living one: one machine for all its commands, and what they leave running lives on."""

    home: Annotated[Text, Field(max_length=256), AfterValidator(_home)] = HOME
    """The home of its programs, writable."""
    user: User = "user"
    """As whom its programs run inside: "user", or "root" of this sandbox alone."""
    labels: Annotated[Mapping[LabelName, LabelText], Field(max_length=MAX_LABELS)] = Field(default_factory=dict)
    """Names and values of your own, to find it by."""
    expires: float | None = Field(None, gt=0, le=MAX_LIFE_SECONDS, description="seconds after which it ends")
    idle: float | None = Field(None, gt=0, le=MAX_LIFE_SECONDS, description="seconds without use after which it ends")
    on_expire: Literal["remove", "pause"] = "remove"
    """What becomes of it then."""
    snapshot: SnapshotName = ""
    """The snapshot whose files it begins with."""

    @model_validator(mode="after")
    def _pause_of_something(self) -> Self:
        if self.on_expire == "pause" and self.expires is None and self.idle is None:
            raise ValueError("on_expire goes with expires or idle")
        return self


def _as_deterministic(value: object) -> object:
    return (Deterministic() if value else None) if isinstance(value, bool) else value


class RunRequest(Model):
    """One run as a caller asks for it: a snippet (`code`) or a `command`, never both."""

    language: LanguageName = "python"
    code: Code | None = None
    command: Words | None = None
    args: Arguments = Field((), description="what the code finds in sys.argv, process.argv or $1; not of a command")
    files: Mapping[GuestPath, Bytes] = Field(default_factory=dict, max_length=MAX_FILES)
    stdin: Input = b""
    env: Mapping[EnvName, EnvText] = Field(default_factory=dict, max_length=MAX_VARIABLES)
    limits: Annotated[Limits, Apart()] = Field(
        ours(Limits)(), description="only what is named here counts; the rest comes from the settings"
    )
    egress: Annotated[Egress, Apart()] = ours(Egress)()
    collect: Patterns = ()
    backend: BackendName = "auto"
    isolation: Isolation = Isolation.WASM
    image: ImageName | None = Field(None, description="of a container; else the language's")
    runtime: RuntimeName | None = Field(None, description="of containers: runc, runsc, …")
    auto_remove: StrictBool | None = Field(None, description="false: the container is kept, for inspection")
    type: TypeName | None = Field(None, description="kind of work, for its image and limits: test-runner, …")
    workspace: Annotated[Workspace, Apart()] | None = None
    packages: Packages = Field(
        None, description="names of packages to be there (`requests`, `npm:lodash@4`), or the folder of a Python "
        "environment (venv) of the host; read-only",
    )  # fmt: skip
    living: Annotated[Life, Apart()] | None = Field(
        None, description="a sandbox that is one machine for all its commands"
    )
    workdir: str = WORKSPACE
    deterministic: Annotated[Annotated[Deterministic, Apart()] | None, BeforeValidator(_as_deterministic)] = Field(
        None, description="fixes clock and randomness, so that the run can be repeated bit for bit; true, or the seed"
    )
    profile: ProfileName | None = Field(None, description="packages to find imported; by default by the code")
    require_libraries: bool | Annotated[tuple[ModuleName, ...], Field(max_length=64)] = Field(
        False, description="what must import, by name; true: all that the code imports. A backend that has it is found"
    )
    retry: Literal["never", "stronger"] = Field(
        "never", description="stronger: run again if `auto` chose a backend that lacks what the code turned out to need"
    )

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, value: str, info: ValidationInfo) -> str:
        if living := info.data.get("living"):
            return whole_path(value, living.home)
        return (
            WORKSPACE
            if PurePosixPath(value) in (PurePosixPath(WORKSPACE), PurePosixPath("."))
            else (f"{WORKSPACE}/{guest_path(value)}")
        )

    @model_validator(mode="after")
    def _one_job(self) -> Self:
        check_job(self.code, self.command, self.files, self.args)
        return self


def check_job(
    code: str | None, command: tuple[str, ...] | None, files: Mapping[str, bytes], args: tuple[str, ...] = ()
) -> None:
    """Raises ValueError unless there is at most one thing to run, and its files can lie beside each other."""
    if code is not None and command is not None:
        raise ValueError("give `code` or `command`, not both")
    if command and not command[0]:
        raise ValueError("`command` needs a program as its first word")
    if args and command is not None:
        raise ValueError("`args` go with code: a `command` has its arguments in itself")
    paths = {PurePosixPath(name) for name in files}
    for path in paths:
        if not paths.isdisjoint(path.parents):
            raise ValueError(f"{str(path)!r} lies below another file: a name cannot be a file and a folder")
