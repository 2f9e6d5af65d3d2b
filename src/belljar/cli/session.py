"""`belljar session`: a prompt for turns of Python, and for commands that begin with a colon."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
import typer

from belljar.cli import figures, process, remote, terminal
from belljar.cli import options as opt
from belljar.cli.source_lines import read_lines
from belljar.control.callbacks import Cancel
from belljar.core import errors
from belljar.core.languages import Languages
from belljar.core.result import Event, Result, Status
from belljar.core.values import MIB
from belljar.host.loops import lone_errors
from belljar.session.session import AsyncSession
from belljar.settings import load as load_settings

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from belljar.cli.line_editor import LineEditor
    from belljar.client.sessions import AsyncRemoteSession

_INTERRUPTED_CODE = 130
_TITLES = {"python": "Python", "javascript": "JavaScript", "bash": "Bash"}
_SAFETY_BYTES = 64 * MIB  # of a copy that is made before every turn, where the backend can: a larger one takes too long
_HELP = """\
:checkpoint [NAME]  remember what the session is now      :rollback [NAME]  make it that again
:fork [NAME]        go on in a branch; :quit leaves it    :save FILE        keep it for `belljar session --load`
:quit               the end (so does Ctrl-D)"""


def session(
    backend: opt.Backend = "auto", timeout: opt.Timeout = None, memory: opt.Memory = None,
    packages: opt.Packages = None,
    language: Annotated[str, typer.Option("--language", "-l", help="python, javascript or bash.")] = "python",
    load: Annotated[Path | None, typer.Option("--load", metavar="FILE", help="Go on from what :save wrote.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where figures go, on a terminal.")] = None,
    as_json: opt.Json = False, server: remote.Server = None, key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Open an interactive prompt with one sandboxed interpreter: what you define stays. :help lists its commands."""
    options: dict[str, Any] = {
        "language": language,
        "timeout": timeout,
        "memory": memory,
        "packages": opt.packages(packages),
    }
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
    data = Path(load_settings().data_dir)

    async def work() -> None:
        async with there or nullcontext():
            prompt = Prompt(
                first, as_json, history=data / "session_history", figures=out or data / "figures", language=language
            )
            await prompt.run()

    process.run_async(work)


