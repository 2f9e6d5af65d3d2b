"""Belljar runs code that nobody has read yet, where it can do no harm, and returns a typed answer.

>>> import belljar
>>> belljar.run("print(1)").stdout
'1\\n'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Imported on first use, so that `import belljar` costs next to nothing.
_PUBLIC = {
    "run": "sandbox", "arun": "sandbox", "stream": "sandbox", "Sandbox": "sandbox", "Cancel": "sandbox",
    "Session": "session.session", "Engine": "engine.engine", "Client": "client.client",
    "Result": "core.result", "Status": "core.result", "ErrorType": "core.result", "Limits": "core.request",
    "Event": "core.result",
    "BelljarError": "core.errors", "BackendError": "core.errors", "InvalidRequest": "core.errors",
    "PolicyDenied": "core.errors",
    "NotAvailable": "core.errors",
    "ImageNotFound": "core.errors",
    "ImageRefused": "core.errors",
    "StartFailed": "core.errors",
    "PullFailed": "core.errors",
    "ExecutionFailed": "core.errors",
    "BackendTimeout": "core.errors",
    "Aborted": "core.errors",
    "CleanupFailed": "core.errors",
    "Unauthorized": "core.errors",
    "NotFound": "core.errors",
    "Busy": "core.errors",
    "supported_languages": "sandbox", "offers": "sandbox",
    "detect": "containers", "adetect": "containers",
    "run_in_container": "containers", "arun_in_container": "containers",
    "build_image": "containers", "abuild_image": "containers",
    "is_container_available": "containers", "ais_container_available": "containers",
}  # fmt: skip

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from belljar.client.client import Client as Client
    from belljar.containers import abuild_image as abuild_image
    from belljar.containers import adetect as adetect
    from belljar.containers import ais_container_available as ais_container_available
    from belljar.containers import arun_in_container as arun_in_container
    from belljar.containers import build_image as build_image
    from belljar.containers import detect as detect
    from belljar.containers import is_container_available as is_container_available
    from belljar.containers import run_in_container as run_in_container
    from belljar.core.errors import Aborted as Aborted
    from belljar.core.errors import BackendError as BackendError
    from belljar.core.errors import BackendTimeout as BackendTimeout
    from belljar.core.errors import BelljarError as BelljarError
    from belljar.core.errors import Busy as Busy
    from belljar.core.errors import CleanupFailed as CleanupFailed
    from belljar.core.errors import ExecutionFailed as ExecutionFailed
    from belljar.core.errors import ImageNotFound as ImageNotFound
    from belljar.core.errors import ImageRefused as ImageRefused
    from belljar.core.errors import InvalidRequest as InvalidRequest
    from belljar.core.errors import NotAvailable as NotAvailable
    from belljar.core.errors import NotFound as NotFound
    from belljar.core.errors import PolicyDenied as PolicyDenied
    from belljar.core.errors import PullFailed as PullFailed
    from belljar.core.errors import StartFailed as StartFailed
    from belljar.core.errors import Unauthorized as Unauthorized
    from belljar.core.request import Limits as Limits
    from belljar.core.result import ErrorType as ErrorType
    from belljar.core.result import Event as Event
    from belljar.core.result import Result as Result
    from belljar.core.result import Status as Status
    from belljar.engine.engine import Engine as Engine
    from belljar.sandbox import Cancel as Cancel
    from belljar.sandbox import Sandbox as Sandbox
    from belljar.sandbox import arun as arun
    from belljar.sandbox import offers as offers
    from belljar.sandbox import run as run
    from belljar.sandbox import stream as stream
    from belljar.sandbox import supported_languages as supported_languages
    from belljar.session.session import Session as Session


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'belljar' has no attribute {name!r}")
    value = getattr(import_module(f"belljar.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
