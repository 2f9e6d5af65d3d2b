"""What was decided: the plan of a box, and the commands that are started in it."""

import uuid
from collections.abc import Mapping

from pydantic import Field

from belljar.core.capabilities import Isolation
from belljar.core.model import Model
from belljar.core.process import HOME, Feature, PtySize, User
from belljar.core.request import Deterministic, Egress, Limits, Workspace
from belljar.core.values import WORKSPACE, Bytes, EnvName, GuestPath, Text

FIGURES = ".belljar-figures"  # the folder below /tmp in which a program's figures are kept
INPUTS = "/inputs"  # where read-only files are when /workspace is a folder of the host, which must stay clean

# For guests without a network: clients that would try again for a minute say at once that they cannot connect, and pip
# says that, not that the system's Python is managed by others.
OFFLINE_ENV = {
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "npm_config_fetch_retries": "0", "CARGO_NET_RETRY": "0",
    "UV_HTTP_RETRIES": "0",
}  # fmt: skip

_WALLS = (
    "limits", "egress", "files", "workspace", "packages", "home", "user", "isolation", "image", "runtime",
    "seccomp_profile",
)  # fmt: skip


def _ordered(value: object) -> object:
    """The same with sets and names in one order, which is another in each process."""
    if isinstance(value, Model):
        return _ordered(dict(value))
    if isinstance(value, Mapping):
        return sorted((name, _ordered(one)) for name, one in value.items())
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


class Needs(Model):
    """What code seems to need, by its text: a hint for routing, never a promise and never a security control."""

    modules: frozenset[str] = Field(frozenset(), description="top-level names of what it imports")
    system: tuple[str, ...] = Field((), description='what wants an operating system: "may start threads (…)"')
    soft: tuple[str, ...] = Field((), description="what may want more than a small stack, and often does not")


class Plan(Model):
    """A finished decision. A backend needs nothing else, and reads no settings."""

    id: str = Field(default_factory=lambda: f"bj-{uuid.uuid4().hex[:16]}")
    limits: Limits = Field(default_factory=Limits)
    egress: Egress = Field(default_factory=Egress)
    files: Mapping[GuestPath, Bytes] = Field(default_factory=dict, description="read-only context files")
    workspace: Workspace | None = None
    packages: str | tuple[str, ...] | None = Field(None, description="a Python environment, or names of packages")
    keep_files: bool = Field(False, description="files will be put or got, or more than one command run")
    living: bool = Field(
        False, description="its commands share one machine: any number at once, and what they leave lives on"
    )
    home: str = Field(HOME, description="the guest's home in a living sandbox")
    user: User = Field("user", description="as whom a living sandbox runs its programs")
    features: frozenset[Feature] = Field(frozenset(), description="what the living sandbox must be able to do")
    absence: float = Field(0.0, description="seconds that it goes on without this process, where it can; 0: it ends")
    latest: float = Field(0.0, description="when it is nobody's any more in that case, in seconds since 1970")
    isolation: Isolation = Isolation.WASM
    image: str | None = None
    runtime: str | None = None
    auto_remove: bool = Field(True, description="false: the containers of its commands are kept, for inspection")
    notes: tuple[str, ...] = Field((), description="what was decided, for the result's reasons")
    type: str | None = Field(None, description="the kind of work that was named; it says the image of containers")
    seccomp_profile: str = Field("", description="the language's own; a backend that cannot take it cannot run it")
    backend: str = "auto"
    command: bool = Field(False, description="a program of the sandbox is to be run, not code")
    session: bool = Field(False, description="one Python interpreter is to be kept across turns")
    language: str | None = Field(None, description="the language of the code, where it is known")
    deterministic: bool = False
    fuel_by_default: bool = Field(False, description="the administrator limits fuel, where it is counted")
    profile: str | None = None
    needs: Needs = Field(default_factory=Needs)
    figures: bool = Field(False, description="what the code draws is brought back as results, where the backend can")

    @property
    def must_count_fuel(self) -> bool:
        """Whether the request itself limits fuel."""
        return self.limits.fuel is not None and not self.fuel_by_default

    @property
    def walls(self) -> str:
        """What a box of this plan may do and use, in one word that is the same in every process."""
        return repr({name: _ordered(getattr(self, name)) for name in _WALLS})

    @property
    def inputs(self) -> str:
        """The folder in which the guest finds its read-only files."""
        return INPUTS if self.workspace or self.living else WORKSPACE


class Command(Model):
    """One program to start in a box."""

    argv: tuple[Text, ...] = Field(min_length=1)
    args: tuple[Text, ...] = Field((), description="the last words of argv: the arguments of the code itself")
    env: Mapping[EnvName, Text] = Field(default_factory=dict)
    stdin: bytes = b""
    cwd: str = WORKSPACE
    language: str | None = Field(None, description="whose toolchain the program belongs to")
    type: str | None = Field(None, description="the kind of work, if not the plan's")
    deterministic: Deterministic | None = Field(None, description="run it with a fixed clock and seed")
    limits: Limits | None = Field(None, description="instead of the plan's, for this command")
    files: Mapping[GuestPath, Bytes] = Field(default_factory=dict, description="read-only, for this command only")
    pty: PtySize | None = Field(None, description="give it a terminal of this size, where the box can")

    @property
    def main(self) -> str:
        """The file of the code: the last word of argv before its arguments."""
        return self.argv[-1 - len(self.args)]
