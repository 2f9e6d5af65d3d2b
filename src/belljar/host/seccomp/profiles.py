"""Seccomp profiles of an administrator's own, in the engines' format: read and looked through before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ACTIONS = frozenset(
    f"SCMP_ACT_{word}" for word in ("KILL", "KILL_PROCESS", "KILL_THREAD", "TRAP", "ERRNO", "TRACE", "ALLOW", "LOG")
)
_PROFILE_KEYS = {
    "comment", "defaultAction", "defaultErrnoRet", "defaultErrno", "architectures", "archMap", "syscalls", "flags",
}  # fmt: skip
_RULE_KEYS = {
    "comment", "name", "names", "action", "args", "errnoRet", "errno", "includes", "excludes"
}  # fmt: skip


def read_profile(path: str) -> str:
    """The text of a seccomp profile in the engines' format, or `ValueError` that says what is wrong with it."""
    if not path.startswith("/"):
        raise ValueError(f"{path[:80]!r} is not an absolute path of a seccomp profile")
    try:
        text = Path(path).read_text("utf-8")
        profile = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ValueError(f"{path}: the seccomp profile cannot be read: {why}") from None
    if wrong := _wrong_in_profile(profile):
        raise ValueError(f"{path}: this is no seccomp profile of an engine: {wrong}")
    return text


def _wrong_in_profile(profile: Any) -> str:
    if not isinstance(profile, dict):
        return "it is no object"
    if unknown := sorted(set(profile) - _PROFILE_KEYS):
        return f"there is no key {unknown[0]!r}"
    if profile.get("defaultAction") not in _ACTIONS:
        return f"defaultAction must be one of {', '.join(sorted(_ACTIONS))}"
    rules = profile.get("syscalls", [])
    if not isinstance(rules, list):
        return "syscalls must be a list"
    return next((f"syscalls.{number}: {wrong}" for number, rule in enumerate(rules) if (wrong := _wrong_in(rule))), "")


def _wrong_in(rule: Any) -> str:
    if not isinstance(rule, dict):
        return "a rule is an object"
    if unknown := sorted(set(rule) - _RULE_KEYS):
        return f"there is no key {unknown[0]!r}"
    names = rule.get("names", [rule["name"]] if "name" in rule else None)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        return "names must be a list of system calls"
    if rule.get("action") not in _ACTIONS:
        return f"action must be one of {', '.join(sorted(_ACTIONS))}"
    return ""
