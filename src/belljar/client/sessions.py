"""Sessions and sandboxes that a server holds open for us; closed when we leave, and by the server if we are gone."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import anyio

from belljar.client.runs import GRACE_SECONDS, opening, parse, path_part, watch
from belljar.client.transport import Transport
from belljar.control.callbacks import Cancel, Listener, OutputCallback, control_for, listening
from belljar.core import errors
from belljar.core.languages import Languages
from belljar.core.options import StrPath, check_seconds, request
from belljar.core.request import RunRequest
from belljar.core.result import Entry, Result
from belljar.core.spelling import respelled
from belljar.core.values import guest_path
from belljar.host import portal
from belljar.host.lifetime import Openable
from belljar.host.source import turn_code, with_code
from belljar.protocol import file_errors
from belljar.protocol.records import RunRecord, SessionRecord
from belljar.protocol.responses import Checkpointed, FileList

_SESSIONS = "/api/sandbox/sessions"
_OPENING_SECONDS = 60.0  # an image may have to be unpacked
_CLOSING_SECONDS = 15.0
_TURN_SECONDS = 3600.0  # that a turn may take whose timeout is the server's own
_NOT_HERE = ("deterministic", "packages", "profile", "stdin", "args", "collect")
HandleT = TypeVar("HandleT", bound="_AsyncHandle")


class RemoteCommandOptions(TypedDict, total=False):
    """What one run in a sandbox of a server takes."""

    language: str
    """The language of the code; "python" unless given, or told by the file's extension."""
    timeout: float | None
    """Seconds of wall clock after which the run is ended."""
    args: Iterable[str]
    """Arguments of the code: `sys.argv[1:]`, `process.argv.slice(2)`, `$1`."""
    stdin: bytes | str | None
    """What the guest reads from its standard input."""


class RemoteCheckpoint(Checkpointed):
    """What a session was at one moment. The server holds it for as long as the session is open."""


