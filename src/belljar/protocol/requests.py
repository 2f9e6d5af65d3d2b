"""The bodies of requests to the service: run code, open a session, run a turn in it, fork it, roll it back.

Field names are those of the API's specification. Values are checked here, by the types that a `RunRequest` has, and
nowhere else: an `Execute` becomes a `RunRequest` without a second validation.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, WithJsonSchema, model_validator

from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.model import Model
from belljar.core.net_entries import NetEntryText
from belljar.core.package_names import Packages
from belljar.core.request import (
    MAX_FILES,
    MAX_VARIABLES,
    Arguments,
    BackendName,
    Code,
    Deterministic,
    Egress,
    Folder,
    ImageName,
    Input,
    LanguageName,
    Limits,
    ModuleName,
    Patterns,
    ProfileName,
    RunRequest,
    RuntimeName,
    TypeName,
    Words,
    Workspace,
    check_job,
)
from belljar.core.test_results.asked import MAX_REPEATS, CommandLine, Shard, TestOptions, test_options
from belljar.core.values import Bytes, EnvName, EnvText, GuestPath, Text


def _named_files(value: Any) -> Any:
    """A list names files of the project: they have no content yet."""
    return dict.fromkeys(value) if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value) else value


_NAMES_SCHEMA = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_FILES}
_CONTENTS_SCHEMA = {"type": "object", "maxProperties": MAX_FILES, "additionalProperties": {"anyOf": [
    {"type": "string"}, {"type": "null"},
    {"type": "object", "properties": {"base64": {"type": "string"}}, "required": ["base64"]},
]}}  # fmt: skip
Files = Annotated[
    dict[GuestPath, Bytes | None],
    BeforeValidator(_named_files),
    Field(
        max_length=MAX_FILES,
        description='mounted read-only: name to text or {"base64": …}, or a list of files below project_path',
    ),
    WithJsonSchema({"anyOf": [_CONTENTS_SCHEMA, _NAMES_SCHEMA]}, mode="validation"),
]
Environment = Annotated[dict[EnvName, EnvText], Field(max_length=MAX_VARIABLES)]
Timeout = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False, strict=True)]
_MAX_FIELDS, _MAX_ITEMS = 64, 4096
_NO_LIMITS, _NO_EGRESS = Limits(), Egress()
# Called so in the library, too.
_SAME_OF_BOX = ("net", "backend", "isolation", "image", "runtime", "type", "write", "write_git")


class RequestBody(Model):
    """The base of all request bodies: refuses bodies with too many fields or items before it validates each of them.

    The validators are built when the class is defined: FastAPI inspects them anyway, and complains about missing ones.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(defer_build=False)

    @model_validator(mode="before")
    @classmethod
    def _of_bounded_length(cls, values: Any) -> Any:
        """Counts first, because each wrong item would become a validation error of about a kilobyte."""
        if isinstance(values, dict):
            if len(values) > _MAX_FIELDS:
                raise ValueError(f"it has {len(values)} fields")
            for name, value in values.items():
                if isinstance(value, list | dict) and len(value) > _MAX_ITEMS:
                    raise ValueError(f"{name[:80]} holds {len(value)} items, and may hold {_MAX_ITEMS}")
        return values


