"""What a backend says of itself: what it can do here, and what stands around its guests."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from belljar.core.model import Model


class Isolation(StrEnum):
    """What separates the guest from the host's kernel, weakest first."""

    NONE = "none"
    """Nothing."""
    WASM = "wasm"
    """WebAssembly."""
    NAMESPACE = "namespace"
    """Namespaces, a seccomp filter and no capabilities; the kernel is the host's."""
    KERNEL = "kernel"
    """A kernel of the guest's own: gVisor, or a virtual machine."""

    @property
    def rank(self) -> int:
        """A number that is larger for stronger isolation."""
        return _RANKS[self]


_RANKS = {isolation: rank for rank, isolation in enumerate(Isolation)}


class Guarantees(Model):
    """What isolated and limited a run, each claim proved by the backend's probe."""

    isolation: Isolation
    walls: tuple[str, ...] = Field((), description="what stands around the guest")
    limits: Mapping[str, str] = Field(default_factory=dict, description="limit -> the mechanism that enforces it")
    network: str = "none"
    weaker: tuple[str, ...] = Field((), description="what is not enforced here, in words")


class LanguageSupport(Model):
    """Whether a backend runs a language here, and how to get it if not."""

    name: str
    """The language."""
    available: bool
    """Whether it can be run here."""
    version: str = ""
    """Of its program, where that is known."""
    program: str = ""
    """The program that runs it."""
    fix: str = ""
    """How to get it, if it is missing."""
    setup: str = ""
    """What the first run does to get it, if it is missing and that can be done: an image is pulled."""


class Capabilities(Model):
    """What a backend can do here, or why it does not work and how to fix it."""

    backend: str
    """The backend's name."""
    available: bool
    """Whether it works here."""
    why_not: str = ""
    """Why it does not."""
    fix: str = ""
    """What would help."""
    version: str = ""
    """Of what it builds on."""
    guarantees: Guarantees | None = None
    """What it proved."""
    egress: frozenset[Literal["none", "listed", "open"]] = frozenset({"none"})
    """Which networks a guest can have."""
    sessions: frozenset[str] = frozenset()
    """Languages that it keeps interpreters of."""
    workspace: bool = False
    """Whether a folder of the host can be granted."""
    packages: bool = False
    """Whether a Python environment can be granted, and packages be installed in one by their names."""
    distributions: Mapping[str, str] | None = Field(
        None, repr=False, description="package -> version of all that there can be; None: whatever is installed"
    )
    commands: bool = Field(True, description="can it run programs, or only code?")
    processes: bool = Field(True, description="can a guest start processes and threads, get signals, open sockets?")
    grace: bool = Field(True, description="is a guest sent SIGTERM, and given `grace` seconds, before it is killed?")
    fuel: bool = Field(False, description="can it count instructions, and fix clock and seed?")
    living: frozenset[str] | None = Field(
        None, description="what its living sandboxes can do beside starting processes; None: it has none"
    )
    lifeless: Mapping[str, str] = Field(
        default_factory=dict, description="container runtime -> why it has no living sandboxes, where others have"
    )
    checkpoints: bool = Field(False, description="can a session be copied, forked and rolled back?")
    profiles: frozenset[str] = Field(frozenset(), description="what a run can find imported")
    setup: str = Field("", description="what must be done once before it is available, if it can be done here")
    modules: frozenset[str] | None = Field(
        None, repr=False, description="what Python code can import; None: whatever the installation has"
    )
    memory: int | None = Field(None, description="the most bytes a guest can ever have; None: what the machine has")
    least_memory: int = Field(0, description="bytes below which no guest can start")
    languages: frozenset[str] | None = Field(None, description="None: what `Backend.languages` says")
    figures: bool = Field(False, description="do figures of a program come back as results?")
    not_installed: Mapping[str, str] = Field(
        default_factory=dict, description="language -> how to get it, of those that it could run and cannot here"
    )
    images: bool = Field(False, description="does it run in an image that can be chosen?")
    runtimes: Mapping[str, Guarantees] = Field(default_factory=dict, description="what each container runtime proved")
    partly: Mapping[str, str] = Field(default_factory=dict, description="language -> what it is here, if not the usual")
    notes: tuple[str, ...] = ()
    """What else is worth knowing."""
