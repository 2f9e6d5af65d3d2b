"""Every exception Belljar raises.

    BelljarError                 exit  http  mcp
    ├── InvalidRequest            125   422  -32602   the request makes no sense; the message names the field
    ├── PolicyDenied              126   403  -32001   it makes sense, and the answer is no
    │   ├── ImageRefused          126   403  -32001   digest, signature or scan speaks against the image
    │   ├── Unauthorized          126   401  -32001   nobody knows who asks
    │   ├── NotFound              126   404  -32001   there is no such thing, or not for this caller
    │   ├── Elsewhere             126   409  -32001   another server has it, and only that one can do this
    │   └── Busy                  126   429  -32001   not now: a quota or the queue is full; `retry_after` says when
    └── BackendError              125   503  -32603   our failure, never the guest's
        ├── NotAvailable          125   503  -32603   kind "not_available"
        ├── ImageNotFound         125   404  -32603   kind "image_not_found"
        ├── StartFailed           125   503  -32603   kind "start_failed": the guest never ran
        │   └── PullFailed        125   503  -32603   the image did not arrive whole
        ├── ExecutionFailed       125   500  -32603   kind "execution_failed": it ran, and we lost it
        │   └── SessionEnded      125   410  -32603   kind "session_ended": the interpreter or sandbox is gone
        ├── BackendTimeout        125   504  -32603   kind "timeout": an engine did not answer
        ├── Aborted               125   499  -32603   kind "aborted"
        └── CleanupFailed         125   500  -32603   kind "cleanup_failed"

The guest's own failure is not here: it is a `Result`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

SYSTEM_FAILURE, SYSTEM_FAILURE_EXIT_CODE = "system_failure", -1  # in JSON, for callers that never see an exception
FULL_DISK = "make room on the engine's disk (belljar images gc)"  # what helps against it, wherever it strikes


class BelljarError(Exception):
    """Any error that Belljar raises.

    Attributes:
        message: What happened.
        fix: What to do next; may be empty.
        context: Facts about it, by name.
        kind: The kind of error, the same in Python, in JSON and over HTTP.
        exit_code: What the command line exits with.
        http_status: What the service answers with.
        mcp_code: The code of the error over MCP.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 125
    http_status: int = 500
    mcp_code: ClassVar[int] = -32603

    def __init__(self, message: str, *, fix: str = "", context: dict[str, Any] | None = None) -> None:
        super().__init__(f"{message} — {fix}" if fix else message)
        self.message = message
        self.fix = fix
        self.context: dict[str, Any] = context or {}

    def as_dict(self) -> dict[str, Any]:
        """Returns the error as data, as `--json` prints it and HTTP sends it; `from_dict` reads it."""
        return {"kind": self.kind, "message": self.message, "fix": self.fix, "context": self.context}


class InvalidRequest(BelljarError, ValueError):
    """The request makes no sense, and nothing was run. The message names the field that is wrong."""

    kind = "invalid_request"
    http_status = 422
    mcp_code = -32602


class PolicyDenied(BelljarError):
    """The request makes sense and is refused: by a cap, a rule of the administrator, or a missing permission."""

    kind = "policy_denied"
    exit_code = 126
    http_status = 403
    mcp_code = -32001


class ImageRefused(PolicyDenied):
    """The image may not be used. `context["rule"]` names the rule: pull_policy, lock, digest, signature or scan."""


class Unauthorized(PolicyDenied):
    """The server does not know who asks: there is no key, or it is not valid."""

    kind = "unauthorized"
    http_status = 401


class NotFound(PolicyDenied):
    """There is no such run, session or file, or it belongs to another caller."""

    kind = "not_found"
    http_status = 404


class Elsewhere(PolicyDenied):
    """Another server of the same store has the run, and only that one can do this. `context["instance"]` names it."""

    kind = "elsewhere"
    http_status = 409


class Busy(PolicyDenied):
    """The request may succeed later: a quota or the queue is full, or the service is ending.

    Attributes:
        retry_after: Seconds after which to try again.
        http_status: 429 for the caller's own quota, 503 for the whole service.
    """

    kind = "busy"
    http_status: int = 429

    def __init__(self, message: str, *, retry_after: float, status: int = 429, fix: str = "") -> None:
        super().__init__(message, fix=fix or "try again later", context={"retry_after": retry_after})
        self.retry_after = retry_after
        self.http_status = status


class BackendError(BelljarError):
    """Belljar or what it builds on failed. It is never the guest's failure, which is a `Result`."""

    kind = "backend_error"
    http_status = 503

    def as_dict(self) -> dict[str, Any]:
        """Returns the error as data, with the `outcome` that tells a failure of ours from a refusal."""
        return {**super().as_dict(), "outcome": SYSTEM_FAILURE, "exit_code": SYSTEM_FAILURE_EXIT_CODE}


class NotAvailable(BackendError):
    """No backend can do this here now; `fix` says what would help."""

    kind = "not_available"