class SandboxFields(RequestBody):
    """The fields that describe a sandbox, whatever runs in it."""

    context_files: Files | None = None
    environment: Environment = Field(default_factory=dict)
    limits: Limits | None = Field(None, description="only what is named counts")
    net: tuple[NetEntryText, ...] = Field(
        (), description="hosts, addresses and named sets that it may reach; * for all"
    )
    backend: BackendName = "auto"
    isolation: Literal["wasm", "namespace", "kernel"] | None = None
    image: ImageName | None = None
    runtime: RuntimeName | None = None
    type: TypeName | None = None
    project_path: Folder | None = Field(None, description="a folder of the server, below one of its project roots")
    write: StrictBool = Field(False, description="may the project be changed, but for git's configuration and hooks?")
    write_git: StrictBool = Field(False, description="may these be changed, too?")

    @model_validator(mode="after")
    def _git_goes_with_the_rest(self) -> Self:
        if self.write_git and not self.write:
            raise ValueError("write_git goes with write")
        return self

    @property
    def named_files(self) -> tuple[str, ...]:
        """The files of the project that are named without their content."""
        return tuple(name for name, data in (self.context_files or {}).items() if data is None)

    def files(self) -> dict[str, bytes]:
        """Returns the files that came with their content."""
        return {name: data for name, data in (self.context_files or {}).items() if data is not None}

    def workspace(self) -> Workspace | None:
        """Returns the grant that these fields ask for."""
        path = self.project_path
        return Workspace(path=path, write=self.write, write_git=self.write_git) if path else None

    def sandbox_options(self) -> dict[str, Any]:
        """Returns the fields of a sandbox that stays open as keyword arguments of `core.options.request`.

        Raises:
            InvalidRequest: files are named without their content.
        """
        if self.named_files:
            raise errors.InvalidRequest(
                "context_files: a session takes contents, not names", fix="send a map; the project is at /workspace"
            )
        return {name: getattr(self, name) for name in _SAME_OF_BOX} | {
            "env": self.environment, "files": self.files() or None, "workspace": self.project_path,
            "limits": self.limits.named() if self.limits else None,
        }  # fmt: skip


class Execute(SandboxFields):
    """A snippet (`code`), a file of the project (`path`) or a `command`, with what it may use."""

    language: LanguageName = "python"
    code: Code | None = None
    path: GuestPath | None = Field(
        None, description="a file below project_path to run instead of code; its extension tells the language"
    )
    command: Words | None = None
    args: Arguments = Field((), description="of the code: sys.argv[1:], process.argv.slice(2), $1")
    timeout_seconds: Timeout | None = Field(None, description="30, unless the administrator set another default")
    stdin: Input = b""
    collect: Patterns = Field((), description="patterns of files to bring back")
    packages: Packages = Field(
        None, description="names of packages to be there, or a Python environment of the server below a project root"
    )
    deterministic: StrictBool | Deterministic = False
    profile: ProfileName | None = None
    require_libraries: StrictBool | Annotated[tuple[ModuleName, ...], Field(max_length=64)] = Field(
        False, description="what must import, by name; true: all that the code imports"
    )
    retry: Literal["never", "stronger"] = "never"
    wait: StrictBool = Field(True, description="answer when it has ended; otherwise at once, with its id")
    cached: StrictBool = Field(False, description="the result of the same deterministic run will do, if there was one")

    def request(self) -> RunRequest:
        """Returns the run that this body asks for; the service reads what `path` names.

        Raises:
            InvalidRequest: it names more than one thing to run, or files that cannot lie beside each other.
        """
        if self.path is not None:
            self._check_path()
        if self.named_files and self.project_path is None:
            raise errors.InvalidRequest(
                "context_files: a list names files below project_path",
                fix="send project_path, too, or a map of names to contents",
            )
        files = self.files()
        try:
            check_job(self.code, self.command, files, self.args)
        except ValueError as error:
            raise errors.InvalidRequest(f"request: {error}") from None
        return RunRequest.model_construct(
            language=self.language, code=self.code, command=self.command, args=self.args, files=files, stdin=self.stdin,
            env=self.environment, limits=self._limits(), egress=_egress(self.net), collect=self.collect,
            backend=self.backend, isolation=Isolation(self.isolation or Isolation.WASM), image=self.image,
            runtime=self.runtime, type=self.type, packages=self.packages, profile=self.profile, retry=self.retry,
            require_libraries=self.require_libraries,
            workspace=self.workspace(),
            deterministic=Deterministic() if self.deterministic is True else self.deterministic or None,
        )  # fmt: skip

    def _limits(self) -> Limits:
        limits = self.limits or _NO_LIMITS
        return limits.model_copy(update={"timeout": self.timeout_seconds}) if self.timeout_seconds else limits

    def _check_path(self) -> None:
        if self.code is not None or self.command is not None:
            raise errors.InvalidRequest("path: goes with neither code nor command", fix="send one of the three")
        if self.project_path is None:
            raise errors.InvalidRequest("path: is a file below project_path", fix="send project_path, too")


def _egress(hosts: tuple[str, ...]) -> Egress:
    return Egress.of(hosts) if hosts else _NO_EGRESS