class Prompt:
    """Reads statements and commands until the last branch is left; each branch is a session of its own."""

    def __init__(
        self, first: AsyncSession | AsyncRemoteSession, as_json: bool, *, history: Path, figures: Path,
        language: str = "python",
    ) -> None:  # fmt: skip
        self._json = as_json
        self._language = Languages().get(language).name
        self._branches: list[Any] = [first]  # of a session here or on a server: the methods have the same names
        self._marks: dict[str, Any] = {}
        self._history = history
        self._figures = figures
        self._editor: LineEditor | None = None  # on a terminal
        self._before: Any = None  # a copy of the session before the turn under way
        self._copies = True  # whether one is made
        self._mid_line = False  # the guest's output did not end its line
        self._leaving = False

    async def run(self) -> None:
        try:
            await self._enter(self._branches.pop())
            if sys.stdin and sys.stdin.isatty() and sys.stdout.isatty() and not self._json:
                self._edit()
            while self._branches and not self._leaving:
                block = await self._read()
                if block is None or block.strip() == ":quit":
                    await self._leave()
                elif block.startswith(":"):
                    await self._command(block.strip())
                elif block.strip():
                    await self._turn(block)
        finally:
            while self._branches:
                await self._branches.pop().__aexit__(None, None, None)
        if self._leaving:
            raise typer.Exit(_INTERRUPTED_CODE)

    def _edit(self) -> None:
        from belljar.cli.line_editor import LineEditor

        self._editor = LineEditor(self._history, [*self._commands(), "quit"], self._names, self._language)
        keys = f"{'Tab completes, ' if self._language == 'python' else ''}Ctrl-C interrupts, Ctrl-D leaves"
        terminal.warn(f"[dim]{_TITLES[self._language]} in a sandbox. {keys}, :help lists commands.[/]")

    async def _read(self) -> str | None:
        if self._editor is None:
            return await anyio.to_thread.run_sync(read_lines, self._language, abandon_on_cancel=True)
        if self._mid_line:
            terminal.print_guest("\n")
            self._mid_line = False
        return await self._editor.read(len(self._branches))

    async def _names(self, text: str) -> tuple[str, ...]:
        session = self._branches[-1]
        return await session.complete(text) if isinstance(session, AsyncSession) and not session.ended else ()

    async def _enter(self, session: AsyncSession | AsyncRemoteSession) -> None:
        self._branches.append(await session.__aenter__())

    async def _leave(self) -> None:
        await self._branches.pop().__aexit__(None, None, None)
        if self._branches:
            self._tell("back", f"{len(self._branches) - 1} branches deep", branches=len(self._branches) - 1)

    # --- a turn ---

    async def _turn(self, code: str) -> None:
        try:
            result = await (self._run(code) if self._editor is None else self._run_interruptibly(code))
        except errors.SessionEnded as error:
            if not self._marks:
                raise
            self._complain(errors.ExecutionFailed(error.message, fix=":rollback brings back the last checkpoint"))
            return
        if self._json:
            terminal.print_json(result.model_dump(mode="json"))
            return
        self._show_values(result)
        if result.error and result.status not in (Status.ERROR, Status.ABORTED):
            terminal.verdict(result)
        if self._editor is not None:
            await self._recover(result)

    async def _run(self, code: str, cancel: Cancel | None = None) -> Result:
        result: Result = await self._branches[-1].run(code, on_event=None if self._json else self._relay, cancel=cancel)
        return result

    async def _run_interruptibly(self, code: str) -> Result:
        """Runs a turn that Ctrl-C interrupts; pressed twice, or where that cannot be done, it ends the interpreter."""
        await self._keep_copy()
        cancel = Cancel()
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._heed_signals, cancel)
                result = await self._run(code, cancel)
                tasks.cancel_scope.cancel()
        return result

    async def _heed_signals(self, cancel: Cancel, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, *process.ending_signals()) as received:
            task_status.started()
            async for number in received:
                self._leaving = self._leaving or number != signal.SIGINT
                if self._leaving or not self._interrupt():
                    cancel.cancel()

    def _interrupt(self) -> bool:
        session = self._branches[-1]
        return isinstance(session, AsyncSession) and session.interrupt()

    async def _keep_copy(self) -> None:
        """Copies the session before a turn, where the backend can, so that a turn that ends it can be undone."""
        session = self._branches[-1]
        if not (self._copies and isinstance(session, AsyncSession)):
            return
        try:
            self._before = await session.checkpoint()
            self._copies = self._before.bytes <= _SAFETY_BYTES
        except errors.BelljarError:
            self._copies = False
        if not self._copies:
            self._before = None

    async def _recover(self, result: Result) -> None:
        """Says what became of the session after a turn that was cut, and brings it back if there is a copy."""
        session = self._branches[-1]
        cut = result.status is Status.ABORTED
        if not (session.ended if isinstance(session, AsyncSession) else cut):
            if cut:
                self._tell("interrupted", "the session goes on")
            return
        if self._before is not None:
            await session.rollback(self._before)
            self._tell(
                "ended", f"{result.backend} cannot stop a turn halfway: the session is what it was before this turn"
            )
        elif cut:
            self._tell("ended", "the turn could only be cut, and its session ended with it")

    def _relay(self, event: Event) -> None:
        terminal.relay(event)
        if event.kind in ("stdout", "stderr") and event.text:
            self._mid_line = not event.text.endswith("\n")

    def _show_values(self, result: Result) -> None:
        for bundle in result.results:
            pictures = list(figures.images(bundle)) if self._editor else []
            if self._mid_line and self._editor:
                terminal.print_guest("\n")
            self._mid_line = False
            for ending, content in pictures:
                self._save_figure(ending, content)
            if not pictures:
                terminal.print_guest(str(bundle.get("text/plain", "")) + "\n")

    def _save_figure(self, ending: str, content: bytes) -> None:
        try:
            self._tell("figure", str(figures.save(self._figures, ending, content)))
        except OSError as error:
            why = f"the figure could not be saved in {self._figures}: {error.strerror}"
            self._complain(errors.ExecutionFailed(why, fix="--out DIR names another folder"))

    # --- commands ---

    def _commands(self) -> dict[str, Any]:
        return {
            "checkpoint": self._checkpoint, "fork": self._fork, "rollback": self._rollback, "save": self._save,
            "help": self._help,
        }  # fmt: skip

    async def _command(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        commands = self._commands()
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
