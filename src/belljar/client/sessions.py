"""Sessions and sandboxes that a server holds open for us; closed when we leave, and by the server if we are gone."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import anyio
from pydantic import ConfigDict

from belljar.backends.control import Control
from belljar.client.runs import GRACE, Record, opening, parse, result_of, watch, word
from belljar.client.transport import Wire
from belljar.core import errors
from belljar.core.model import Model
from belljar.core.options import request
from belljar.core.request import RunRequest
from belljar.core.result import Entry, Result
from belljar.core.values import guest_path
from belljar.engine.lease import Listener
from belljar.host import portal
from belljar.protocol.records import SessionRecord
from belljar.sandbox import Cancel, SyncSandbox, listening
from belljar.session.session import SyncSession

_SESSIONS = "/api/sandbox/sessions"
_OPENING = 60.0  # seconds; an image may have to be unpacked
_CLOSING = 15.0
_UNSPOKEN = 3600.0  # seconds that a turn may take whose timeout is the server's own
_NOT_HERE = ("deterministic", "packages", "profile", "stdin", "collect")


class _Opened(SessionRecord):
    model_config = ConfigDict(extra="ignore")


class _Listed(Model):
    model_config = ConfigDict(extra="ignore")
    path: str
    kind: str
    size: int


class _FileList(Model):
    model_config = ConfigDict(extra="ignore")
    files: tuple[_Listed, ...]


class Checkpoint(Model):
    """What a session was at one moment. The server holds it for as long as the session is open."""

    model_config = ConfigDict(extra="ignore")
    id: str
    bytes: int


class _Held:
    """What sessions and sandboxes share: a life on the server, and files."""

    _kind = ""

    def __init__(self, wire: Wire, asked: RunRequest, idle: float, lifetime: float) -> None:
        for name, value in (("idle", idle), ("lifetime", lifetime)):
            if not (math.isfinite(value) and value > 0):
                raise errors.InvalidRequest(f"{name}: must be a positive number of seconds (got {value!r})")
        if wrong := [name for name in _NOT_HERE if name in asked.model_fields_set and getattr(asked, name)]:
            raise errors.InvalidRequest(f"{wrong[0]}: goes with run, not with what stays open on a server")
        self._wire = wire
        self._asked = asked
        self._body = opening(asked) | {"kind": self._kind, "idle": idle, "lifetime": lifetime}
        self._record: SessionRecord | None = None

    @property
    def id(self) -> str:
        """Of the server's making."""
        return self._open.id

    @property
    def backend(self) -> str:
        """The one that took it."""
        return self._open.backend

    @property
    def _open(self) -> SessionRecord:
        if self._record is None:
            raise errors.InvalidRequest(f"this {self._kind} is not open", fix="use it inside `async with` or `with`")
        return self._record

    def _path(self, *rest: str) -> str:
        return "/".join((_SESSIONS, word(self.id), *rest))

    async def _turn(self, body: dict[str, Any], listener: Listener | None, cancel: Cancel | None) -> Result:
        if listener is not None or cancel is not None:
            return await self._heard(body, listener, cancel)
        timeout = body.get("timeout_seconds") or self._asked.limits.named().get("timeout", _UNSPOKEN)
        try:
            return result_of(await self._post(self._path("run"), body, read=timeout + GRACE))
        except anyio.get_cancelled_exc_class():
            await self._close()  # an interpreter cannot be stopped in the middle and trusted afterwards
            raise

    async def _heard(self, body: dict[str, Any], listener: Listener | None, cancel: Cancel | None) -> Result:
        control = Control()
        if cancel:
            cancel.attach(control)
        answer = await self._post(self._path("run"), body | {"wait": False}, read=self._wire.timeout)
        return await watch(self._wire, parse(Record, answer).id, listener, control)

    async def _post(self, path: str, body: dict[str, Any], *, read: float = _OPENING) -> bytes:
        """Under a key of its own: however often it has to be sent, it is done once."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return await self._wire.ask("POST", path, again=True, json=body, headers=headers, read=read)

    # --- files ---

    async def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        if not isinstance(content, bytes | str):
            raise errors.InvalidRequest(f"content: must be bytes or text, not {type(content).__name__}")
        if executable:
            raise errors.InvalidRequest(
                "executable: a server writes plain files", fix='box.exec(["chmod", "+x", path])'
            )
        data = content.encode() if isinstance(content, str) else content
        await self._wire.ask("PUT", self._file(path), content=data)

    async def read(self, path: str) -> bytes:
        try:
            return await self._wire.ask("GET", self._file(path))
        except errors.NotFound as error:
            await self._wire.ask("GET", self._path())  # is it the session that is not there?
            raise FileNotFoundError(error.message) from None

    async def list(self) -> tuple[Entry, ...]:
        found = parse(_FileList, await self._wire.ask("GET", f"/api/sandbox/{word(self.id)}/files"))
        return tuple(Entry(item.path, item.kind, item.size) for item in found.files)

    def _file(self, path: str) -> str:
        try:
            return f"/api/sandbox/{word(self.id)}/files/{quote(guest_path(path))}"
        except ValueError as error:
            raise errors.InvalidRequest(f"path: {error}") from None

    # --- its life ---

    async def __aenter__(self) -> Self:
        if self._record is not None:
            raise errors.InvalidRequest(f"this {self._kind} is already open", fix="make a second one")
        self._record = parse(_Opened, await self._begin())
        return self

    async def _begin(self) -> bytes:
        return await self._post(_SESSIONS, self._body)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        self._record = None

    async def _close(self) -> None:
        with anyio.move_on_after(_CLOSING, shield=True), suppress(errors.BelljarError):  # else its idle time ends it
            await self._wire.ask("DELETE", self._path(), read=_CLOSING)


class Session(_Held, portal.Twinned["SyncSession"]):
    """A `belljar.Session` on a server: `with client.session() as s: s.run("x = 1"); s.run("x + 1").results`."""

    _kind = "session"
    _origin: tuple[Session, Checkpoint | None] | None = None

    async def run(
        self, code: str, *, timeout: float | None = None, on_event: Listener | None = None,
        on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None,
    ) -> Result:  # fmt: skip
        """One turn. Cancelling it ends the session."""
        asked = request(code, timeout=timeout)
        body = {"code": asked.code} | ({} if timeout is None else {"timeout_seconds": asked.limits.timeout})
        return await self._turn(body, listening(on_event, on_stdout, on_stderr), cancel)

    async def checkpoint(self) -> Checkpoint:
        """What this session is now, to go back to or to branch from as often as you like."""
        return parse(Checkpoint, await self._post(self._path("checkpoints"), {}))

    def fork(self, checkpoint: Checkpoint | None = None) -> Session:
        """An independent session that goes on from a checkpoint of this one, or from how this one is when it is
        opened: `with s.fork() as branch: ...`."""
        branch = Session(self._wire, self._asked, self._body["idle"], self._body["lifetime"])
        branch._origin = (self, checkpoint)
        return branch

    async def _begin(self) -> bytes:
        if self._origin is None:
            return await super()._begin()
        parent, checkpoint = self._origin
        return await self._post(parent._path("fork"), {"checkpoint": checkpoint.id} if checkpoint else {})

    async def rollback(self, checkpoint: Checkpoint) -> None:
        """Makes this session what it was, even if a turn has ended it since."""
        await self._post(self._path("rollback"), {"checkpoint": checkpoint.id})

    async def save(self, path: Any) -> None:
        raise errors.NotAvailable("a server's session cannot be saved to a file here", fix="use checkpoint and fork")

    def twin(self) -> SyncSession:
        return SyncSession(cast(Any, self))


class Sandbox(_Held, portal.Twinned["SyncSandbox"]):
    """A `belljar.Sandbox` on a server: files stay, processes do not outlive their command."""

    _kind = "sandbox"

    async def run(
        self, code: str, *, on_event: Listener | None = None, on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None, cancel: Cancel | None = None, **options: Any,
    ) -> Result:  # fmt: skip
        """Runs a snippet here; its files are those of the box. Options: language, timeout, stdin."""
        body = _turn_body(request(code, **options))
        return await self._turn(body, listening(on_event, on_stdout, on_stderr), cancel)

    async def exec(
        self, command: Iterable[str], *, on_event: Listener | None = None,
        on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None,
        cancel: Cancel | None = None, **options: Any,
    ) -> Result:  # fmt: skip
        """Runs a command here. Options: timeout, stdin."""
        body = _turn_body(request(command=command, **options))
        return await self._turn(body, listening(on_event, on_stdout, on_stderr), cancel)

    def twin(self) -> SyncSandbox:
        return SyncSandbox(cast(Any, self))


def _turn_body(asked: RunRequest) -> dict[str, Any]:
    said = asked.model_dump(mode="json", exclude_unset=True)
    body = {name: said[name] for name in ("code", "command", "language", "stdin") if said.get(name) is not None}
    limits = asked.limits.named()
    if "timeout" in limits:
        body["timeout_seconds"] = limits.pop("timeout")
    taken = {"code", "command", "language", "stdin", "limits", "files", "egress", "workspace"}
    if limits or asked.files or asked.egress.hosts or asked.workspace or asked.model_fields_set - taken:
        odd = sorted(limits) or sorted(asked.model_fields_set - taken) or ["files, net and workspace"]
        raise errors.InvalidRequest(f"{odd[0]}: is the sandbox's, not one command's", fix="give it to client.sandbox()")
    return body
