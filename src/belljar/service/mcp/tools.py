"""The MCP server: tools for models, over the same `Service` and `Sessions` as every other surface.

The caller is the local user on stdio (`stdio`), and the holder of the request's credential over HTTP (`http`). What a
model gets to read is made by `content`. A guest's failure is a normal answer with its status in it, so that an agent
mends its code; a refusal and a failure of ours are answers with `isError`, and say what to do.

The network is granted by people. A model, which may be repeating what some web page told it to, can ask for no host but
those that whoever started the server listed; with none listed, its code can send nothing anywhere.
"""

from __future__ import annotations

import base64 as base64_codec
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, InputRequiredResult, Tool, ToolAnnotations
from pydantic import Field, TypeAdapter, ValidationError

from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.options import request
from belljar.core.result import Result
from belljar.core.values import HostPattern, covers
from belljar.core.version import __version__
from belljar.engine import audit
from belljar.host.source import decode_source, read_files, with_named_files
from belljar.protocol.records import Caller, Scope, SessionRecord
from belljar.protocol.responses import Executed
from belljar.service.auth import gate
from belljar.service.mcp import content as answer
from belljar.service.mcp import sdk
from belljar.service.run_lifecycle import Run
from belljar.service.service import Service
from belljar.service.sessions import Sessions

CallerOf = Callable[[Context[Any, Any]], Caller]
_TAKING = 60.0  # seconds that taking a run in may last
_ENDING = 10.0  # seconds that a run has to end when its caller does not want it any more
_BEAT = 1.0
_IDLE, _LIFETIME = 600.0, 3600.0  # seconds, of sessions
ALIASES = frozenset(("run_code",))  # names that can be called, and are not listed
_HOSTS = TypeAdapter(tuple[HostPattern, ...])

Code = Annotated[str, Field(description="the whole program")]
Language = Annotated[str, Field(description="python, javascript, typescript, bash, …: list_languages has them all")]
CommandLine = Annotated[list[str], Field(description='program and arguments: ["ls", "-la"]; no shell is involved')]
Arguments = Annotated[list[str] | None, Field(description="what the program finds in sys.argv, process.argv or $1")]
Stdin = Annotated[str, Field(description="what the program reads from stdin")]
Timeout = Annotated[float | None, Field(description="seconds of wall clock; 30 unless configured otherwise", gt=0)]
Net = Annotated[list[str] | None, Field(description="hosts that the code may reach over https; none if left out")]
Backend = Annotated[str, Field(description="leave it at auto unless the user names one: wasm, native, docker, podman")]
Session = Annotated[str, Field(description="the session_id that session_open or session_run answered")]
MaybeSession = Annotated[str | None, Field(description="left out: a new session, whose id is in the answer")]
MaybeBox = Annotated[str | None, Field(description='a session of kind "sandbox"; left out: a fresh sandbox')]
ContextFiles = Annotated[
    dict[str, str] | list[str] | None,
    Field(description="files beside the program: name to text, or names of files of the folder that the user granted"),
]
Libraries = Annotated[
    bool | list[str], Field(description="Python modules that must import; true: all that the code imports")
]
ProjectFile = Annotated[str, Field(description="relative to the folder that the user granted")]
Path = Annotated[str, Field(description="relative to /workspace, or below it")]
Ctx = Context[Any, Any]

Ran = Annotated[CallToolResult, Executed]
TurnRan = Annotated[CallToolResult, answer.Turned]
Opened = Annotated[CallToolResult, answer.SessionOpened]


class OperatorGrants(NamedTuple):
    """What whoever started the server lets models' code have.

    Attributes:
        hosts: what it may reach, if the model asks for it.
        workspace: a folder of the host that all of it finds at /workspace.
        write: whether it may change that folder.
        packages: names of packages that it finds installed, or a Python environment of the host, read-only.
    """

    hosts: tuple[str, ...] = ()
    workspace: str | None = None
    write: bool = False
    packages: str | tuple[str, ...] | None = None

    def folders(self) -> dict[str, Any]:
        """Returns the folders as options of a run."""
        named = {"workspace": self.workspace, "write": self.write or None, "packages": self.packages}
        return {name: value for name, value in named.items() if value is not None}


