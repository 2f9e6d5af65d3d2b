"""What the administrator lets through, and how anything that is not let through is refused. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

MAX_PIDS = 4096  # that a guest may have; as many as the service's own cap lets anybody ask for


class CallRefused(Exception):
    """The answer is no; the message says why."""


class ProxyRules(NamedTuple):
    """What an administrator lets through, beside what Belljar cannot do without."""

    engine: str = "/var/run/docker.sock"
    roots: tuple[str, ...] = ()  # folders of the host of which a guest may be shown parts
    networks: tuple[str, ...] = ()  # networks of the engine that a guest may have
    profiles: tuple[str, ...] = ()  # seccomp profiles beside ours, by path
    images: bool = False  # may images be pulled, built, tagged and removed?
    writable_root: bool = False  # may a guest write to its root, which is on the engine's disk?
    max_pids: int = MAX_PIDS  # processes that a guest may have


def parse(body: bytes) -> dict[str, Any]:
    """Reads a JSON object in which no name comes twice, or raises `CallRefused`."""
    try:
        found = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise CallRefused("the body is not plain JSON") from None
    if not isinstance(found, dict):
        raise CallRefused("the body is not a JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name.casefold() for name, _ in pairs}) != len(pairs):
        raise CallRefused("a field is given twice")
    return dict(pairs)


def _no_constant(word: str) -> None:
    raise CallRefused(f"{word} is no number")
