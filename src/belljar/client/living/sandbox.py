"""A living sandbox on a server: `AsyncSandbox(living=True)` over HTTP. It lives on when we go, until its time is up."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, ClassVar, Self, Unpack

import anyio
from anyio.abc import ByteStream

from belljar.client.living.interpreter import AsyncRemoteInterpreter
from belljar.client.living.ports import dial_remote, wait_for_remote
from belljar.client.living.process import AsyncRemoteProcess
from belljar.client.living.tree import RemoteTree
from belljar.client.runs import conduct, opening, parse, path_part
from belljar.client.transport import Transport
from belljar.control.callbacks import Cancel, Listener, OutputCallback, control_for, listening
from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.languages import Languages
from belljar.core.net_change import NetworkChange, NetworkRecord
from belljar.core.options import CommandOptions, StrPath, TestRunOptions, check_port, check_seconds, request
from belljar.core.process import BoxProcess, Feature, PtySize, words
from belljar.core.request import RunRequest
from belljar.core.result import Entry, Result
from belljar.core.test_results.asked import test_options
from belljar.core.test_results.model import TestReport
from belljar.core.values import GIB, WORKSPACE, guest_path
from belljar.host.source import with_code
from belljar.living.files import AsyncFiles
from belljar.living.handles import LivingHandle, lacking, pty_size
from belljar.living.network import AsyncNetwork
from belljar.protocol.living import ProcessRecord, SandboxRecord, SignedLink
from belljar.protocol.previews import ExposedPort
from belljar.test_runs.runs import TestListener, run_tests

SANDBOXES, SNAPSHOTS = "/api/sandboxes", "/api/snapshots"
_OPENING_SECONDS = 120.0  # packages may have to be installed, or an image pulled
_COPYING_SECONDS = 600.0
_ENDING_SECONDS = 15.0  # to end what nobody waits for any more
_CLOSING_SECONDS = 60.0  # its processes have their grace
_DISK_BYTES = 4 * GIB  # of one whose disk is not known
_SAME_IN_TURN = ("code", "command", "args", "language", "stdin", "collect")
_RECURSIVE = 64


class AsyncRemoteLivingSandbox(LivingHandle):
    """A living sandbox on a server: `async with client.sandbox(living=True) as box`, or `await client.sandbox(id)`.

    A block ends the sandbox that it opened, and leaves alone one that was there before. Without a block it lives until
    `close`, or until its time is over, whatever becomes of this process.
    """

    _kind: ClassVar[str] = "sandbox"

    def __init__(self, transport: Transport, asked: RunRequest | None, *, id: str = "") -> None:
        """Is made by `AsyncClient.sandbox`: to be opened as `asked`, or the one that has this `id`."""
        self._transport = transport
        self._asked = asked
        self._id = path_part(id) if asked is None else ""
        self._body = {} if asked is None else _opening(asked)
        self._record: SandboxRecord | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<sandbox {self._record.id}, {self._record.state}>" if self._record else "<sandbox, not open>"

    # --- its life ---

    @property
    def id(self) -> str:
        """The id by which `client.sandbox(id)` finds it again."""
        return self.record.id

    @property
    def backend(self) -> str:
        """The backend that took it."""
        return self.record.backend

    @property
    def record(self) -> SandboxRecord:
        """What the server said of it when it was last asked; `refresh` asks again."""
        if self._record is None:
            raise errors.InvalidRequest("this sandbox is not open", fix="use it in a `with` block, or await it")
        return self._record

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the sandbox or snapshot that it began with had and could not be copied, and why."""
        return self.record.left_out

    @property
    def living(self) -> bool:
        """That it is a living sandbox."""
        return True

    @property
    def home(self) -> str:
        """The home of its programs."""
        return self.record.home

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values of yours."""
        return self.record.labels

    @property
    def expires(self) -> float | None:
        """When it ends by itself, in seconds since 1970, as far as is known; None: it does not."""
        return self.record.expires

    @property
    def paused(self) -> bool:
        """Whether its processes were stopped where they are when the server was last asked."""
        return self.record.state == "paused"

    @property
    def ended(self) -> str:
        """Says how it ended, as far as is known; empty while it lives."""
        return (self.record.reason or "it was closed") if self.record.state in ("ended", "lost") else ""

    async def refresh(self) -> SandboxRecord:
        """Asks the server how it is, and returns the answer."""
        self._record = parse(SandboxRecord, await self._transport.ask("GET", self._path))
        return self._record

    async def pause(self) -> None:
        """Stops all its processes where they are, until `resume`. They keep their memory and use no processor."""
        await self._change("/pause")

    async def resume(self) -> None:
        """Lets its processes go on; one that paused because its time was over gets that time again."""
        await self._change("/resume")

    async def extend(self, seconds: float) -> None:
        """Moves the end of its time to so many seconds from now."""
        check_seconds(seconds=seconds)
        await self._change("/extend", json={"seconds": seconds})

    async def snapshot(self, *, labels: Mapping[str, str] | None = None) -> BoxSnapshot:
        """Keeps its files as they are now: `client.sandbox(snapshot=...)` begins with them."""
        answer = await self._make("/snapshots", {"labels": dict(labels or {})}, read=_COPYING_SECONDS)
        return parse(BoxSnapshot, answer)

    async def fork(
        self, *, labels: Mapping[str, str] | None = None, expires: float | None = None
    ) -> AsyncRemoteLivingSandbox:
        """Opens another sandbox with the same files. It has none of the processes; `close` it when you are done.

        Args:
            labels: its labels; those of this one unless given.
            expires: seconds until it ends; as this one was opened unless given.
        """
        body = {"labels": None if labels is None else dict(labels), "expires": expires}
        copy = AsyncRemoteLivingSandbox(self._transport, self._asked or request(living=True))
        await copy._open_new(f"{self._path}/fork", body, _COPYING_SECONDS)
        return copy

    async def close(self) -> None:
        """Ends it with all that runs in it. Closing twice does no harm."""
        if self._closed or self._record is None:
            return
        with anyio.move_on_after(_CLOSING_SECONDS, shield=True) as waiting:
            with suppress(errors.NotFound, errors.SessionEnded):
                await self._transport.ask("DELETE", self._path, read=_CLOSING_SECONDS)
            self._closed = True
            self._record = self._record.model_copy(update={"state": "ended", "reason": "it was closed"})
        if waiting.cancelled_caught:
            raise errors.BackendTimeout(
                f"{self.id} has not ended after {_CLOSING_SECONDS:g} seconds", fix="close it again"
            )

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._opened().__await__()

    async def _opened(self) -> Self:
        if self._record is None:
            if self._asked is None:
                answer = await self._transport.ask("GET", f"{SANDBOXES}/{self._id}")
                self._record = parse(SandboxRecord, answer)
            else:
                await self._open_new(SANDBOXES, self._body, _OPENING_SECONDS)
            if self.ended:
                raise errors.SessionEnded(f"this sandbox has ended: {self.ended}", fix="open a new one")
        return self

    async def _open_new(self, path: str, body: Mapping[str, Any], seconds: float) -> None:
        again: dict[str, Any] = {"again": True, "json": body, "headers": {"Idempotency-Key": uuid.uuid4().hex}}
        try:
            self._record = parse(SandboxRecord, await self._transport.ask("POST", path, read=seconds, **again))
        except anyio.get_cancelled_exc_class():
            # The server may be opening it. The same key is how to learn its id.
            with anyio.move_on_after(_ENDING_SECONDS, shield=True), suppress(errors.BelljarError):
                self._record = parse(SandboxRecord, await self._transport.ask("POST", path, **again))
                await self.close()
            raise

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        await self._opened()
        try:
            yield
        except BaseException:
            with suppress(errors.BelljarError):  # what went wrong in the block says more
                await self._leave()
            raise
        await self._leave()

    async def _leave(self) -> None:
        if self._asked is not None:  # else it was there before
            await self.close()

    # --- commands ---

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a snippet, or the file of this machine at `path`, beside whatever else runs. See `AsyncSandbox.run`."""
        body = _turn(**await with_code(code, path, options, Languages()))
        return await self._run(body, listening(on_event, on_stdout, on_stderr), cancel)

    async def exec(
        self, command: str | Iterable[str], *, on_event: Listener | None = None,
        on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
        cancel: Cancel | None = None, **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command with its arguments, or a line of shell; otherwise as `run`."""
        return await self._run(
            _turn(command=words(command), **options), listening(on_event, on_stdout, on_stderr), cancel
        )

    async def test(
        self, command: str | Iterable[str] | None = None, *, on_event: Listener | None = None,
        on_test: TestListener | None = None, cancel: Cancel | None = None, **options: Unpack[TestRunOptions],
    ) -> TestReport:  # fmt: skip
        """Runs the tests of the project in its /workspace: see `AsyncSandbox.test`."""
        asked = test_options(command=command, **options)
        return (await run_tests(self, asked, on_event=on_event, on_test=on_test, cancel=cancel))[0]

    async def _run(self, body: dict[str, Any], listener: Listener | None, cancel: Cancel | None) -> Result:
        control = control_for(cancel) if cancel else None
        seconds = body.get("timeout_seconds")
        return await conduct(
            self._transport, f"{self._path}/run", body, seconds=seconds, listener=listener, control=control
        )

    async def start(
        self, command: str | Iterable[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        pty: tuple[int, int] | PtySize | None = None, timeout: float | None = None,
        labels: Mapping[str, str] | None = None, id: str = "",
    ) -> AsyncRemoteProcess:  # fmt: skip
        """Starts a process that goes on beside everything else, and returns when it runs: see `AsyncSandbox.start`.

        Args:
            command: a line of shell, or a program with its arguments.
            cwd: the folder in which it starts, below /workspace unless it begins with a slash.
            env: variables, besides the sandbox's own.
            pty: gives it a terminal of so many columns and rows.
            timeout: seconds after which it is ended; none unless given.
            labels: names and values of your own, to find it by.
            id: its name in this sandbox; a new one unless given.
        """
        words = command if isinstance(command, str) else list(command)
        asked = request(
            command=[words] if isinstance(words, str) else words, env=env or {}, timeout=timeout, living=True
        )
        size = pty_size(pty)
        body = {
            "command": words, "cwd": cwd, "environment": dict(asked.env), "timeout_seconds": timeout,
            "labels": dict(labels or {}), "id": id, "pty": size.model_dump() if size else None,
        }  # fmt: skip
        record = parse(ProcessRecord, await self._make("/processes", body))
        return AsyncRemoteProcess(self._transport, self._path, record)

    async def process(self, id: str) -> AsyncRemoteProcess:
        """Returns a process that was started here, by its id.

        Raises:
            NotFound: there is none, or it ended long ago.
        """
        answer = await self._transport.ask("GET", f"{self._path}/processes/{_process_part(id)}")
        return AsyncRemoteProcess(self._transport, self._path, parse(ProcessRecord, answer))

    @property
    async def started(self) -> tuple[AsyncRemoteProcess, ...]:
        """The processes that were started here: all that run, and the last that have ended."""
        found = parse(list[ProcessRecord], await self._transport.ask("GET", f"{self._path}/processes"))
        return tuple(AsyncRemoteProcess(self._transport, self._path, one) for one in found)

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the sandbox now, by the kernel's word: also what its processes have started."""
        return tuple(parse(list[BoxProcess], await self._transport.ask("GET", f"{self._path}/ps")))

    async def wait_for_port(self, port: int, *, timeout: float = 30.0) -> None:
        """Waits until something in the sandbox listens on a TCP port; raises TimeoutError if nothing does."""
        check_port(port)
        await wait_for_remote(self._transport, self._path, port, timeout)

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the sandbox's own loopback, through the server.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        check_port(port)
        return await dial_remote(self._transport, self._path, port)

    def interpreter(self, language: str = "python", *, env: Mapping[str, str] | None = None) -> AsyncRemoteInterpreter:
        """Returns an interpreter that keeps its variables: `async with box.interpreter() as python`, or `await` it."""
        return AsyncRemoteInterpreter(self._transport, self._path, language, env or {})

    @property
    def network(self) -> AsyncNetwork:
        """What it may reach, told and changed at once: `await box.network.allow("example.org")`."""
        return AsyncNetwork(self._change_network)

    async def _change_network(self, change: NetworkChange | None) -> NetworkRecord:
        method, body = ("GET", None) if change is None else ("PUT", change.model_dump(mode="json", exclude_none=True))
        answer = await self._transport.ask(
            method, f"{self._path}/network", again=True, **({"json": body} if body else {})
        )
        return parse(NetworkRecord, answer)

    # --- files ---

    @property
    def files(self) -> AsyncFiles:
        """Its files, by whole paths."""
        return AsyncFiles(lambda: _Holder(self))

    async def write(self, path: str, content: bytes | str, *, executable: bool = False) -> None:
        """Writes a file, text or bytes, by its name below /workspace."""
        await self.files.write(_below(path), content, 0o755 if executable else None)

    async def read(self, path: str) -> bytes:
        """Returns the content of a file below /workspace, or raises the OSError that its programs would get."""
        return await self.files.read(_below(path))

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file as `read` does, for one that is too large to be held: see `AsyncSandbox.reading`."""
        return self.files.open(_below(path))

    async def list(self) -> tuple[Entry, ...]:
        """Returns what lies below /workspace: path, kind and size of each entry."""
        found = await self.files.list(WORKSPACE, _RECURSIVE)
        return tuple(Entry(item.path.removeprefix(f"{WORKSPACE}/"), item.kind, item.size) for item in found)

    async def link(self, path: str, *, write: bool = False, seconds: float = 600.0) -> str:
        """Returns an address at which whoever has it can read one file for a while, without a key.

        Args:
            path: the file.
            write: it may be written there (PUT) instead.
            seconds: for how long.
        """
        check_seconds(seconds=seconds)
        body = {"path": path, "method": "PUT" if write else "GET", "seconds": seconds}
        made = parse(SignedLink, await self._transport.ask("POST", f"{self._path}/files/links", again=True, json=body))
        return self._transport.url + made.url

    async def expose(self, port: int, *, seconds: float = 3600.0) -> str:
        """Returns an address at which whoever has it sees a port of the sandbox in a browser for a while.

        Args:
            port: at which something listens, or will.
            seconds: for how long; no longer than the sandbox.
        """
        check_port(port)
        check_seconds(seconds=seconds)
        path = f"{self._path}/ports/{port}/expose"
        made = parse(ExposedPort, await self._transport.ask("POST", path, again=True, json={"seconds": seconds}))
        return made.url

    # --- beneath ---

    @property
    def _path(self) -> str:
        return f"{SANDBOXES}/{path_part(self.id)}"

    async def _change(self, what: str, **options: Any) -> None:
        self._record = parse(SandboxRecord, await self._transport.ask("POST", self._path + what, again=True, **options))

    async def _make(self, what: str, body: Mapping[str, Any], *, read: float = _OPENING_SECONDS) -> bytes:
        """Sends it under a key of its own: however often it has to be sent, it is done once."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return await self._transport.ask("POST", self._path + what, again=True, json=body, headers=headers, read=read)


class _Holder:
    """What `AsyncFiles` asks of a sandbox."""

    def __init__(self, box: AsyncRemoteLivingSandbox) -> None:
        self._box = box
        self.tree = RemoteTree(box._transport, box._path)

    @property
    def home(self) -> str:
        return self._box.home

    @property
    def disk(self) -> int:
        return self._box.record.disk or _DISK_BYTES

    def require(self, feature: Feature, what: str) -> None:
        if feature not in self._box.record.features:
            raise lacking(self._box.backend, what)


def labelled(labels: Mapping[str, str] | None) -> dict[str, list[str]]:
    """Returns the query that asks for what has all of these labels."""
    return {"label": [f"{name}:{value}" for name, value in labels.items()]} if labels else {}


def _opening(asked: RunRequest) -> dict[str, Any]:
    """Returns the body that opens a living sandbox: only what was asked for."""
    assert asked.living is not None
    life = asked.living.model_dump(mode="json", exclude_unset=True)
    said = asked.model_dump(mode="json", include={"packages"}, exclude_unset=True)
    rest = {name: value for name, value in (life | said).items() if value is not None}
    body = {name: value for name, value in opening(asked).items() if name != "language"}
    return body | rest


def _turn(**options: Any) -> dict[str, Any]:
    """Returns the body of one command or snippet, or refuses what belongs to the sandbox."""
    asked = request(**options, living=True)
    if odd := sorted(asked.limits.model_fields_set - {"timeout"}):
        raise errors.InvalidRequest(
            f"{odd[0]}: is a limit of the whole sandbox here", fix="give it when you open the sandbox"
        )
    if asked.deterministic:
        raise errors.InvalidRequest("deterministic: goes with run, not with a living sandbox", fix="leave it out")
    said = asked.model_dump(mode="json", include=set(_SAME_IN_TURN) | {"env", "files"}, exclude_unset=True)
    body = {name: said[name] for name in _SAME_IN_TURN if said.get(name) is not None}
    body |= {"environment": said["env"]} if asked.env else {}
    body |= {"context_files": said["files"]} if asked.files else {}
    body |= {"cwd": asked.workdir} if asked.workdir != WORKSPACE else {}
    return body | ({"timeout_seconds": asked.limits.timeout} if "timeout" in asked.limits.model_fields_set else {})


def _process_part(id: str) -> str:
    """Returns the id of a process as one part of a path; any other is the id of none."""
    if (
        not isinstance(id, str)
        or not id.replace(".", "").replace("-", "").replace("_", "").isalnum()
        or not id.isascii()
    ):
        raise errors.NotFound(f"this sandbox has no process {str(id)[:80]!r}", fix="`started` lists those that it has")
    return id


def _below(path: str) -> str:
    try:
        return f"{WORKSPACE}/{guest_path(path)}"
    except ValueError as error:
        raise errors.InvalidRequest(f"path: {error}") from None