class RunTests(RequestBody):
    """The tests of a project of the server: it is copied into a sandbox, and nothing that they do to it comes back."""

    project_path: Folder = Field(description="a folder of the server, below one of its project roots")
    test_command: CommandLine = Field(
        None, description="a line of shell, or a program with its arguments; found by the project's files unless given"
    )
    environment: Environment = Field(default_factory=dict)
    timeout_seconds: Timeout | None = Field(None, description="300, unless the administrator set another")
    coverage: StrictBool = Field(False, description="measure how much code the tests run")
    only: tuple[Annotated[Text, Field(min_length=1, max_length=4096)], ...] = Field(
        (), max_length=_MAX_ITEMS, description="ids of the tests to run, such as those of an earlier answer's failures"
    )
    shard: Shard = Field(None, description='one part of the tests, such as "1/4"')
    repeat: int = Field(1, ge=1, le=MAX_REPEATS, description="how often to run them, to find flaky ones")
    reports: tuple[GuestPath, ...] = Field(
        (), max_length=32, description="patterns of files to which the command writes JUnit XML or TAP"
    )
    keep: StrictBool = Field(False, description="keep the files as the tests left them, as a snapshot")
    install: StrictBool = Field(False, description="install first the packages that the project's files list")
    limits: Limits | None = Field(None, description="of the sandbox; only what is named counts")
    net: tuple[NetEntryText, ...] = Field((), description="hosts, addresses and named sets that the tests may reach")
    packages: Packages = Field(
        None, description="names of packages to be there, or a Python environment of the server below a project root"
    )
    backend: BackendName = "auto"
    image: ImageName | None = None
    runtime: RuntimeName | None = None
    wait: StrictBool = Field(True, description="answer when they have ended; otherwise at once, with the run's id")

    def sandbox_options(self) -> dict[str, Any]:
        """Returns the fields of the sandbox as keyword arguments of `core.options.request`."""
        named = {name: getattr(self, name) for name in ("net", "packages", "image", "runtime")}
        return named | {"limits": self.limits.named() if self.limits else None}

    def test_options(self, usual_seconds: float) -> TestOptions:
        """Returns the fields of the tests.

        Raises:
            InvalidRequest: one of them makes no sense.
        """
        return test_options(
            command=self.test_command, environment=self.environment, timeout=self.timeout_seconds or usual_seconds,
            coverage=self.coverage, only=self.only, shard=self.shard, repeat=self.repeat, reports=self.reports,
        )  # fmt: skip


class OpenSession(SandboxFields):
    """A session (an interpreter that keeps its state) or a sandbox (a box for many commands) to be opened."""

    kind: Literal["session", "sandbox"] = Field("session", description="an interpreter, or a box for many commands")
    language: LanguageName = Field("python", description="of a session: python, javascript or bash")
    idle: float = Field(600, gt=0, le=86400, allow_inf_nan=False, strict=True)
    lifetime: float = Field(3600, gt=0, le=7 * 86400, allow_inf_nan=False, strict=True)
    timeout_seconds: Timeout | None = None
    packages: Packages = Field(
        None, description="names of packages to be there, or a Python environment of the server below a project root"
    )

    def options(self) -> dict[str, Any]:
        """Returns the fields as keyword arguments of `core.options.request`."""
        rest = {"language": self.language, "timeout": self.timeout_seconds, "packages": self.packages}
        return self.sandbox_options() | rest


class Turn(RequestBody):
    """One run inside an open session or sandbox."""

    code: Text | None = None
    path: GuestPath | None = Field(None, description="a file below the session's project_path to run instead of code")
    command: tuple[Text, ...] | None = None
    args: Arguments | None = Field(None, description="of the code, in a sandbox")
    language: str | None = None
    timeout_seconds: Timeout | None = None
    stdin: Bytes | None = None
    wait: StrictBool = Field(True, description="answer when it has ended; otherwise at once, with its id")


class Fork(RequestBody):
    """A copy of a session, as it is now or as it was at a checkpoint."""

    checkpoint: str | None = Field(None, description="else from how it is now")


class Rollback(RequestBody):
    """A session put back to one of its checkpoints."""

    checkpoint: str
