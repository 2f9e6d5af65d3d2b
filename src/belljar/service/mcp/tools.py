"""Tools that run code and commands, at once or in a session.

The caller is the local user on stdio (`stdio`), and the holder of the request's credential over HTTP (`http`). What a
model gets to read is made by `content`. A guest's failure is a normal answer with its status in it, so that an agent
mends its code; a refusal and a failure of ours are answers with `isError`, and say what to do.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from mcp.types import CallToolResult
from pydantic import Field

from belljar.core import errors
from belljar.core.options import request
from belljar.core.process import shell
from belljar.core.result import Status
from belljar.host.source import decode_source, read_files, with_named_files
from belljar.protocol.records import Caller
from belljar.protocol.responses import Executed
from belljar.service.mcp import content as answer
from belljar.service.mcp.boxes import Boxes, Kind
from belljar.service.mcp.calls import (
    ENDING_SECONDS,
    Backend,
    Calls,
    CommandLine,
    Ctx,
    Folder,
    Net,
    Session,
    Stdin,
    Timeout,
    own_of_session,
)

Code = Annotated[str, Field(description="the whole program")]
Language = Annotated[str, Field(description="python, javascript, typescript, bash, …: list_languages has them all")]
Arguments = Annotated[list[str] | None, Field(description="what the program finds in sys.argv, process.argv or $1")]
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

Ran = Annotated[CallToolResult, Executed]
TurnRan = Annotated[CallToolResult, answer.Turned]
Opened = Annotated[CallToolResult, answer.SessionOpened]


class Tools:
    """Each public method is a tool; its docstring is what models are told."""

    def __init__(self, calls: Calls, boxes: Boxes) -> None:
        self._calls = calls
        self._boxes = boxes
        self._service = calls.service
        self._sessions = calls.sessions

    # --- one run, one sandbox ---

    async def execute_code(
        self, ctx: Ctx, code: Code, language: Language = "python", stdin: Stdin = "", timeout: Timeout = None,
        net: Net = None, backend: Backend = "auto", args: Arguments = None, context_files: ContextFiles = None,
        require_libraries: Libraries = False,
    ) -> Ran:  # fmt: skip
        """Run a program in a fresh sandbox and return its output. Nothing it does outlives the call; it has no network,
        and no access to the user's files. Print what you want to see. To keep variables and files, use session_run."""
        caller = await self._calls.caller(ctx, "run")
        given = await with_named_files({"files": context_files, **self._calls.folders})
        asked = request(
            code, args=args or (), language=language, stdin=stdin.encode(), timeout=timeout, net=self._calls.net(net),
            backend=backend, require_libraries=require_libraries, **given,
        )  # fmt: skip
        run, result = await self._calls.carry_out(ctx, lambda: self._service.submit(asked, caller))
        return answer.of_run(result, run.id)

    async def execute_file(
        self, ctx: Ctx, path: ProjectFile, stdin: Stdin = "", timeout: Timeout = None, net: Net = None,
        backend: Backend = "auto", args: Arguments = None,
    ) -> Ran:  # fmt: skip
        """Run a file of the folder that the user granted, in a fresh sandbox, and return its output. Its extension
        tells the language."""
        caller = await self._calls.caller(ctx, "run")
        folder = self._calls.folders.get("workspace")
        if folder is None:
            raise errors.InvalidRequest(
                "path: no folder was granted to this server",
                fix="ask the user to start it with belljar mcp --workspace DIR, or send the code to execute_code",
            )
        found = await anyio.to_thread.run_sync(read_files, folder, [path], "path")
        name, content = next(iter(found.items()))
        asked = request(
            decode_source(name, content), args=args or (), language=self._service.engine.languages.of_file(name).name,
            stdin=stdin.encode(), timeout=timeout, net=self._calls.net(net), backend=backend, **self._calls.folders,
        )  # fmt: skip
        run, result = await self._calls.carry_out(ctx, lambda: self._service.submit(asked, caller))
        return answer.of_run(result, run.id)

    async def run_command(
        self, ctx: Ctx, command: CommandLine, stdin: Stdin = "", timeout: Timeout = None, net: Net = None,
        backend: Backend = "auto", session_id: MaybeBox = None, cwd: Folder = None,
    ) -> Ran:  # fmt: skip
        """Run a command of the sandbox (not of the user's machine) to its end and return its output. For what goes on,
        such as a server, use start_process. The wasm backend has no programs: choose native, docker or podman if auto
        finds none."""
        words = list(shell(command)) if isinstance(command, str) else command
        given: dict[str, Any] = {"command": words, "stdin": stdin.encode(), "timeout": timeout, "workdir": cwd}
        if session_id is not None:
            return await self._run_in_box(ctx, session_id, given, none_of=bool(net) or backend != "auto")
        caller = await self._calls.caller(ctx, "run")
        asked = request(net=self._calls.net(net), backend=backend, **given, **self._calls.folders)
        run, result = await self._calls.carry_out(ctx, lambda: self._service.submit(asked, caller))
        return answer.of_run(result, run.id)

    async def _run_in_box(self, ctx: Ctx, id: str, given: dict[str, Any], *, none_of: bool) -> CallToolResult:
        caller = await self._calls.caller(ctx, "sessions")
        if none_of:
            raise own_of_session()
        living = self._boxes.lives(id, caller)
        given["timeout"] = self._seconds(id, caller, given["timeout"])
        run, result = await self._calls.carry_out(ctx, lambda: self._sessions.run(id, caller, code=None, **given))
        late = living and result.status is Status.TIMEOUT
        return answer.of_run(result, run.id, hint="[for a command that goes on: start_process]" if late else "")

    def _seconds(self, id: str, caller: Caller, asked: float | None) -> float | None:
        """The time of a call that waits: a living sandbox' own commands may take as long as it lives."""
        living = self._boxes.lives(id, caller)
        return self._service.settings.defaults.timeout if asked is None and living else asked

    # --- sessions ---

    async def session_open(
        self, ctx: Ctx, kind: Kind = "session", net: Net = None, backend: Backend = "auto",
        language: Annotated[
            Literal["python", "javascript", "bash"], Field(description='of the interpreter, for kind "session"')
        ] = "python",
    ) -> Opened:  # fmt: skip
        """Open something that stays between calls. kind "session": one interpreter that keeps variables, imports and
        files, for session_run. kind "sandbox": a computer to work on a project with, for any language: files stay,
        servers go on (start_process), commands run beside them (run_command). Close it when you are done."""
        caller = await self._calls.caller(ctx, "sessions")
        if kind == "sandbox" and language != "python":
            raise errors.InvalidRequest('language: is that of a kind "session"', fix="leave it out")
        record = await self._boxes.open(
            ctx, caller, kind, net=net, backend=backend, language="" if language == "python" else language
        )
        return answer.of_session(record, living=self._boxes.lives(record.id, caller))

    async def session_run(
        self, ctx: Ctx, code: Code, session_id: MaybeSession = None, timeout: Timeout = None
    ) -> TurnRan:
        """Run code in a session: what it defines stays for the next call. The value of a last expression and open
        matplotlib figures are part of the answer. In a sandbox it is Python, beside that sandbox's files and servers.
        Without session_id a new session of Python is opened."""
        caller = await self._calls.caller(ctx, "sessions")
        opened = session_id is None
        id = session_id or (await self._boxes.open(ctx, caller, "session")).id
        try:
            seconds = self._seconds(id, caller, timeout)
            if self._boxes.lives(id, caller):
                run, result = await self._calls.carry_out(ctx, lambda: self._boxes.turn(id, caller, code, seconds))
            else:
                run, result = await self._calls.carry_out(
                    ctx, lambda: self._sessions.run(id, caller, code=code, command=None, timeout=seconds)
                )
        except BaseException:
            if opened:  # nobody has learned its name
                with anyio.move_on_after(ENDING_SECONDS, shield=True), suppress(errors.NotFound):
                    await self._sessions.close(id, caller)
            raise
        return answer.of_run(result, run.id, id, opened=opened)

    async def session_fork(self, ctx: Ctx, session_id: Session) -> Opened:
        """Make an independent copy, to try something without losing what there is: of a session its memory and files
        (only on the wasm backend), of a sandbox its files, but not what runs. A folder of the user is shared."""
        caller = await self._calls.caller(ctx, "sessions")
        record = await self._boxes.fork(ctx, caller, session_id)
        return answer.of_session(record, living=self._boxes.lives(record.id, caller))

    async def session_close(self, ctx: Ctx, session_id: Session) -> Annotated[CallToolResult, answer.Closed]:
        """End a session or a sandbox. Its variables, files and processes are gone."""
        await self._boxes.close(session_id, await self._calls.caller(ctx, "sessions"))
        return answer.of_model(answer.Closed(session_id=session_id), "closed")

    async def list_languages(self, ctx: Ctx) -> Annotated[CallToolResult, answer.LanguageList]:
        """List the languages that can be run here, and how the user can add the others."""
        await self._calls.caller(ctx, "read", "run")
        return answer.of_languages(await self._service.engine.supported_languages())
