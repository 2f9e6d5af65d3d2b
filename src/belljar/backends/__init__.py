"""The backends, by name, imported on first use. A new one is one module and one row."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from belljar.settings import Settings

if TYPE_CHECKING:
    from belljar.backends.base import Backend

# In the order `auto` prefers them. The fake is not here: it is passed in by hand, never chosen.
NAMES = ("wasm", "native", "docker", "podman", "apple")
NEVER_CHOSEN = ("none",)  # asked for by name, it says no


def load(name: str, settings: Settings) -> Backend:
    backend: Backend = import_module(f"belljar.backends.{name}").create(settings)
    return backend
