"""The options that users type (`timeout=5, memory="256M", net=[...]`), as one checked `RunRequest`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from belljar.core import errors
from belljar.core.request import Egress, Limits, RunRequest, Workspace

_LIMITS = frozenset(Limits.model_fields)


def request(
    code: str | None = None, *, command: Iterable[str] | None = None, net: Iterable[str] = (),
    workspace: str | os.PathLike[str] | Workspace | None = None, write: bool = False,
    limits: Mapping[str, Any] | Limits | None = None,
    files: Mapping[str, bytes | str] | None = None, **options: Any,
) -> RunRequest:  # fmt: skip
    """What users type, as one checked `RunRequest`. Limits may be given by name: `timeout=5, memory="256M"`."""
    for field, value in (("command", command), ("net", net)):
        if isinstance(value, str | bytes) or (value is not None and not isinstance(value, Iterable)):
            raise errors.InvalidRequest(f"{field}: must be a list of words", fix=f"write {field}=[{value!r}]")
    if files is not None and not isinstance(files, Mapping):
        raise errors.InvalidRequest("files: must map names to contents", fix='write files={"a.txt": b"..."}')
    limits = limits.named() if isinstance(limits, Limits) else limits
    workspace = os.fspath(workspace) if isinstance(workspace, os.PathLike) else workspace
    options = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in options.items() if v is not None}
    if unknown := sorted(options.keys() - _LIMITS - RunRequest.model_fields.keys()):
        known = ", ".join(sorted(_LIMITS | RunRequest.model_fields.keys() | {"net", "write"}))
        raise errors.InvalidRequest(f"{unknown[0]}: there is no such option", fix=f"choose from: {known}")
    named = {name: value for name, value in options.items() if name in _LIMITS}
    rest = {name: value for name, value in options.items() if name not in _LIMITS}
    try:
        hosts = frozenset(net)
        return RunRequest(
            code=code,
            command=None if command is None else tuple(command),
            files={name: data.encode() if isinstance(data, str) else data for name, data in (files or {}).items()},
            limits=Limits(**{**(limits or {}), **named}),
            egress=_egress(hosts, rest.pop("egress", None)),
            workspace=Workspace(path=workspace, write=write) if isinstance(workspace, str) else workspace,
            **rest,
        )
    except ValidationError as error:
        raise errors.from_validation(error) from None


def _egress(hosts: frozenset[str], asked: Any) -> Any:
    """What `net` lists, or an `egress` of another mode: never both."""
    if hosts and asked is not None:
        raise errors.InvalidRequest("net: goes with no egress of its own", fix="give one of the two")
    return Egress(mode="listed", hosts=hosts) if hosts else asked or Egress()
