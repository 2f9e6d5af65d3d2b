"""Belljar runs code that nobody has read yet, where it can do no harm, and returns a typed answer.

>>> import belljar
>>> belljar.run("print(1)").stdout
'1\\n'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from belljar.core.version import __version__

# Where each public name lives. They are imported on first use, so that `import belljar` costs next to nothing.
_MODULES: dict[str, str] = {
    "sandbox": (
        "run arun stream astream Sandbox AsyncSandbox list_backends alist_backends supported_languages "
        "asupported_languages list_snapshots alist_snapshots remove_snapshot aremove_snapshot"
    ),
    "living.blocking": "Process BoxInterpreter Connection",
    "living.process": "AsyncProcess",
    "living.files": "Files AsyncFiles",
    "living.interpreter": "AsyncBoxInterpreter",
    "project_tests": "test atest",
    "core.test_results.model": "TestReport TestCase TestFailure FlakyTest Coverage FileCoverage",
    "living.network": "Network AsyncNetwork",
    "core.net_change": "NetworkRecord",
    "session.session": "Session AsyncSession Checkpoint",
    "client.client": "Client",
    "client.async_client": "AsyncClient",
    "client.sessions": "RemoteSession AsyncRemoteSession RemoteSandbox AsyncRemoteSandbox RemoteCheckpoint",
    "client.living.blocking": "RemoteLivingSandbox",
    "client.living.sandbox": "AsyncRemoteLivingSandbox",
    "client.living.process": "AsyncRemoteProcess",
    "client.living.interpreter": "AsyncRemoteInterpreter",
    "engine.engine": "Engine",
    "control.callbacks": "Cancel",
    "control.stream": "Stream AsyncStream",
    "containers": (
        "execute_code aexecute_code execute_file aexecute_file check_sandbox_health acheck_sandbox_health "
        "detect adetect Detected Detection run_in_container arun_in_container build_image abuild_image "
        "is_container_available ais_container_available"
    ),
    "images.build_log": "BuildReport",
    "core.options": "RunOptions SandboxOptions SessionOptions CommandOptions TestRunOptions",
    "core.request": "Limits Egress Workspace Deterministic",
    "core.result": "Result SandboxHealth Status ErrorType Failure GuestException File Entry Event",
    "core.box_snapshot": "BoxSnapshot",
    "core.process": "BoxProcess Chunk FileChange FileStat PtySize",
    "core.capabilities": "Capabilities Guarantees Isolation LanguageSupport",
    "protocol.living": "ProcessRecord SandboxRecord",
    "protocol.records": "LogLine RunRecord SandboxMetrics SessionRecord",
    "core.errors": (
        "BelljarError BackendError InvalidRequest PolicyDenied NotAvailable ImageNotFound ImageRefused "
        "StartFailed PullFailed ExecutionFailed BackendTimeout Aborted CleanupFailed Unauthorized NotFound "
        "Busy Elsewhere SessionEnded"
    ),
}
_PUBLIC: dict[str, str] = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Aborted",
    "AsyncBoxInterpreter",
    "AsyncClient",
    "AsyncFiles",
    "AsyncNetwork",
    "AsyncProcess",
    "AsyncRemoteInterpreter",
    "AsyncRemoteLivingSandbox",
    "AsyncRemoteProcess",
    "AsyncRemoteSandbox",
    "AsyncRemoteSession",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncStream",
    "BackendError",
    "BackendTimeout",
    "BelljarError",
    "BoxInterpreter",
    "BoxProcess",
    "BoxSnapshot",
    "BuildReport",
    "Busy",
    "Cancel",
    "Capabilities",
    "Checkpoint",
    "Chunk",
    "CleanupFailed",
    "Client",
    "CommandOptions",
    "Connection",
    "Coverage",
    "Detected",
    "Detection",
    "Deterministic",
    "Egress",
    "Elsewhere",
    "Engine",
    "Entry",
    "ErrorType",
    "Event",
    "ExecutionFailed",
    "Failure",
    "File",
    "FileChange",
    "FileCoverage",
    "FileStat",
    "Files",
    "FlakyTest",
    "Guarantees",
    "GuestException",
    "ImageNotFound",
    "ImageRefused",
    "InvalidRequest",
    "Isolation",
    "LanguageSupport",
    "Limits",
    "LogLine",
    "Network",
    "NetworkRecord",
    "NotAvailable",
    "NotFound",
    "PolicyDenied",
    "Process",
    "ProcessRecord",
    "PtySize",
    "PullFailed",
    "RemoteCheckpoint",
    "RemoteLivingSandbox",
    "RemoteSandbox",
    "RemoteSession",
    "Result",
    "RunOptions",
    "RunRecord",
    "Sandbox",
    "SandboxHealth",
    "SandboxMetrics",
    "SandboxOptions",
    "SandboxRecord",
    "Session",
    "SessionEnded",
    "SessionOptions",
    "SessionRecord",
    "StartFailed",
    "Status",
    "Stream",
    "TestCase",
    "TestFailure",
    "TestReport",
    "TestRunOptions",
    "Unauthorized",
    "Workspace",
    "__version__",
    "abuild_image",
    "acheck_sandbox_health",
    "adetect",
    "aexecute_code",
    "aexecute_file",
    "ais_container_available",
    "alist_backends",
    "alist_snapshots",
    "aremove_snapshot",
    "arun",
    "arun_in_container",
    "astream",
    "asupported_languages",
    "atest",
    "build_image",
    "check_sandbox_health",
    "detect",
    "execute_code",
    "execute_file",
    "is_container_available",
    "list_backends",
    "list_snapshots",
    "remove_snapshot",
    "run",
    "run_in_container",
    "stream",
    "supported_languages",
    "test",
]

if TYPE_CHECKING:
    from belljar.client.async_client import AsyncClient as AsyncClient
    from belljar.client.client import Client as Client
    from belljar.client.living.blocking import RemoteLivingSandbox as RemoteLivingSandbox
    from belljar.client.living.interpreter import AsyncRemoteInterpreter as AsyncRemoteInterpreter
    from belljar.client.living.process import AsyncRemoteProcess as AsyncRemoteProcess
    from belljar.client.living.sandbox import AsyncRemoteLivingSandbox as AsyncRemoteLivingSandbox
    from belljar.client.sessions import AsyncRemoteSandbox as AsyncRemoteSandbox
    from belljar.client.sessions import AsyncRemoteSession as AsyncRemoteSession
    from belljar.client.sessions import RemoteCheckpoint as RemoteCheckpoint
    from belljar.client.sessions import RemoteSandbox as RemoteSandbox
    from belljar.client.sessions import RemoteSession as RemoteSession
    from belljar.containers import Detected as Detected
    from belljar.containers import Detection as Detection
    from belljar.containers import abuild_image as abuild_image
    from belljar.containers import acheck_sandbox_health as acheck_sandbox_health
    from belljar.containers import adetect as adetect
    from belljar.containers import aexecute_code as aexecute_code
    from belljar.containers import aexecute_file as aexecute_file
    from belljar.containers import ais_container_available as ais_container_available
    from belljar.containers import arun_in_container as arun_in_container
    from belljar.containers import build_image as build_image
    from belljar.containers import check_sandbox_health as check_sandbox_health
    from belljar.containers import detect as detect
    from belljar.containers import execute_code as execute_code
    from belljar.containers import execute_file as execute_file
    from belljar.containers import is_container_available as is_container_available
    from belljar.containers import run_in_container as run_in_container
    from belljar.control.callbacks import Cancel as Cancel
    from belljar.control.stream import AsyncStream as AsyncStream
    from belljar.control.stream import Stream as Stream
    from belljar.core.box_snapshot import BoxSnapshot as BoxSnapshot
    from belljar.core.capabilities import Capabilities as Capabilities
    from belljar.core.capabilities import Guarantees as Guarantees
    from belljar.core.capabilities import Isolation as Isolation
    from belljar.core.capabilities import LanguageSupport as LanguageSupport
    from belljar.core.errors import Aborted as Aborted
    from belljar.core.errors import BackendError as BackendError
    from belljar.core.errors import BackendTimeout as BackendTimeout
    from belljar.core.errors import BelljarError as BelljarError
    from belljar.core.errors import Busy as Busy
    from belljar.core.errors import CleanupFailed as CleanupFailed
    from belljar.core.errors import Elsewhere as Elsewhere
    from belljar.core.errors import ExecutionFailed as ExecutionFailed
    from belljar.core.errors import ImageNotFound as ImageNotFound
    from belljar.core.errors import ImageRefused as ImageRefused
    from belljar.core.errors import InvalidRequest as InvalidRequest
    from belljar.core.errors import NotAvailable as NotAvailable
    from belljar.core.errors import NotFound as NotFound
    from belljar.core.errors import PolicyDenied as PolicyDenied
    from belljar.core.errors import PullFailed as PullFailed
    from belljar.core.errors import SessionEnded as SessionEnded
    from belljar.core.errors import StartFailed as StartFailed
    from belljar.core.errors import Unauthorized as Unauthorized
    from belljar.core.net_change import NetworkRecord as NetworkRecord
    from belljar.core.options import CommandOptions as CommandOptions
    from belljar.core.options import RunOptions as RunOptions
    from belljar.core.options import SandboxOptions as SandboxOptions
    from belljar.core.options import SessionOptions as SessionOptions
    from belljar.core.options import TestRunOptions as TestRunOptions
    from belljar.core.process import BoxProcess as BoxProcess
    from belljar.core.process import Chunk as Chunk
    from belljar.core.process import FileChange as FileChange
    from belljar.core.process import FileStat as FileStat
    from belljar.core.process import PtySize as PtySize
    from belljar.core.request import Deterministic as Deterministic
    from belljar.core.request import Egress as Egress
    from belljar.core.request import Limits as Limits
    from belljar.core.request import Workspace as Workspace
    from belljar.core.result import Entry as Entry
    from belljar.core.result import ErrorType as ErrorType
    from belljar.core.result import Event as Event
    from belljar.core.result import Failure as Failure
    from belljar.core.result import File as File
    from belljar.core.result import GuestException as GuestException
    from belljar.core.result import Result as Result
    from belljar.core.result import SandboxHealth as SandboxHealth
    from belljar.core.result import Status as Status
    from belljar.core.test_results.model import Coverage as Coverage
    from belljar.core.test_results.model import FileCoverage as FileCoverage
    from belljar.core.test_results.model import FlakyTest as FlakyTest
    from belljar.core.test_results.model import TestCase as TestCase
    from belljar.core.test_results.model import TestFailure as TestFailure
    from belljar.core.test_results.model import TestReport as TestReport
    from belljar.engine.engine import Engine as Engine
    from belljar.images.build_log import BuildReport as BuildReport
    from belljar.living.blocking import BoxInterpreter as BoxInterpreter
    from belljar.living.blocking import Connection as Connection
    from belljar.living.blocking import Process as Process
    from belljar.living.files import AsyncFiles as AsyncFiles
    from belljar.living.files import Files as Files
    from belljar.living.interpreter import AsyncBoxInterpreter as AsyncBoxInterpreter
    from belljar.living.network import AsyncNetwork as AsyncNetwork
    from belljar.living.network import Network as Network
    from belljar.living.process import AsyncProcess as AsyncProcess
    from belljar.project_tests import atest as atest
    from belljar.project_tests import test as test
    from belljar.protocol.living import ProcessRecord as ProcessRecord
    from belljar.protocol.living import SandboxRecord as SandboxRecord
    from belljar.protocol.records import LogLine as LogLine
    from belljar.protocol.records import RunRecord as RunRecord
    from belljar.protocol.records import SandboxMetrics as SandboxMetrics
    from belljar.protocol.records import SessionRecord as SessionRecord
    from belljar.sandbox import AsyncSandbox as AsyncSandbox
    from belljar.sandbox import Sandbox as Sandbox
    from belljar.sandbox import alist_backends as alist_backends
    from belljar.sandbox import alist_snapshots as alist_snapshots
    from belljar.sandbox import aremove_snapshot as aremove_snapshot
    from belljar.sandbox import arun as arun
    from belljar.sandbox import astream as astream
    from belljar.sandbox import asupported_languages as asupported_languages
    from belljar.sandbox import list_backends as list_backends
    from belljar.sandbox import list_snapshots as list_snapshots
    from belljar.sandbox import remove_snapshot as remove_snapshot
    from belljar.sandbox import run as run
    from belljar.sandbox import stream as stream
    from belljar.sandbox import supported_languages as supported_languages
    from belljar.session.session import AsyncSession as AsyncSession
    from belljar.session.session import Checkpoint as Checkpoint
    from belljar.session.session import Session as Session


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'belljar' has no attribute {name!r}")
    value = getattr(import_module(f"belljar.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
