"""Named profiles: an interpreter's memory after slow imports, so that a run starts where they have been done.

A profile is a checkpoint made at set-up. Nothing of any guest has been in it, and a run gets a copy of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from belljar.backends.snapshot import Snapshot
from belljar.backends.wasm.store import start
from belljar.backends.wasm.worker.messages import ProfileFacts

# What snippets use most; none of it draws random numbers, which would then be the same in every run.
STANDARD = (
    "ast", "base64", "codecs", "collections", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "enum",
    "functools", "inspect", "itertools", "json", "linecache", "math", "operator", "pathlib", "re", "signal", "string",
    "textwrap", "threading", "traceback", "typing", "warnings",
)  # fmt: skip
PROFILES: dict[str, tuple[str, ...]] = {
    "standard": STANDARD,
    "numpy": (*STANDARD, "numpy"),
    "numeric": (*STANDARD, "numpy", "pandas"),
    "plots": (*STANDARD, "numpy", "matplotlib.pyplot"),
}
_COSTS = {"numpy": 100, "pandas": 300, "matplotlib": 200}  # about how many times longer than another import


class Profile(NamedTuple):
    """A profile that a worker can be given: bytes of memory, how many pages were written, and the open file."""

    name: str
    size: int
    pages: int
    file: int

    def facts(self) -> ProfileFacts:
        return {"name": self.name, "size": self.size, "pages": self.pages}


def covering(modules: Collection[str], built: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the profile that saves most of the time these imports take; of several, the smallest."""

    def covered(name: str) -> int:
        tops = {module.split(".")[0] for module in PROFILES[name]}
        return sum(_COSTS.get(module, 1) for module in tops.intersection(modules))

    known = sorted((name for name in built if name in PROFILES), key=lambda name: int(built[name]["pages"]))
    best = max(known, key=covered, default="")
    return best if best and covered(best) else None


def opened(path: str, name: str, facts: Mapping[str, Any]) -> Profile:
    """Opens a built profile."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    return Profile(name, int(facts["size"]), int(facts["pages"]), fd)


def keep(path: Path, copy: Snapshot) -> dict[str, Any]:
    """Writes a profile's pages beside the compiled modules; returns what the store's list says of it."""
    draft = path.with_suffix(".draft")  # workers may have the old one mapped
    with open(draft, "wb") as file, open(os.dup(copy.pages), "rb") as pages:
        pages.seek(0)
        shutil.copyfileobj(pages, file)
    draft.chmod(0o644 if os.geteuid() == 0 else 0o600)
    draft.rename(path)
    return {"size": copy.size, "pages": copy.count, "start": start()}
