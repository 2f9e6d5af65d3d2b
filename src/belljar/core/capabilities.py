"""What a backend says of itself: what it can do here, and what stands around its guests."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from belljar.core.model import Model


class Isolation(StrEnum):
    """What stands between the guest and the host's kernel, weakest first."""

    NONE = "none"
    WASM = "wasm"
    NAMESPACE = "namespace"
    KERNEL = "kernel"

    @property
    def rank(self) -> int:
        return list(type(self)).index(self)


class Guarantees(Model):
    """What held for this run, each line proved by the backend's probe."""

    isolation: Isolation
    walls: tuple[str, ...] = Field((), description="what stands around the guest")
    limits: Mapping[str, str] = Field(default_factory=dict, description="limit -> the mechanism that enforces it")
    network: str = "none"
    weaker: tuple[str, ...] = Field((), description="what is not enforced here, in words")


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
    fuel: bool = Field(False, description="can it count instructions, and fix clock and seed?")
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
