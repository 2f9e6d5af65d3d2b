"""The options that users type (`timeout=5, memory="256M", net=[...]`), typed, and as one checked `RunRequest`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack, cast

from pydantic import ValidationError

from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.model import ours
from belljar.core.process import User
from belljar.core.request import Deterministic, Egress, Life, Limits, RunRequest, Workspace

StrPath = str | os.PathLike[str]
IDLE_SECONDS, LIFETIME_SECONDS = 600.0, 3600.0  # of a session or sandbox that stays open
_LIMITS = frozenset(Limits.model_fields)
_LIFE = frozenset(("living", *Life.model_fields))
_ARGUMENTS = frozenset(
    ("backend", "cancel", "code", "engine", "on_event", "on_stderr", "on_stdout", "path")
)  # of `run`


class LimitOptions(TypedDict, total=False):
    """How much a run may use. What is not given, or None, comes from the settings."""

    cpus: float | None
    """Processors, such as 0.5 or 2."""
    memory: int | str | None
    """Memory in bytes, or text such as "512M"."""
    disk: int | str | None
    """The size of /workspace and of /tmp, each: bytes, or text such as "1G"."""
    pids: int | None
    """The most processes and threads at once."""
    timeout: float | None
    """Seconds of wall clock after which the run is ended."""
    grace: float | None
    """Seconds that it has between SIGTERM and SIGKILL when its time is over or you stop it; 0: none."""
    output: int | str | None
    """Bytes kept of stdout and of stderr, each."""
    io_bps: int | str | None
    """Bytes a second from and to the disk, each way."""
    io_iops: int | None
    """Disk operations a second."""
    net_connections: int | None
    """Connections to listed hosts at once; more have to wait."""
    net_bandwidth: int | str | None
    """Bytes a second to and from listed hosts, each way."""
    net_bytes: int | str | None
    """Bytes to and from listed hosts in all; what goes beyond is cut."""
    fuel: int | None
    """WebAssembly instructions, about: the same in every run."""
    limits: Mapping[str, Any] | Limits | None
    """Several limits at once; one that is given by its own name counts more."""


class SharedOptions(LimitOptions, total=False):
    """What can be said of a sandbox as well as of one run in it."""

    language: str
    """The language of the code; "python" unless given, or told by the file's extension."""
    files: Mapping[str, bytes | str] | Iterable[str] | None
    """Files given to the guest read-only: name to content, or, for `run`, a list of files below `workspace`."""
    env: Mapping[str, str | int | float | bool]
    """Environment variables; numbers and booleans become text."""


class RemoteOptions(SharedOptions, total=False):
    """What can be said of a sandbox that a server holds open."""

    net: Iterable[str]
    """Hosts that the guest may reach, such as "example.org", "*.example.com" or "python-packages"; else none."""
    egress: Egress | Mapping[str, Any] | None
    """The network in full, instead of `net`: `{"mode": "none" | "listed" | "open", "hosts": [...]}`."""
    workspace: StrPath | Workspace | Mapping[str, Any] | None
    """A folder of the host to grant at /workspace, read-only unless `write` is set."""
    write: bool
    """Whether the guest may change the granted folder, but for git's configuration and hooks in it."""
    write_git: bool
    """Whether it may change these, too: what the host's next `git` runs there."""
    isolation: Isolation | Literal["wasm", "namespace", "kernel"] | None
    """The least isolation to accept: "wasm", "namespace" or "kernel"."""
    image: str | None
    """The image of a container; the language's unless given."""
    runtime: str | None
    """The runtime of containers: "runc", "runsc" (gVisor), …"""
    type: str | None
    """The kind of work, for its image and limits, such as "test-runner"."""


class SessionOptions(RemoteOptions, total=False):
    """What `Session` takes."""

    packages: StrPath | Iterable[str] | None
    """Names of packages to be there, such as `["requests", "numpy==2.*", "npm:lodash@4"]`, or the folder of a Python
    environment (venv) of the host; read-only."""
    profile: str | None
    """Packages to find imported, such as "numeric"; chosen by the code unless given."""


class BoxOptions(SessionOptions, total=False):
    """What can be said of any sandbox of this process."""

    deterministic: bool | Deterministic | Mapping[str, Any] | None
    """Fixes clock and randomness, so that a run can be repeated bit for bit: True, or `{"seed": 7}`."""