class _AsyncHandle(Openable):
    """What sessions and sandboxes share: a life on the server, and files."""

    def __init__(self, transport: Transport, asked: RunRequest, idle: float, lifetime: float) -> None:
        check_seconds(idle=idle, lifetime=lifetime)
        if wrong := [name for name in _NOT_HERE if name in asked.model_fields_set and getattr(asked, name)]:
            raise errors.InvalidRequest(f"{wrong[0]}: goes with run, not with what stays open on a server")
        self._transport = transport
        self._asked = asked
        self._body = opening(asked) | {"kind": self._kind, "idle": idle, "lifetime": lifetime}
        self._record: SessionRecord | None = None

    @property
    def id(self) -> str:
        """The id that the server gave it."""
        return self._open_record.id

    @property
    def backend(self) -> str:
        """The backend that took it."""
        return self._open_record.backend

    @property
    def _open_record(self) -> SessionRecord:
        if self._record is None:
            raise errors.InvalidRequest(f"this {self._kind} is not open", fix="use it in a `with` block, or await it")
        return self._record

    def _path(self, *rest: str) -> str:
        return "/".join((_SESSIONS, path_part(self.id), *rest))

    async def _turn(self, body: dict[str, Any], listener: Listener | None, cancel: Cancel | None) -> Result:
        if listener is not None or cancel is not None:
            return await self._followed(body, listener, cancel)
        timeout = body.get("timeout_seconds") or self._asked.limits.named().get("timeout", _TURN_SECONDS)
        try:
            answer = await self._post(self._path("run"), body, read=timeout + GRACE_SECONDS)
            return respelled(parse(Result, answer), "python")
        except anyio.get_cancelled_exc_class():
            await self._end()  # an interpreter cannot be stopped in the middle and trusted afterwards
            raise

    async def _followed(self, body: dict[str, Any], listener: Listener | None, cancel: Cancel | None) -> Result:
        control = control_for(cancel)
        answer = await self._post(self._path("run"), body | {"wait": False}, read=self._transport.timeout)
        return await watch(self._transport, parse(RunRecord, answer).id, listener, control)

    async def _post(self, path: str, body: dict[str, Any], *, read: float = _OPENING_SECONDS) -> bytes:
        """Sends it under a key of its own: however often it has to be sent, it is done once."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return await self._transport.ask("POST", path, again=True, json=body, headers=headers, read=read)

    # --- files ---

    async def write(self, path: str, content: bytes | str) -> None:
        """Writes a file, text or bytes, by its name below /workspace."""
        if not isinstance(content, bytes | str):
            raise errors.InvalidRequest(f"content: must be bytes or text, not {type(content).__name__}")
        data = content.encode() if isinstance(content, str) else content
        with file_errors.raised(path):
            await self._transport.ask("PUT", self._file(path), content=data)

    async def read(self, path: str) -> bytes:
        """Returns the content of a file, or raises the OSError that the guest would get."""
        with file_errors.raised(path):
            return await self._transport.ask("GET", self._file(path))

    async def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        found = parse(FileList, await self._transport.ask("GET", f"/api/sandbox/{path_part(self.id)}/files"))
        return tuple(Entry(item.path, item.kind, item.size) for item in found.files)

    def _file(self, path: str) -> str:
        try:
            return f"/api/sandbox/{path_part(self.id)}/files/{quote(guest_path(path))}"
        except ValueError as error:
            raise errors.InvalidRequest(f"path: {error}") from None

    # --- its life ---

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        self._record = parse(SessionRecord, await self._begin())
        try:
            yield
        finally:
            await self._end()
            self._record = None

    async def _begin(self) -> bytes:
        return await self._post(_SESSIONS, self._body)

    async def _end(self) -> None:
        with anyio.move_on_after(_CLOSING_SECONDS, shield=True), suppress(errors.BelljarError):  # else it ends idle
            await self._transport.ask("DELETE", self._path(), read=_CLOSING_SECONDS)


class AsyncRemoteSession(_AsyncHandle):
    """An `AsyncSession` on a server: `async with client.session() as s: await s.run("x = 1")`."""

    _kind: ClassVar[str] = "session"
    _origin: tuple[AsyncRemoteSession, RemoteCheckpoint | None] | None = None

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None,
    ) -> Result:  # fmt: skip
        """Runs one turn; cancelling it ends the session. See `AsyncSession.run`; `path` is a file of this machine."""
        asked = request(await turn_code(code, path), timeout=timeout)
        body = {"code": asked.code} | ({} if timeout is None else {"timeout_seconds": asked.limits.timeout})
        return await self._turn(body, listening(on_event, on_stdout, on_stderr), cancel)

    async def checkpoint(self) -> RemoteCheckpoint:
        """Copies what this session is now, to go back to or to branch from as often as you like."""
        return parse(RemoteCheckpoint, await self._post(self._path("checkpoints"), {}))

    def fork(self, checkpoint: RemoteCheckpoint | None = None) -> AsyncRemoteSession:
        """Returns an independent session that goes on from here: `async with s.fork() as branch`, or `await s.fork()`.

        Args:
            checkpoint: where it begins; unless given, with what this session is when the new one is opened.
        """
        branch = AsyncRemoteSession(self._transport, self._asked, self._body["idle"], self._body["lifetime"])
        branch._origin = (self, checkpoint)
        return branch

    async def _begin(self) -> bytes:
        if self._origin is None:
            return await super()._begin()
        parent, checkpoint = self._origin
        return await self._post(parent._path("fork"), {"checkpoint": checkpoint.id} if checkpoint else {})

    async def rollback(self, checkpoint: RemoteCheckpoint) -> None:
        """Makes this session what it was, even if a turn has ended it since."""
        await self._post(self._path("rollback"), {"checkpoint": checkpoint.id})


class AsyncRemoteSandbox(_AsyncHandle):
    """An `AsyncSandbox` on a server: files stay, processes do not outlive their command."""

    _kind: ClassVar[str] = "sandbox"

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, **options: Unpack[RemoteCommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a snippet, or the file of this machine at `path`, in this sandbox. See `AsyncSandbox.run`."""
        body = _turn_body(**await with_code(code, path, options, Languages()))
        return await self._turn(body, listening(on_event, on_stdout, on_stderr), cancel)

    async def exec(
        self, command: Iterable[str], *, on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None,
        **options: Unpack[RemoteCommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command with its arguments in this sandbox; otherwise as `run`."""
        body = _turn_body(command=command, **options)
        return await self._turn(body, listening(on_event, on_stdout, on_stderr), cancel)


def _turn_body(**options: Any) -> dict[str, Any]:
    asked = request(**options)
    if odd := sorted(options.keys() - RemoteCommandOptions.__annotations__.keys() - {"code", "command"}):
        raise errors.InvalidRequest(f"{odd[0]}: is the sandbox's, not one command's", fix="give it to client.sandbox()")
    said = asked.model_dump(mode="json", include={"code", "command", "args", "language", "stdin"}, exclude_unset=True)
    body = {name: value for name, value in said.items() if value is not None}
    return body | ({"timeout_seconds": asked.limits.timeout} if "timeout" in asked.limits.model_fields_set else {})


# --- for blocking code ---


class _Handle(portal.Blocking[HandleT]):
    """The blocking twin of what a server holds open."""

    @property
    def id(self) -> str:
        """The id that the server gave it."""
        return self._core.id

    @property
    def backend(self) -> str:
        """The backend that took it."""
        return self._core.backend

    def write(self, path: str, content: bytes | str) -> None:
        """Writes a file, text or bytes, by its name below /workspace."""
        portal.call(self._core.write, path, content)

    def read(self, path: str) -> bytes:
        """Returns the content of a file, or raises the OSError that the guest would get."""
        return portal.call(self._core.read, path)

    def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        return portal.call(self._core.list)


class RemoteSession(_Handle[AsyncRemoteSession]):
    """A `Session` on a server: `with client.session() as s: s.run("x = 1"); s.run("x + 1").results`."""

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None,
    ) -> Result:  # fmt: skip
        """Runs one turn: see `AsyncSession.run`. Callbacks are called from another thread."""
        return portal.call(
            lambda: self._core.run(
                code, path=path, timeout=timeout, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr,
                cancel=cancel,
            )
        )  # fmt: skip

    def checkpoint(self) -> RemoteCheckpoint:
        """Copies what this session is now, to go back to or to branch from as often as you like."""
        return portal.call(self._core.checkpoint)

    def fork(self, checkpoint: RemoteCheckpoint | None = None) -> RemoteSession:
        """Opens an independent session that goes on from a checkpoint, or from what this one is now."""
        return RemoteSession(self._core.fork(checkpoint))._open()

    def rollback(self, checkpoint: RemoteCheckpoint) -> None:
        """Makes this session what it was, even if a turn has ended it since."""
        portal.call(self._core.rollback, checkpoint)


class RemoteSandbox(_Handle[AsyncRemoteSandbox]):
    """A `Sandbox` on a server: files stay, processes do not outlive their command."""

    def run(
        self, code: str | None = None, *, path: StrPath | None = None, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, **options: Unpack[RemoteCommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a snippet, or the file of this machine at `path`, in this sandbox. See `AsyncSandbox.run`."""
        return portal.call(
            lambda: self._core.run(
                code, path=path, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr, cancel=cancel, **options
            )
        )

    def exec(
        self, command: Iterable[str], *, on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None,
        **options: Unpack[RemoteCommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command with its arguments in this sandbox; otherwise as `run`."""
        return portal.call(
            lambda: self._core.exec(
                command, on_event=on_event, on_stdout=on_stdout, on_stderr=on_stderr, cancel=cancel, **options
            )
        )
