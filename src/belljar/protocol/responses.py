"""The bodies of the service's answers, except the records (`protocol.records`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from belljar.core.capabilities import LanguageSupport
from belljar.core.model import Model
from belljar.core.result import Result
from belljar.core.test_results.model import TestReport
from belljar.core.values import Moment
from belljar.protocol.records import LogLine, State


class Executed(Result):
    """The result of a run, and the id under which the run is kept."""

    id: str


class Tested(TestReport):
    """The report of a test run, and the id under which the run is kept."""

    id: str


class Checkpointed(Model):
    """A checkpoint that was made of a session."""

    id: str
    bytes: int


class Listed(Model):
    """One entry of a sandbox's files."""

    path: str
    kind: str
    size: int


class FileList(Model):
    """The files of a sandbox."""

    files: tuple[Listed, ...]


class LogPage(Model):
    """Some lines of a run, and the state it was in when they were read."""

    lines: tuple[LogLine, ...]
    state: State


class BackendLanguage(LanguageSupport):
    """One language on one backend."""

    backend: str


class SeenImage(Model):
    """An image of a container engine, as it was when last seen."""

    engine: str
    reference: str
    digest: str
    at: Moment
    facts: dict[str, Any]


class Alive(Model):
    """The answer of `/healthz`: the process answers."""

    status: Literal["alive"] = "alive"


class Readiness(Model):
    """The answer of `/readyz`. `parts` says "ok" of each part, or what is wrong with it."""

    ready: bool
    problem: str = ""
    backend: str = Field("", description="that ran the last tiny run")
    run_ms: float | None = Field(None, description="how long that took")
    parts: dict[str, str]
    running: int
    waiting: int


class Problem(Model):
    """An error as RFC 9457 has it. A `kind` of invalid_request, policy_denied, unauthorized, busy or not_found is the
    request's fault; all others are failures of the service."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    kind: str
    fix: str = ""
    context: dict[str, Any] = Field(default_factory=dict)
    outcome: str | None = Field(None, description="system_failure, where it is a failure of the service")
    exit_code: int | None = Field(None, description="-1, where it is a failure of the service")
