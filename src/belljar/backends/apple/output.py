"""What Apple's `container` prints, read for all its versions: the JSON changed its shape in 1.0 and again in 1.4.

Nothing here insists on a field that we do not need, and what cannot be read is an error that says so, never a guess.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from belljar.core import errors

UPGRADE = "install a current release of Apple's container"


class ServiceState(NamedTuple):
    """What `container system status` says."""

    running: bool
    words: str  # its own, when it does not run


class ListedMachine(NamedTuple):
    """One row of `container list`."""

    id: str
    state: str
    labels: dict[str, str]


def version(said: str) -> tuple[int, ...]:
    """Of `container --version`; empty if there is none in it."""
    match = re.search(r"\b(\d+)\.(\d+)(?:\.(\d+))?", said)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def service(code: int, said: str) -> ServiceState:
    """Flat JSON, nested JSON, `status` alone, a table or a sentence: the exit code is the same in all of them."""
    try:
        answer = json.loads(said)
    except ValueError:
        words = " ".join(said.split())
    else:
        words = str(answer.get("status", "")) if isinstance(answer, dict) else ""
        if words and words != "running":
            return ServiceState(False, words)
    return ServiceState(code == 0, "" if code == 0 else words)


def containers(said: str) -> tuple[ListedMachine, ...]:
    """Before 1.0 a state is a word in `status`; from 1.0 on `status` is an object that holds it."""
    try:
        rows = json.loads(said or "[]")
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        raise errors.ExecutionFailed(f"`container list` printed what nobody can read: {said[:80]!r}", fix=UPGRADE)
    return tuple(found for row in rows if isinstance(row, dict) and (found := _container(row)))


def _container(row: dict[str, Any]) -> ListedMachine | None:
    configuration = row.get("configuration")
    configuration = configuration if isinstance(configuration, dict) else {}
    name = row.get("id") or configuration.get("id")
    status = row.get("status")
    state = status.get("state") if isinstance(status, dict) else status
    labels = configuration.get("labels")
    if not isinstance(name, str):
        return None
    words = labels.items() if isinstance(labels, dict) else ()
    return ListedMachine(name, str(state or "unknown"), {str(key): str(value) for key, value in words})


# What it prints when it cannot -> what that means, and what to do.
_MEANINGS: tuple[tuple[str, type[errors.BelljarError], str, str], ...] = (
    (r"XPC connection error|Ensure container system service", errors.NotAvailable,
     "the services of Apple's container do not run", "container system start"),
    (r"no such image|image not found|pull access denied|manifest unknown|repository does not exist|HTTP/?\S* ?40[134]"
     r"|no image (with|for)|failed to (resolve|pull) ", errors.ImageNotFound,
     "the image is not to be had", "container image pull NAME, or choose another image"),
    (r"Unknown option|unexpected argument", errors.NotAvailable,
     "this release of Apple's container lacks an option that the walls need", UPGRADE),
    (r"minimum memory amount", errors.StartFailed, "so little memory boots no virtual machine", "raise `memory`"),
    (r"default kernel|kernel not configured", errors.NotAvailable,
     "Apple's container has no kernel for its virtual machines yet", "container system start --enable-kernel-install"),
)  # fmt: skip


def failure(said: str, what: str) -> errors.BelljarError:
    """Its prose as one of our errors."""
    words = " ".join(said.split())[-400:]
    for pattern, kind, meaning, fix in _MEANINGS:
        if re.search(pattern, said, re.IGNORECASE):
            return kind(f"{what}: {meaning}", fix=fix, context={"said": words})
    return errors.StartFailed(f"{what}: {words or 'container said nothing'}", context={"said": words})