class Tools:
    """Each public method is a tool; its docstring is what models are told."""

    def __init__(
        self, service: Service, sessions: Sessions, caller_of: CallerOf, grants: OperatorGrants | None = None
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._caller_of = caller_of
        grants = grants or OperatorGrants()
        self._hosts = granted(grants.hosts)
        self._folders = grants.folders()

    # --- one run, one sandbox ---

    async def execute_code(
        self, ctx: Ctx, code: Code, language: Language = "python", stdin: Stdin = "", timeout: Timeout = None,
        net: Net = None, backend: Backend = "auto", args: Arguments = None, context_files: ContextFiles = None,
        require_libraries: Libraries = False,
    ) -> Ran:  # fmt: skip
        """Run a program in a fresh sandbox and return its output. Nothing it does outlives the call; it has no network,
        and no access to the user's files. Print what you want to see. To keep variables and files, use session_run."""
        caller = await self._caller(ctx, "run")
        given = await with_named_files({"files": context_files, **self._folders})
        asked = request(
            code, args=args or (), language=language, stdin=stdin.encode(), timeout=timeout, net=self._net(net),
            backend=backend, require_libraries=require_libraries, **given,
        )  # fmt: skip
        run, result = await self._carry_out(ctx, lambda: self._service.submit(asked, caller))
        return answer.of_run(result, run.id)

    async def execute_file(
        self, ctx: Ctx, path: ProjectFile, stdin: Stdin = "", timeout: Timeout = None, net: Net = None,
        backend: Backend = "auto", args: Arguments = None,
    ) -> Ran:  # fmt: skip
        """Run a file of the folder that the user granted, in a fresh sandbox, and return its output. Its extension
        tells the language."""
        caller = await self._caller(ctx, "run")
        folder = self._folders.get("workspace")
        if folder is None:
            raise errors.InvalidRequest(
                "path: no folder was granted to this server",
                fix="ask the user to start it with belljar mcp --workspace DIR, or send the code to execute_code",
            )
        found = await anyio.to_thread.run_sync(read_files, folder, [path], "path")
        name, content = next(iter(found.items()))
        asked = request(
            decode_source(name, content), args=args or (), language=self._service.engine.languages.of_file(name).name,
            stdin=stdin.encode(), timeout=timeout, net=self._net(net), backend=backend, **self._folders,
        )  # fmt: skip
        run, result = await self._carry_out(ctx, lambda: self._service.submit(asked, caller))
        return answer.of_run(result, run.id)

    async def run_command(
        self, ctx: Ctx, command: CommandLine, stdin: Stdin = "", timeout: Timeout = None, net: Net = None,
        backend: Backend = "auto", session_id: MaybeBox = None,
    ) -> Ran:  # fmt: skip
        """Run a program of the sandbox (not of the user's machine) and return its output; for a shell, write
        ["sh", "-c", "..."]. The wasm backend has no programs: choose native, docker or podman if auto finds none."""
        if session_id is not None:
            caller = await self._caller(ctx, "sessions")
            self._none_of(net, backend)
            run, result = await self._carry_out(
                ctx,
                lambda: self._sessions.run(
                    session_id, caller, code=None, command=command, stdin=stdin.encode(), timeout=timeout
                ),
            )
        else:
            caller = await self._caller(ctx, "run")
            asked = request(
                command=command, stdin=stdin.encode(), timeout=timeout, net=self._net(net), backend=backend,
                **self._folders,
            )  # fmt: skip
            run, result = await self._carry_out(ctx, lambda: self._service.submit(asked, caller))
        return answer.of_run(result, run.id)

    # --- sessions ---

    async def session_open(
        self, ctx: Ctx, kind: Literal["session", "sandbox"] = "session", net: Net = None, backend: Backend = "auto"
    ) -> Opened:
        """Open a session: one Python interpreter that keeps variables, imports and files between calls of session_run.
        kind "sandbox" keeps only files, but takes any language and run_command. Close it when you are done."""
        caller = await self._caller(ctx, "sessions")
        return answer.of_session(await self._open(caller, kind, net, backend))

    async def session_run(
        self, ctx: Ctx, code: Code, session_id: MaybeSession = None, timeout: Timeout = None
    ) -> TurnRan:
        """Run Python in a session: what it defines stays for the next call. The value of a last expression and open
        matplotlib figures are part of the answer. Without session_id a new session is opened."""
        caller = await self._caller(ctx, "sessions")
        opened = session_id is None
        id = session_id or (await self._open(caller, "session", None, "auto")).id
        try:
            run, result = await self._carry_out(
                ctx, lambda: self._sessions.run(id, caller, code=code, command=None, timeout=timeout)
            )
        except BaseException:
            if opened:  # nobody has learned its name
                with anyio.move_on_after(_ENDING, shield=True), suppress(errors.NotFound):
                    await self._sessions.close(id, caller)
            raise
        return answer.of_run(result, run.id, id, opened=opened)

    async def session_fork(self, ctx: Ctx, session_id: Session) -> Opened:
        """Make an independent copy of a session as it is now, memory and files, to try something without losing it.
        Only the wasm backend can do this."""
        caller = await self._caller(ctx, "sessions")
        return answer.of_session(await self._sessions.fork(session_id, caller, None))

    async def session_close(self, ctx: Ctx, session_id: Session) -> Annotated[CallToolResult, answer.Closed]:
        """End a session. Its variables and files are gone."""
        await self._sessions.close(session_id, await self._caller(ctx, "sessions"))
        return answer.of_model(answer.Closed(session_id=session_id), "closed")

    # --- files ---

    async def file_write(
        self, ctx: Ctx, session_id: Session, path: Path,
        content: Annotated[str, Field(description="the file's text")] = "",
        base64: Annotated[str, Field(description="instead of content, for bytes that are not text")] = "",
    ) -> Annotated[CallToolResult, answer.Written]:  # fmt: skip
        """Write a file of a session's sandbox, or replace it."""
        caller = await self._caller(ctx, "files")
        data = _bytes(content, base64)
        await self._sessions.write(session_id, caller, path, data)
        return _written(path, len(data))

    async def file_read(
        self, ctx: Ctx, session_id: Session, path: Path,
        offset: Annotated[int, Field(ge=0, description="bytes to skip, for files that need several calls")] = 0,
    ) -> Annotated[CallToolResult, answer.FileText]:  # fmt: skip
        """Read a file of a session's sandbox: as text, as base64 if it is not text, and as an image if it is one."""
        window = answer.FileWindow(offset)
        async with self._sessions.reading(session_id, await self._caller(ctx, "files"), path) as pieces:
            async for piece in pieces:
                window.take(piece)
        return answer.of_file(path, window)

    async def file_list(self, ctx: Ctx, session_id: Session) -> Annotated[CallToolResult, answer.Folder]:
        """List the files of a session's sandbox."""
        return answer.of_folder(await self._sessions.files(session_id, await self._caller(ctx, "files")))

    async def list_languages(self, ctx: Ctx) -> Annotated[CallToolResult, answer.LanguageList]:
        """List the languages that can be run here, and how the user can add the others."""
        await self._caller(ctx, "read", "run")
        return answer.of_languages(await self._service.engine.supported_languages())

    # --- what they share ---

    async def _caller(self, ctx: Ctx, *scopes: Scope) -> Caller:
        caller = self._caller_of(ctx)
        audit.caller.set(caller.name)
        await gate.require(self._service, caller, *scopes)
        return caller

    def _net(self, asked: list[str] | None) -> list[str]:
        """What was asked, if people granted it."""
        for host in granted(tuple(asked or ())):
            if not any(covers(pattern, host) for pattern in self._hosts):
                raise errors.PolicyDenied(
                    f"{host!r} may not be reached from here: {_listed(self._hosts)}",
                    fix="do without, or ask the user to allow it where this server is started: belljar mcp --net HOST",
                    context={"host": host},
                )
        return asked or []

    def _none_of(self, net: list[str] | None, backend: str) -> None:
        if net or backend != "auto":
            raise errors.InvalidRequest(
                "net, backend: are a session's own", fix="leave them out, or give them to session_open"
            )

    async def _open(
        self, caller: Caller, kind: Literal["session", "sandbox"], net: list[str] | None, backend: str
    ) -> SessionRecord:
        hosts = self._net(net)
        return await self._sessions.open(
            caller, kind, idle=_IDLE, lifetime=_LIFETIME, net=hosts, backend=backend, **self._folders
        )

    async def _carry_out(self, ctx: Ctx, take: Callable[[], Awaitable[Run]]) -> tuple[Run, Result]:
        """Takes a run in and waits for its end, telling how it goes; a caller who goes away ends it."""
        try:
            with anyio.fail_after(_TAKING, shield=True):  # what is half taken in cannot be stopped
                run = await take()
        except TimeoutError:
            raise errors.BackendTimeout("the run could not be taken in", fix="try again in a while") from None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_report_progress, ctx, run)
                await run.done.wait()
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            run.stop()
            with anyio.move_on_after(_ENDING, shield=True):
                await run.done.wait()
            raise
        return run, await run.result()


