"""What is sent and answered about previews over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, model_validator

from belljar.core.model import Model
from belljar.core.package_names import Packages
from belljar.core.request import Words
from belljar.core.values import Moment, Text
from belljar.protocol.living import MAX_LINK_SECONDS, Seconds
from belljar.protocol.requests import RequestBody, SandboxFields

PREVIEW_PORT = 3000
MAX_WAIT_SECONDS = 60.0
PreviewStatus = Literal["starting", "running", "error"]
FindingKind = Literal["crash", "compile", "missing", "port_in_use", "other_port"]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


class PreviewFinding(Model):
    """Something that went wrong inside, as its output told."""

    kind: FindingKind
    """What it is: a crash, a failed compilation, something missing, a port in use, another port than expected."""
    message: str
    """The line that told."""
    suggestion: str
    """What can be done."""
    timestamp: Moment
    """When."""


class StartPreview(SandboxFields):
    """A project's server to be started in a sandbox, and shown."""

    command: Annotated[Text, Field(min_length=1, max_length=128 * 1024)] | Words = Field(
        description="what serves: a line of shell, or a program with its arguments"
    )
    port: Port = Field(PREVIEW_PORT, description="at which it listens inside")
    live: StrictBool = Field(
        False, description="the project itself, read-only unless write is true, and not a copy that is thrown away"
    )
    packages: Packages = Field(
        None, description="names of packages to be there, or a Python environment of the server below a project root"
    )
    api: Annotated[str, Field(max_length=300)] = Field(
        "", description="the backend that answers /api; one of service.preview.backends"
    )
    expires: Seconds | None = Field(None, description="seconds until it ends; 30 minutes unless given")
    wait_seconds: float = Field(
        10, ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False, description="that the answer waits for its port"
    )

    @model_validator(mode="after")
    def _written_where_it_is(self) -> StartPreview:
        if self.live and self.project_path is None:
            raise ValueError("live goes with project_path")
        return self

    def options(self) -> dict[str, Any]:
        """Returns the fields as keyword arguments of `AsyncSandbox`."""
        asked = self.sandbox_options()
        if not (self.live or self.write):
            asked["workspace"] = None
        return asked | {"packages": self.packages, "type": self.type or "preview", "living": True}


class PreviewRecord(Model):
    """A preview."""

    container_id: str
    """Its id."""
    url: str
    """Where a browser sees it. Whoever has this address sees it, until it ends."""
    path_url: str = ""
    """The same below the service's own address, sandboxed: for where names of hosts cannot be had."""
    status: PreviewStatus
    """starting: nothing listens yet; running; error: it ended, or never listened."""
    reason: str = ""
    """Why it is in error."""
    suggestion: str = ""
    """What can be done about that."""
    logs: tuple[str, ...] = ()
    """The last lines that it wrote."""
    port: int
    """At which it listens inside."""
    findings: tuple[PreviewFinding, ...] = ()
    """What went wrong, as its output told: the last ten."""
    expires: Moment | None = None
    """When it ends by itself."""


class ExtendPreview(RequestBody):
    """More time for a preview."""

    seconds: Seconds = Field(description="from now until it ends")


class ExposePort(RequestBody):
    """A link to a port of a living sandbox."""

    seconds: Annotated[float, Field(gt=0, le=MAX_LINK_SECONDS, allow_inf_nan=False)] = Field(
        3600, description="that it counts; no longer than the sandbox"
    )


class ExposedPort(Model):
    """A port of a living sandbox as a browser sees it."""

    url: str
    """Its address, on a host of its own. Whoever has it may use it."""
    path_url: str
    """The same below the service's own address, sandboxed."""
    port: int
    """Of the sandbox."""
    expires: Moment
    """When the link ends."""
