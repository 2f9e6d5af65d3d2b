"""The records that the service keeps and returns: runs, sessions, lines of output, measurements, callers, keys."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from belljar.core.model import Model
from belljar.core.net_entries import NetGrant
from belljar.core.result import Result
from belljar.core.values import Moment

State = Literal["queued", "running", "finished", "failed", "refused", "lost"]
FINAL: frozenset[State] = frozenset({"finished", "failed", "refused", "lost"})
Scope = Literal["run", "read", "sessions", "files", "admin"]
SCOPES: tuple[Scope, ...] = ("run", "read", "sessions", "files", "admin")


def now() -> float:
    """Returns the time, as exact as its text is: what is read from JSON is what was meant."""
    return round(time.time(), 6)


def new_id(kind: str = "bj") -> str:
    """Unique across machines."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


class Caller(Model):
    """Who asks, what they may do, and how much of it."""

    name: str
    scopes: frozenset[Scope] = frozenset()
    key: str = Field("", description="the id of the API key, if it was one")
    rate: str = Field("", description='such as "60/minute"; empty: the setting')
    concurrency: int = Field(0, ge=0, description="runs at once; 0: the setting")
    net: tuple[NetGrant, ...] | None = Field(None, description="hosts and @sets to ask for; null: the setting's")

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class Key(Model):
    """An API key without its secret."""

    id: str
    name: str
    digest: str = Field(repr=False, description="SHA-256 of the secret")
    scopes: frozenset[Scope]
    created: Moment
    expires: Moment | None = None
    revoked: Moment | None = None
    rate: str = ""
    concurrency: int = 0
    net: tuple[NetGrant, ...] | None = Field(
        None, max_length=1024, description="hosts and @sets that its runs may ask for; null: the setting's"
    )


class RunRecord(Model):
    """One run from its request to its end. `finished` has a `result`; `failed` and `refused` have a `problem`."""

    id: str
    caller: str
    instance: str = Field("", description="the process that owns it")
    state: State = "queued"
    language: str = ""
    backend: str = ""
    sha256: str = Field("", description="of the code or command")
    fingerprint: str = Field("", description="of the whole request, if its result may be served again")
    session: str = ""
    created: Moment
    started: Moment | None = None
    ended: Moment | None = None
    position: int | None = Field(None, description="in the queue, 1 is next")
    result: Result | None = None
    problem: dict[str, Any] | None = None

    @property
    def box(self) -> str:
        """The sandbox that it ran in: its own, or its session's."""
        return self.session or self.id

    @property
    def final(self) -> bool:
        return self.state in FINAL


class LogLine(Model):
    """One line of output, with a number that counts from 1 within its run."""

    container_id: str
    number: int
    timestamp: Moment
    stream: Literal["stdout", "stderr", "display", "limit", "denied", "alert", "gap"]
    message: str
    partial: bool = Field(False, description="no end of line followed: it goes on, or was never ended")


class Sample(Model):
    """One second of a sandbox. Counters count from its start."""

    container_id: str
    timestamp: Moment
    cpu_percent: float
    memory_mb: float
    network_rx_bytes: int | None = None
    network_tx_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    uptime_seconds: float


class Alert(Model):
    """Something about a sandbox that somebody should look at, or the end of it."""

    container_id: str
    timestamp: Moment
    kind: Literal["cpu", "memory", "network"]
    message: str
    over: bool = Field(False, description="it has ended")


class SandboxMetrics(Model):
    """What a sandbox uses now, what it used second by second, and what was alarming about it.

    The figures of now are those of the latest sample; they are none before there is one, or where they are not known.
    """

    container_id: str
    timestamp: Moment | None = None
    cpu_percent: float | None = None
    memory_mb: float | None = None
    network_rx_bytes: int | None = None
    network_tx_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    uptime_seconds: float | None = None
    latest: Sample | None
    samples: tuple[Sample, ...]
    alerts: tuple[Alert, ...]

    @classmethod
    def of(
        cls, id: str, latest: Sample | None, samples: Iterable[Sample] = (), alerts: Iterable[Alert] = ()
    ) -> SandboxMetrics:
        """Returns the metrics of a sandbox, with the figures of its latest sample laid flat."""
        flat = latest.model_dump(exclude={"container_id"}) if latest else {}
        return cls(container_id=id, **flat, latest=latest, samples=tuple(samples), alerts=tuple(alerts))


class SessionRecord(Model):
    """One session or sandbox that a server holds open."""

    id: str
    kind: Literal["session", "sandbox"]
    caller: str
    backend: str
    created: Moment
    expires: Moment
    turns: int = 0
