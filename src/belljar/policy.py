"""Says no. `decide` turns a request into a finished `Plan` or raises `PolicyDenied`; it does no I/O."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from pydantic import ValidationError

from belljar import errors, needs
from belljar.models import Limits, Needs, Plan, RunRequest, Workspace, format_size
from belljar.settings import Caps, Settings

# Granting one of these, or a folder that holds it, would hand the host to the guest; of the first few, also
# what is below them.
_CLOSED = ("/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/var/run")
_NEVER_GRANTED = (*_CLOSED, "/var/lib", "/root", "/usr")


def decide(request: RunRequest, settings: Settings, *, keep_files: bool = False) -> Plan:
    if settings.switched_off:  # which never means: run it without a sandbox
        raise errors.PolicyDenied(
            f"this project switched Belljar off ({settings.switched_off}: sandbox.enabled is false)",
            fix="set it to true, or work in another folder; nothing is ever run without a sandbox",
        )
    return Plan(
        limits=limits(request.limits, settings.defaults, settings.caps),
        egress=request.egress,
        files=request.files,
        workspace=_workspace(request.workspace, settings),
        packages=request.packages,
        keep_files=keep_files or bool(request.collect),
        isolation=request.isolation,
        image=request.image,
        runtime=request.runtime,
        backend=settings.backend if request.backend == "auto" else request.backend,
        command=request.command is not None,
        language=request.language if request.code is not None else None,
        deterministic=request.deterministic is not None,
        profile=request.profile,
        needs=Needs() if request.code is None else needs.analyse(request.code, request.language, request.files),
    )


def limits(asked: Limits, defaults: Limits, caps: Caps) -> Limits:
    """The defaults, cut to the caps, with what the request names laid over; over a cap is a refusal."""
    named = asked.named()
    values: dict[str, Any] = defaults.model_dump() | named
    for name, cap in caps.model_dump().items():
        if values[name] <= cap:
            continue
        if name in named:
            given, most = (_show(name, values[name]), _show(name, cap))
            raise errors.PolicyDenied(
                f"limits.{name}: {given} is over the cap of {most}",
                fix=f"ask for at most {most}, or have the administrator raise the cap",
                context={"field": name, "asked": values[name], "cap": cap},
            )
        values[name] = cap
    try:
        return Limits.model_validate(values)
    except ValidationError as error:
        raise errors.from_validation(error, "limits") from None


def _show(name: str, value: float) -> str:
    if name in ("memory", "disk", "output"):
        return format_size(int(value))
    return f"{value:g} s" if name == "timeout" else f"{value:g}"


def _workspace(asked: Workspace | None, settings: Settings) -> Workspace | None:
    if asked is None:
        return None
    path = posixpath.normpath(re.sub("/+", "/", asked.path))  # normpath keeps two leading slashes
    if not posixpath.isabs(path):
        raise errors.InvalidRequest(f"workspace.path: {asked.path!r} is relative", fix="give an absolute path")
    for guarded in (*_NEVER_GRANTED, posixpath.normpath(settings.home)):
        inside = path == guarded or guarded.startswith(path.rstrip("/") + "/")
        if inside or (guarded in _CLOSED and path.startswith(guarded + "/")):
            raise errors.PolicyDenied(
                f"workspace.path: {path} would expose {guarded} of the host",
                fix="grant a project folder instead",
                context={"field": "workspace.path"},
            )
    return Workspace(path=path, write=asked.write)