async def _report_progress(ctx: Ctx, run: Run) -> None:
    """Progress in seconds, to clients that asked for it. How many it will take nobody knows, so there is no total."""
    began = time.monotonic()
    while True:
        await anyio.sleep(_BEAT)
        seconds = round(time.monotonic() - began, 1)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # who is gone is noticed elsewhere
            await ctx.report_progress(seconds, None, f"{seconds:.0f} s: {_latest(run)}")


def _latest(run: Run) -> str:
    if run.record.position is not None:
        return f"waiting, {run.record.position}. in the queue"
    line = run.live.latest  # following it would mean to read all of a flood, for the sake of one line a second
    return neutralise(line.message[:200]) if line else "running"


def _bytes(text: str, encoded: str) -> bytes:
    if text and encoded:
        raise errors.InvalidRequest("content, base64: give one of the two")
    try:
        return base64_codec.b64decode(encoded, validate=True) if encoded else text.encode()
    except ValueError:
        raise errors.InvalidRequest("content, base64: it cannot be decoded", fix="write plain base64") from None


def _written(path: str, size: int) -> CallToolResult:
    return answer.of_model(answer.Written(path=path, size=size), f"{size} bytes written to {path}")


# --- the network ---


def granted(hosts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return _HOSTS.validate_python(hosts)
    except ValidationError as error:
        raise errors.from_validation(error, "net") from None


def _listed(hosts: tuple[str, ...]) -> str:
    return f"only {', '.join(hosts)} may" if hosts else "no host may"


def _folders_told(grants: OperatorGrants) -> str:
    change = "may be changed" if grants.write else "is read-only"
    told = f" The user's folder is at /workspace and {change}." if grants.workspace else ""
    return told + (" Python has the user's packages." if grants.packages else "")


# --- the server ---


class ToolServer(MCPServer[Any]):
    """The SDK's, with our errors: they name the argument, and say what to do; and with names that are not listed."""

    async def list_tools(self) -> list[Tool]:
        """Lists one tool for each job: a second name for one would only cost every conversation its description."""
        return [tool for tool in await super().list_tools() if tool.name not in ALIASES]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        given = {argument: value for argument, value in arguments.items() if value is not None}  # null: left out
        try:
            self._check_names(name, given)
            return await super().call_tool(name, given, context)
        except errors.BelljarError as error:
            return answer.of_problem(error)
        except ToolError as error:
            if isinstance(error.__cause__, errors.BelljarError):
                return answer.of_problem(error.__cause__)
            if isinstance(error.__cause__, ValidationError):
                return answer.of_problem(errors.from_validation(error.__cause__, name))
            raise

    def _check_names(self, name: str, given: dict[str, Any]) -> None:
        """Refuses arguments that the tool does not have: to ignore them would be to ignore what was asked for."""
        schema = sdk.input_schema(self, name)
        known = schema["properties"] if schema else given
        if unknown := [argument for argument in given if argument not in known]:
            message, fix = errors.unknown_name(unknown[0], known, f"argument of {name}")
            raise errors.InvalidRequest(message, fix=fix)


def create_server(
    service: Service, sessions: Sessions, caller_of: CallerOf, *, grants: OperatorGrants | None = None
) -> ToolServer:
    logging.getLogger("mcp").setLevel(logging.WARNING)  # below that it logs the ids of MCP sessions
    tools = Tools(service, sessions, caller_of, grants)
    server = ToolServer(
        "belljar", title="Belljar", version=__version__, subscriptions=False, log_level="WARNING",
        description="Runs code that nobody has read yet, where it can do no harm.",
        instructions=(
            "Runs code in sandboxes. A program's own failure is a normal answer: read its status, mend the code, run "
            "it again. An answer with isError was refused, or is Belljar's fault. "
            f"Network: {_listed(tools._hosts)} be reached.{_folders_told(grants or OperatorGrants())}"
        ),
    )  # fmt: skip
    once = _once(bool(tools._hosts), "write" in tools._folders)
    for tool, title, hints in _tools(tools, bool(tools._hosts), once):
        server.add_tool(tool, title=title, annotations=hints, structured_output=True)
    alias = f"The same as execute_code, under the name that other servers use. {Tools.execute_code.__doc__}"
    server.add_tool(
        tools.execute_code, "run_code", title="Run code", description=alias, annotations=once,
        structured_output=True,
    )  # fmt: skip
    sdk.refuse_unknown_arguments(server)
    return server


def _once(net: bool, writes: bool) -> ToolAnnotations:
    """A fresh sandbox is thrown away: nothing changes, however often it is done. But what goes out to a host may change
    and destroy there what it likes, and so may code in a folder that it may write to: then the worst is said. Never
    read-only: it uses the machine."""
    lasting = net or writes
    return ToolAnnotations(
        read_only_hint=False, destructive_hint=lasting, idempotent_hint=not lasting, open_world_hint=net
    )


def _hints(*, reads: bool = False, destroys: bool = False, again: bool = False, net: bool = False) -> ToolAnnotations:
    return ToolAnnotations(
        read_only_hint=reads, destructive_hint=destroys, idempotent_hint=again or reads, open_world_hint=net
    )


def _tools(tools: Tools, net: bool, once: ToolAnnotations) -> list[tuple[Callable[..., Any], str, ToolAnnotations]]:
    """What a session's code does, it may do to that session's files and variables: that is the environment meant."""
    return [
        (tools.execute_code, "Execute code", once),
        (tools.execute_file, "Execute a file", once),
        (tools.run_command, "Run a command", _hints(destroys=True, net=net)),  # in a session, if one is named
        (tools.session_open, "Open a session", _hints()),
        (tools.session_run, "Run in a session", _hints(destroys=True, net=net)),
        (tools.session_fork, "Fork a session", _hints()),
        (tools.session_close, "Close a session", _hints(destroys=True, again=True)),
        (tools.file_write, "Write a file", _hints(destroys=True, again=True)),
        (tools.file_read, "Read a file", _hints(reads=True)),
        (tools.file_list, "List files", _hints(reads=True)),
        (tools.list_languages, "List languages", _hints(reads=True)),
    ]
