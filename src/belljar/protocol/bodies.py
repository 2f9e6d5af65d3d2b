"""What clients send and get, in the mission's words. What a request means is decided by `sandbox.request`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, model_validator

from belljar.core.capabilities import LanguageSupport
from belljar.core.model import Model
from belljar.core.options import request
from belljar.core.request import Fixed, Limits, RunRequest
from belljar.core.result import Result
from belljar.core.values import Bytes, EnvName, GuestPath, Text
from belljar.protocol.records import LogLine, State

Files = Annotated[dict[GuestPath, Bytes], Field(description='text, or {"base64": …}; mounted read-only')]
Environment = dict[EnvName, Text]
_MOST_FIELDS, _MOST_ITEMS = 64, 4096
_SAME_OF_BOX = ("net", "backend", "isolation", "image", "runtime", "type", "write")  # as in the library
_SAME_OF_RUN = ("language", "stdin", "collect", "packages", "profile", "retry")
Timeout = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False, strict=True)]


class _Sent(Model):
    """Built at once: FastAPI looks into it anyway, and complains where it finds nothing yet."""

    model_config = ConfigDict(defer_build=False)

    @model_validator(mode="before")
    @classmethod
    def _of_bounded_length(cls, values: Any) -> Any:
        """Before each item is looked at: every one that is wrong would be an error of its own, of a kilobyte."""
        if isinstance(values, dict):
            if len(values) > _MOST_FIELDS:
                raise ValueError(f"it has {len(values)} fields")
            for name, value in values.items():
                if isinstance(value, list | dict) and len(value) > _MOST_ITEMS:
                    raise ValueError(f"{name[:80]} holds {len(value)} items, and may hold {_MOST_ITEMS}")
        return values


class _Box(_Sent):
    """What is said of a sandbox, whatever runs in it."""

    context_files: Files | None = None
    environment: Environment = Field(default_factory=dict)
    limits: Limits | None = Field(None, description="only what is named counts")
    net: tuple[str, ...] = Field((), description="hosts that it may reach")
    backend: str = "auto"
    isolation: Literal["wasm", "namespace", "kernel"] | None = None
    image: Text | None = None
    runtime: str | None = None
    type: str | None = None
    project_path: Text | None = Field(None, description="a folder of the server, below one of its project roots")
    write: StrictBool = Field(False, description="may the project be changed?")

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SAME_OF_BOX} | {
            "env": self.environment, "files": self.context_files, "workspace": self.project_path,
            "limits": self.limits.named() if self.limits else None,
        }  # fmt: skip


class Execute(_Box):
    """A snippet (`code`) or a `command`, with what it may use."""

    language: str = "python"
    code: Text | None = None
    command: tuple[Text, ...] | None = None
    timeout_seconds: Timeout | None = Field(None, description="30, unless the administrator set another default")
    stdin: Bytes = b""
    collect: tuple[str, ...] = Field((), description="patterns of files to bring back")
    packages: Text | None = None
    deterministic: StrictBool | Fixed = False
    profile: str | None = None
    retry: Literal["never", "stronger"] = "never"
    wait: StrictBool = Field(True, description="answer when it has ended; otherwise at once, with its id")
    cached: StrictBool = Field(False, description="the result of the same deterministic run will do, if there was one")

    def request(self) -> RunRequest:
        same = {name: getattr(self, name) for name in _SAME_OF_RUN}
        fixed = self.deterministic if isinstance(self.deterministic, bool) else self.deterministic.model_dump()
        return request(
            self.code, command=self.command, timeout=self.timeout_seconds, deterministic=fixed, **same, **self.options()
        )


class Executed(Result):
    """The result, and the id under which the run is kept."""

    id: str


class OpenSession(_Box):
    kind: Literal["session", "sandbox"] = Field("session", description="an interpreter, or a box for many commands")
    idle: float = Field(600, gt=0, le=86400, allow_inf_nan=False, strict=True)
    lifetime: float = Field(3600, gt=0, le=7 * 86400, allow_inf_nan=False, strict=True)
    timeout_seconds: Timeout | None = None


class Turn(_Sent):
    code: Text | None = None
    command: tuple[Text, ...] | None = None
    language: str | None = None
    timeout_seconds: Timeout | None = None
    stdin: Bytes | None = None
    wait: StrictBool = Field(True, description="answer when it has ended; otherwise at once, with its id")


class Fork(_Sent):
    checkpoint: str | None = Field(None, description="else from how it is now")


class Rollback(_Sent):
    checkpoint: str


class Checkpointed(Model):
    id: str
    bytes: int


class Listed(Model):
    path: str
    kind: str
    size: int


class FileList(Model):
    files: tuple[Listed, ...]


class LogPage(Model):
    lines: tuple[LogLine, ...]
    state: State


class Language(LanguageSupport):
    """One language of one backend."""

    backend: str


class SeenImage(Model):
    """An image of a container engine, as it was when last seen."""

    engine: str
    reference: str
    digest: str
    at: float
    facts: dict[str, Any]


class Alive(Model):
    status: Literal["alive"] = "alive"


class Ready(Model):
    """`parts` says of each "ok", or what is wrong with it."""

    ready: bool
    problem: str = ""
    backend: str = Field("", description="that ran the last tiny run")
    run_ms: float | None = Field(None, description="how long that took")
    parts: dict[str, str]
    running: int
    waiting: int


class Problem(Model):
    """`kind` tells the voices apart: invalid_request, policy_denied, unauthorized, busy, not_found; others are ours."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    kind: str
    fix: str = ""
    context: dict[str, Any] = Field(default_factory=dict)