class ImageNotFound(BackendError):
    """The image is neither on the engine nor in its registry."""

    kind = "image_not_found"
    http_status = 404


class StartFailed(BackendError):
    """The sandbox could not be started, so the guest never ran."""

    kind = "start_failed"


class PullFailed(StartFailed):
    """The image did not arrive whole from its registry."""


class ExecutionFailed(BackendError):
    """The guest ran, and Belljar lost it before it ended."""

    kind = "execution_failed"
    http_status = 500


class SessionEnded(ExecutionFailed):
    """The session's interpreter, or the sandbox, is gone: nothing can follow; a rollback may bring a session back."""

    kind = "session_ended"
    http_status = 410


class BackendTimeout(BackendError):
    """A container engine did not answer in time. A guest that runs out of time is a `Result` with `timeout`."""

    kind = "timeout"
    http_status = 504


class Aborted(BackendError):
    """The run was given up before it had a result, because it was cancelled or the service ended."""

    kind = "aborted"
    http_status = 499


class CleanupFailed(BackendError):
    """A sandbox could not be removed."""

    kind = "cleanup_failed"
    http_status = 500


def from_dict(told: Mapping[str, Any], status: int = 500) -> BelljarError:
    """Returns the error that `as_dict` wrote. One of no known kind becomes a general error, by its HTTP status."""
    kind, message, fix = (str(told.get(name, "")) for name in ("kind", "message", "fix"))
    context = told.get("context")
    context = dict(context) if isinstance(context, Mapping) else {}
    if kind == Busy.kind:
        after = context.get("retry_after")
        return Busy(message, retry_after=after if isinstance(after, int | float) else 1.0, status=503, fix=fix)
    if kind == PolicyDenied.kind and "rule" in context:
        return ImageRefused(message, fix=fix, context=context)
    otherwise = BackendError if status >= 500 else InvalidRequest
    return _KINDS.get(kind, otherwise)(message, fix=fix, context=context)


_KINDS: dict[str, type[BelljarError]] = {
    error.kind: error
    for error in (
        InvalidRequest, PolicyDenied, Unauthorized, NotFound, Elsewhere, BackendError, NotAvailable, ImageNotFound,
        StartFailed, ExecutionFailed, SessionEnded, BackendTimeout, Aborted, CleanupFailed,
    )
}  # fmt: skip


def unknown_name(name: str, known: Collection[str], what: str = "field") -> tuple[str, str]:
    """Returns what is wrong with a name that nobody knows, and what to write instead.

    Args:
        name: what was written, with the path to it.
        known: the names that there are.
        what: what it is the name of.
    """
    from belljar.core.values import near  # here: who imports errors alone needs no pydantic

    meant = near(name.rpartition(".")[2], known)
    message = f"{name[:80]}: there is no such {what}" + (f"; did you mean {meant}?" if meant else "")
    choices = f"choose from: {', '.join(sorted(known))}"
    return message, f"write {meant}, or {choices}" if meant else choices


def from_validation(error: ValidationError, what: str = "request", *models: type[BaseModel]) -> InvalidRequest:
    """Returns pydantic's report as an error with one sentence for each field: where, what is wrong, what was given.

    Args:
        error: the report.
        what: what was validated.
        models: those whose fields are known: a field that is none of theirs may be a misspelt one.
    """
    from belljar.core.model import fields_at

    parts, fix = [], ""
    model = next((model for model in models if model.__name__ == error.title), None)
    for item in error.errors(include_url=False):
        field = ".".join(str(step) for step in item["loc"]) or what
        if item["type"] == "extra_forbidden" and model:
            message, fix = unknown_name(field, fields_at(model, item["loc"][:-1]))
            parts.append(message)
            continue
        message, given = _as_size(item) or (item["msg"].removeprefix("Value error, "), repr(item.get("input")))
        given = given if len(given) <= 60 else given[:57] + "..."
        parts.append(f"{field}: {message} (got {given})" if item["type"] != "missing" else f"{field}: is required")
    fields = [".".join(map(str, e["loc"])) for e in error.errors()]
    return InvalidRequest("; ".join(parts), fix=fix, context={"fields": fields})


_SIZES = frozenset({"memory", "disk", "output"})
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}


def _as_size(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """A size that is too small or too large, with units: a bare number is bytes, which nobody means."""
    bound = _BOUNDS.get(item["type"])
    if bound is None or not item["loc"] or item["loc"][-1] not in _SIZES or not isinstance(item.get("input"), int):
        return None
    from belljar.core.values import format_size  # here: most runs have no use for it

    limit = format_size(item["ctx"][bound[0]])
    return f'must be {bound[1]} {limit}: write it with a unit, such as "512M"', format_size(item["input"])


for _class in (BelljarError, BackendError, Busy, ImageRefused, PullFailed, *_KINDS.values()):
    _class.__module__ = "belljar"  # where users import them from, and what a traceback should say
