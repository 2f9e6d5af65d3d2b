"""The backends, by name, imported on first use. A new one is one folder and one row."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from belljar.core.languages import Languages
from belljar.core.settings import Settings

if TYPE_CHECKING:
    from belljar.backends.base import Backend

# Name -> the module with its `create`, in the order `auto` prefers them. The fake is passed in by hand, never chosen.
MODULES = {
    "wasm": "wasm.backend",
    "native": "native.backend",
    "docker": "containers.backend",
    "podman": "containers.podman",
    "apple": "apple.backend",
    "none": "none",
}
NEVER_CHOSEN = ("none",)  # asked for by name, it says no
NAMES = tuple(name for name in MODULES if name not in NEVER_CHOSEN)


def load(name: str, settings: Settings, languages: Languages) -> Backend:
    backend: Backend = import_module(f"belljar.backends.{MODULES[name]}").create(settings, languages)
    return backend