class LifeOptions(TypedDict, total=False):
    """What can be said of a living sandbox, here and on a server. Each of them says that it is to be one."""

    home: str | None
    """The home of its programs; "/home/user" unless given."""
    user: User | None
    """As whom its programs run inside: "user", or "root", which is root of nothing outside."""
    labels: Mapping[str, str] | None
    """Names and values of your own, to find it by."""
    expires: float | None
    """Seconds from its opening until it ends; `extend` gives it more."""
    on_expire: Literal["remove", "pause"] | None
    """What becomes of it then: "remove", or "pause", where the backend can."""
    snapshot: Any
    """Begins with the files of a `BoxSnapshot`, or of the one with this id."""


class LivingOptions(LifeOptions, total=False):
    """What makes a sandbox a living one."""

    living: bool
    """One machine for all commands: what they leave running lives on, and there is a writable home."""


class RemoteLivingOptions(RemoteOptions, LifeOptions, total=False):
    """What can be said of a living sandbox that a server holds open."""

    packages: StrPath | Iterable[str] | None
    """Names of packages to be there, or the folder of a Python environment (venv) of the server; read-only."""


class SandboxOptions(BoxOptions, LivingOptions, total=False):
    """What `Sandbox` takes."""

    idle: float | None
    """Seconds without use after which a living sandbox ends, or does what `on_expire` says."""


class CommandOptions(SharedOptions, total=False):
    """What one run in an open sandbox takes."""

    args: Iterable[str]
    """Arguments of the code: `sys.argv[1:]`, `process.argv.slice(2)`, `$1`."""
    stdin: bytes | str | None
    """What the guest reads from its standard input."""
    collect: Iterable[str]
    """Patterns of files to bring back, such as "out/*.csv"."""
    workdir: str
    """The folder in which the guest starts, below /workspace."""
    deterministic: bool | Deterministic | Mapping[str, Any] | None
    """Fixes clock and randomness, so that a run can be repeated bit for bit: True, or `{"seed": 7}`."""


class TestRunOptions(TypedDict, total=False):
    """How tests are run, here and on a server."""

    environment: Mapping[str, str] | None
    """Variables that the tests find."""
    timeout: float | None
    """Seconds that each run of the command may take; 300 unless given."""
    coverage: bool
    """Whether to measure how much code the tests run, where the framework's tool is there."""
    only: Iterable[str] | None
    """The ids of the tests to run, such as those of an earlier report's failures."""
    shard: str | tuple[int, int] | None
    """One part of the tests, such as "1/4"."""
    repeat: int
    """How often to run them, to find those that do not end alike each time."""
    reports: Iterable[str] | None
    """Patterns of files of the project to which the command writes JUnit XML or TAP."""


class ProjectOptions(TypedDict, total=False):
    """What can be said of the sandbox in which `test` runs a project's tests."""

    packages: StrPath | Iterable[str] | None
    """Names of packages to be there, or the folder of a Python environment (venv) of the host; read-only."""
    net: Iterable[str]
    """Hosts that the tests may reach; none unless given."""
    egress: Egress | Mapping[str, Any] | None
    """The network in full, instead of `net`."""
    image: str | None
    """The image of a container; that of the project's language unless given."""
    runtime: str | None
    """The runtime of containers."""
    isolation: Isolation | Literal["wasm", "namespace", "kernel"] | None
    """The least isolation to accept."""
    memory: int | str | None
    """Memory in bytes, or text such as "4G"; 2 GB unless given."""
    disk: int | str | None
    """The size of /workspace and of /tmp, each."""
    cpus: float | None
    """Processors, such as 0.5 or 2."""
    pids: int | None
    """The most processes and threads at once."""
    limits: Mapping[str, Any] | Limits | None
    """Several limits at once."""


class ContainerOptions(BoxOptions, CommandOptions, total=False):
    """What `run_in_container` takes."""


class RunOptions(ContainerOptions, total=False):
    """What `run`, `arun`, `stream` and `astream` take, here and on a server."""

    command: Iterable[str] | None
    """A command with its arguments, instead of code."""
    auto_remove: bool | None
    """False keeps the container of the run for inspection, on docker and podman; `warnings` say how to remove it."""
    require_libraries: bool | Iterable[str]
    """Libraries that must import, by name, or True for all that the code imports: a backend that has them is found."""
    retry: Literal["never", "stronger"]
    """ "stronger": run again on another backend if `auto` chose one that lacks what the code turned out to need."""


class AllOptions(RunOptions, LivingOptions, total=False):
    """What `request` takes."""

    idle: float | None


