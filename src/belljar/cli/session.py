"""`belljar session`: a prompt for turns of Python, and for commands that begin with a colon."""

from __future__ import annotations

import codeop
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio.to_thread
import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.core import errors
from belljar.core.result import Result, Status
from belljar.core.values import MIB
from belljar.session.session import AsyncSession

if TYPE_CHECKING:
    from belljar.client.sessions import AsyncRemoteSession

_HELP = """\
:checkpoint [NAME]  remember what the session is now      :rollback [NAME]  make it that again
:fork [NAME]        go on in a branch; :quit leaves it    :save FILE        keep it for `belljar session --load`
:quit               the end (so does Ctrl-D)"""


def session(
    backend: opt.Backend = "auto", timeout: opt.Timeout = None, memory: opt.Memory = None,
    packages: opt.Packages = None,
    load: Annotated[Path | None, typer.Option("--load", metavar="FILE", help="Go on from what :save wrote.")] = None,
    as_json: opt.Json = False, server: remote.Server = None, key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Open an interactive prompt with one sandboxed interpreter: what you define stays. :help lists its commands."""
    options: dict[str, Any] = {"timeout": timeout, "memory": memory, "packages": opt.absolute(packages)}
    remote.use(server, key, insecure)
    there = remote.client()
    if there is not None and load is not None:
        raise errors.InvalidRequest("--load does not work with --server", fix="leave one of them out")
    if there is not None:
        first: AsyncSession | AsyncRemoteSession = there.session(backend=backend, **options)
    elif load is None:
        first = AsyncSession(backend=backend, **options)
    else:
        first = AsyncSession.load(load, backend="wasm" if backend == "auto" else backend, **options)

    async def work() -> None:
        async with there or nullcontext():
            await Prompt(first, as_json).run()

    process.run_async(work)


class Prompt:
    """Reads statements and commands until the last branch is left; each branch is a session of its own."""

    def __init__(self, first: AsyncSession | AsyncRemoteSession, as_json: bool) -> None:
        self._json = as_json
        self._branches: list[Any] = [first]  # of a session here or on a server: the methods have the same names
        self._marks: dict[str, Any] = {}

    async def run(self) -> None:
        try:
            await self._enter(self._branches.pop())
            if sys.stdin.isatty() and not self._json:
                terminal.warn("[dim]Python in a sandbox. :help lists commands, Ctrl-C ends a turn's typing.[/]")
            while self._branches:
                block = await anyio.to_thread.run_sync(_block, len(self._branches), abandon_on_cancel=True)
                if block is None or block == ":quit":
                    await self._leave()
                elif block.startswith(":"):
                    await self._command(block)
                elif block.strip():
                    await self._turn(block)
        finally:
            while self._branches:
                await self._branches.pop().__aexit__(None, None, None)

    async def _enter(self, session: AsyncSession | AsyncRemoteSession) -> None:
        self._branches.append(await session.__aenter__())

    async def _leave(self) -> None:
        await self._branches.pop().__aexit__(None, None, None)
        if self._branches:
            self._tell("back", f"{len(self._branches) - 1} branches deep", branches=len(self._branches) - 1)

    async def _turn(self, code: str) -> None:
        try:
            result = await self._branches[-1].run(code, on_event=None if self._json else terminal.relay)
        except errors.SessionEnded as error:
            if not self._marks:
                raise
            self._complain(errors.ExecutionFailed(error.message, fix=":rollback brings back the last checkpoint"))
            return
        if self._json:
            terminal.print_json(result.model_dump(mode="json"))
            return
        _show_values(result)
        if result.error and result.status is not Status.ERROR:
            terminal.verdict(result)

    async def _command(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        commands = {
            "checkpoint": self._checkpoint, "fork": self._fork, "rollback": self._rollback, "save": self._save,
            "help": self._help,
        }  # fmt: skip
        try:
            if name not in commands:
                raise errors.InvalidRequest(f"there is no command :{name}", fix=":help lists them")
            await commands[name](argument.strip())
        except errors.BelljarError as error:
            self._complain(error)

    async def _checkpoint(self, name: str) -> None:
        name = name or str(len(self._marks) + 1)
        self._marks.pop(name, None)
        mark = self._marks[name] = await self._branches[-1].checkpoint()
        self._tell("checkpoint", f"{name}, {mark.bytes / MIB:.1f} MB", name=name, bytes=mark.bytes)

    async def _fork(self, name: str) -> None:
        branch = self._branches[-1].fork(self._mark(name) if name else None)
        await self._enter(branch)
        self._tell("fork", f"{len(self._branches) - 1} branches deep", branches=len(self._branches) - 1)

    async def _rollback(self, name: str) -> None:
        mark = self._mark(name)
        await self._branches[-1].rollback(mark)
        self._tell("rollback", name or list(self._marks)[-1], name=name or list(self._marks)[-1])

    def _mark(self, name: str) -> Any:
        if not self._marks or (name and name not in self._marks):
            known = ", ".join(self._marks) or "none"
            raise errors.InvalidRequest(f"there is no checkpoint {name or 'yet'} (of: {known})", fix=":checkpoint")
        return self._marks[name] if name else list(self._marks.values())[-1]

    async def _save(self, path: str) -> None:
        if not path:
            raise errors.InvalidRequest(":save needs a file", fix=":save session.belljar")
        if not isinstance(self._branches[-1], AsyncSession):
            raise errors.InvalidRequest(":save does not work with --server", fix=":checkpoint keeps it on the server")
        await self._branches[-1].save(path)
        self._tell("saved", path, file=path, bytes=Path(path).stat().st_size)

    async def _help(self, argument: str) -> None:
        self._tell("help", _HELP, commands=_HELP.splitlines())

    def _tell(self, what: str, words: str, **facts: object) -> None:
        if self._json:
            terminal.print_json({what: facts})
        else:
            terminal.warn(f"[dim]{what}:[/] {terminal.escape(words)}" if what != "help" else terminal.escape(words))

    def _complain(self, error: errors.BelljarError) -> None:
        terminal.print_json({"error": error.as_dict()}) if self._json else terminal.problem(error)


def _show_values(result: Result) -> None:
    for bundle in result.results:
        terminal.print_guest(str(bundle.get("text/plain", "")) + "\n")


def _block(depth: int) -> str | None:
    """Reads lines until they are a whole statement; None at the end."""
    lines: list[str] = []
    while True:
        prompt = ("... " if lines else ">" * (depth + 2) + " ") if sys.stdin.isatty() else ""
        try:
            lines.append(input(prompt))
        except EOFError:
            return "\n".join(lines) if lines else None
        if len(lines) == 1 and lines[0].startswith(":"):
            return lines[0].strip()
        source = "\n".join(lines)
        try:
            whole = codeop.compile_command(source, symbol="single" if len(lines) == 1 else "exec") is not None
            if whole and (len(lines) == 1 or not lines[-1].startswith((" ", "\t"))):
                return source
        except (SyntaxError, ValueError, OverflowError):
            return source  # the guest's interpreter says what is wrong with it
