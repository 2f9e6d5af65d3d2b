"""`RemoteLivingSandbox`: a living sandbox on a server from blocking code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from belljar.client.living.sandbox import AsyncRemoteLivingSandbox
from belljar.control.callbacks import Cancel, Listener, OutputCallback
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.options import CommandOptions, StrPath, TestRunOptions
from belljar.core.result import Result
from belljar.core.test_results.model import TestReport
from belljar.host import portal
from belljar.living.blocking import LivingPart
from belljar.protocol.living import SandboxRecord
from belljar.test_runs.runs import TestListener


class RemoteLivingSandbox(LivingPart[AsyncRemoteLivingSandbox]):
    """A living sandbox on a server: `with client.sandbox(living=True) as box`, or `box = client.sandbox(id)`.

    A block ends the sandbox that it opened, and leaves alone one that was there before. Without a block it lives until
    `close`, or until its time is over, whatever becomes of this process.
    """

    @property
    def id(self) -> str:
        """The id by which `client.sandbox(id)` finds it again."""
        return self._core.id

    @property
    def backend(self) -> str:
        """The backend that took it."""
        return self._core.backend

    @property
    def record(self) -> SandboxRecord:
        """What the server said of it when it was last asked; `refresh` asks again."""
        return self._core.record

    def refresh(self) -> SandboxRecord:
        """Asks the server how it is, and returns the answer."""
        return portal.call(self._core.refresh)

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a snippet, or the file of this machine at `path`, beside whatever else runs. See `AsyncSandbox.run`."""
        return portal.call(
            lambda: self._core.run(
                code, path=path, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr, cancel=cancel, **options
            )
        )

    def exec(
        self, command: str | Iterable[str], *, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command with its arguments, or a line of shell; otherwise as `run`."""
        return portal.call(
            lambda: self._core.exec(
                command, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr, cancel=cancel, **options
            )
        )

    def test(
        self, command: str | Iterable[str] | None = None, *, on_event: Listener | None = None,
        on_test: TestListener | None = None, cancel: Cancel | None = None, **options: Unpack[TestRunOptions],
    ) -> TestReport:  # fmt: skip
        """Runs the tests of the project in its /workspace: see `AsyncSandbox.test`."""
        return portal.call(
            lambda: self._core.test(command, on_event=on_event, on_test=on_test, cancel=cancel, **options)
        )

    def link(self, path: str, *, write: bool = False, seconds: float = 600.0) -> str:
        """Returns an address at which whoever has it can read one file for a while: see `AsyncRemoteLivingSandbox`."""
        return portal.call(partial(self._core.link, path, write=write, seconds=seconds))

    def expose(self, port: int, *, seconds: float = 3600.0) -> str:
        """Returns an address at which whoever has it sees a port of the sandbox in a browser for a while."""
        return portal.call(partial(self._core.expose, port, seconds=seconds))

    def snapshot(self, *, labels: Mapping[str, str] | None = None) -> BoxSnapshot:
        """Keeps its files as they are now: `client.sandbox(snapshot=...)` begins with them."""
        return portal.call(partial(self._core.snapshot, labels=labels))

    def fork(self, *, labels: Mapping[str, str] | None = None, expires: float | None = None) -> RemoteLivingSandbox:
        """Opens another sandbox with the same files: see `AsyncRemoteLivingSandbox.fork`."""
        return RemoteLivingSandbox(portal.call(partial(self._core.fork, labels=labels, expires=expires)))

    # It is held open by the server, not by a task of this process.

    def _open(self) -> Self:
        portal.call(self._core._opened)
        return self

    def close(self) -> None:
        """Ends it with all that runs in it. Closing twice does no harm."""
        portal.call(self._core.close)

    def __enter__(self) -> Self:
        portal.call(self._core.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        portal.call(self._core.__aexit__, kind, error, trace)