def request(code: str | None = None, *, backend: str = "auto", **options: Unpack[AllOptions]) -> RunRequest:
    """Checks what a user typed and returns it as one `RunRequest`.

    Args:
        code: the snippet to run; or give a `command`.
        backend: "auto", or a backend's name.
        **options: see `RunOptions` and `LivingOptions`. An option that is None counts as not given.

    Raises:
        InvalidRequest: an option is unknown, or its value is wrong.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _check_shapes(given)
    command, files, limits = given.pop("command", None), given.pop("files", {}), given.pop("limits", {})
    limits = limits.named() if isinstance(limits, Limits) else cast(Mapping[str, Any], limits)
    named = {name: given.pop(name) for name in _LIMITS & given.keys()}
    life = {name: given.pop(name) for name in _LIFE & given.keys()}
    try:
        return RunRequest(
            code=code,
            command=None if command is None else tuple(cast(Iterable[str], command)),
            args=tuple(cast(Iterable[str], given.pop("args", ()))),
            files={name: _as_bytes(data) for name, data in cast(Mapping[str, Any], files).items()},
            limits=Limits(**{**limits, **named}) if limits or named else ours(Limits)(),
            egress=_egress(cast(Iterable[str], given.pop("net", ())), given.pop("egress", None)),
            workspace=_workspace(
                given.pop("workspace", None), given.pop("write", False), given.pop("write_git", False)
            ),
            backend=backend,
            living=_life(life),
            **{name: _plain(value) for name, value in given.items()},  # which pydantic checks
        )
    except ValidationError as error:
        raise errors.from_validation(error, "request", RunRequest, Limits, Egress, Workspace, Life) from None


def _check_shapes(given: Mapping[str, Any]) -> None:
    """Refuses unknown names, and the mistakes whose message pydantic would make a riddle."""
    known = AllOptions.__annotations__.keys()
    if unknown := sorted(given.keys() - known):
        if unknown[0] == "cwd":  # what `start` calls it, which has nothing else to be in a folder
            raise errors.InvalidRequest("cwd: there is no such option; did you mean workdir?", fix="write workdir")
        message, fix = errors.unknown_name(unknown[0], known | _ARGUMENTS, "option")
        raise errors.InvalidRequest(message, fix=fix)
    for field in ("command", "net", "args"):
        value = given.get(field, ())
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            shell = field == "command" and isinstance(value, str) and len(value.split()) > 1
            listed = f'["bash", "-c", {value!r}]' if shell else f"[{value!r}]"
            raise errors.InvalidRequest(f"{field}: must be a list of words", fix=f"write {field}={listed}")
    libraries = given.get("require_libraries", False)
    if isinstance(libraries, str | bytes) or not isinstance(libraries, bool | Iterable):
        raise errors.InvalidRequest(
            "require_libraries: must be true, or a list of names", fix='write require_libraries=["numpy"]'
        )
    if not isinstance(given.get("files", {}), Mapping):
        raise errors.InvalidRequest("files: must map names to contents", fix='write files={"a.txt": b"..."}')


def _life(given: dict[str, Any]) -> Life | None:
    """Returns what is asked of a living sandbox; None where none is."""
    living = given.pop("living", None if not given else True)
    if living is not None and not isinstance(living, bool):
        raise errors.InvalidRequest(f"living: must be true or false (got {living!r})")
    if given and not living:
        raise errors.InvalidRequest(f"{min(given)}: goes with a living sandbox", fix="leave out living=False")
    if "snapshot" in given:
        given["snapshot"] = getattr(given["snapshot"], "id", given["snapshot"])
        if not isinstance(given["snapshot"], str) or not given["snapshot"]:
            raise errors.InvalidRequest("snapshot: must be a BoxSnapshot, or the id of one")
    return Life(**given) if living else None


def _as_bytes(data: Any) -> Any:
    return data.encode() if isinstance(data, str) else data


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _workspace(value: Any, write: Any, write_git: Any) -> Any:
    value = _plain(value)
    return Workspace(path=value, write=write, write_git=write_git) if isinstance(value, str) else value


def _egress(hosts: Iterable[str], asked: Any) -> Any:
    """Returns what `net` lists, or an `egress` of another mode: never both."""
    listed = frozenset(hosts)
    if listed and asked is not None:
        raise errors.InvalidRequest("net: goes with no egress of its own", fix="give one of the two")
    return Egress.of(listed) if listed else asked or ours(Egress)()


def check_seconds(**given: float) -> None:
    """Refuses a time that is not a positive number of seconds."""
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise errors.InvalidRequest(f"{name}: must be a positive number of seconds (got {value!r})")


def check_port(port: int) -> None:
    """Raises InvalidRequest for what is no TCP port."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise errors.InvalidRequest(f"port: must be 1 to 65535 (got {port!r})")
