"""`belljar shell`: a terminal in a living sandbox; `belljar attach`: one more look at a process of a server's."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.cli.living import attached
from belljar.cli.living.raw_terminal import RawTerminal, own_terminal
from belljar.cli.run import exit_code
from belljar.core import errors
from belljar.core.options import request as check
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from belljar.client.living.sandbox import AsyncRemoteLivingSandbox
    from belljar.core.result import Result
    from belljar.sandbox import AsyncSandbox

_SHELL = ("sh", "-c", 'exec "$(command -v bash || echo sh)"')  # not every image has a bash
_EXPIRES_SECONDS, _EXTEND_SECONDS = 600.0, 200.0  # of what a shell has opened on a server, while it is there
_TERM = re.compile(r"[A-Za-z0-9._+-]{1,64}")


def shell(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A living sandbox of a server; without it, a new one here.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", "-c", help="A line of shell to run instead of one.")
    ] = None,
    workspace: opt.Workspace = None, rw: opt.Rw = False, rw_git: opt.RwGit = False, backend: opt.Backend = "auto",
    isolation: opt.Isolation = None, memory: opt.Memory = None, cpus: opt.Cpus = None, pids: opt.Pids = None,
    disk: opt.Disk = None, in_files: opt.InFiles = None, env: opt.Env = None, net: opt.Net = None,
    packages: opt.Packages = None, image: opt.Image = None, runtime: opt.Runtime = None,
    user: Annotated[str | None, typer.Option("--user", help="user, or root: root of nothing outside.")] = None,
    snapshot: Annotated[str | None, typer.Option("--snapshot", metavar="ID", help="Begin with its files.")] = None,
    server: remote.LivingServer = None, key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Open a terminal in a living sandbox: a new one, which ends with the shell, or one of a server's."""
    remote.use(server, key, insecure)
    opt.check_grant(workspace, rw, rw_git)
    given = {
        "workspace": opt.absolute(workspace), "write": rw or None, "write_git": rw_git or None,
        "isolation": cast(Any, isolation), "memory": memory, "cpus": cpus, "pids": pids, "disk": disk,
        "files": opt.read_files(in_files) or None, "env": opt.read_env(env) or None, "net": net,
        "packages": opt.packages(packages), "image": image, "runtime": runtime, "user": user, "snapshot": snapshot,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if id is not None and (options or backend != "auto"):
        raise errors.InvalidRequest("these options are for a new sandbox", fix=f"belljar shell {id}")
    with own_terminal() as own:
        if own is None:
            instead = (
                f"belljar start {id} -- COMMAND, and belljar attach {id} PROCESS" if id else "belljar exec -- COMMAND"
            )
            raise errors.InvalidRequest("a shell needs a terminal on stdin and stdout", fix=instead)
        result = process.run_async(lambda: _converse(own, id, command, backend, options))
    _finish(result)


def attach(
    id: Annotated[str, typer.Argument(metavar="ID", help="The sandbox.")],
    process_id: Annotated[str, typer.Argument(metavar="PROCESS", help="The process, as `belljar ps ID` names it.")],
    since: Annotated[int, typer.Option("--since", min=0, help="Only output after the piece of this number.")] = 0,
    with_input: Annotated[bool, typer.Option("--input", "-i", help="Send it our standard input, too.")] = False,
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Show a process of a living sandbox from its beginning; type into its terminal. Leaving does not end it."""
    remote.use(server, key, insecure)

    async def work() -> Result | None:
        async with remote.served("attach") as client:
            found = await (await client.sandbox(id)).process(process_id)
            with own_terminal() as own:
                if own is None or found.pty is None or as_json:
                    return await attached.relay(found, since, with_input=with_input, as_json=as_json)
                terminal.note(f"{attached.LEAVING} leaves")
                return await attached.converse(found, own, since)

    result = process.run_async(work)
    if result is None:
        terminal.note(f"{process_id} goes on: belljar attach {id} {process_id}")
    elif as_json:
        terminal.print_json({"ended": result.model_dump(mode="json")})
        raise typer.Exit(exit_code(result))
    _finish(result)


def _finish(result: Result | None) -> None:
    """Leaves with the exit code of what has ended; says why, where a limit or somebody else ended it."""
    if result is not None:
        if result.exit_code is None:
            terminal.verdict(result)
        raise typer.Exit(exit_code(result))


async def _converse(
    own: RawTerminal, id: str | None, command: str | None, backend: str, options: dict[str, Any]
) -> Result | None:
    words = command or _SHELL
    async with _box(id, backend, options) as box:
        term = os.environ.get("TERM", "")
        env = {"TERM": term if _TERM.fullmatch(term) else "xterm"}
        size = own.size
        started = await box.start(words, pty=(size.columns, size.rows), env=env)
        if command is None:
            here = "a server" if id or not remote.is_here() else "this machine"
            left = f"exit leaves; the sandbox lives on: belljar shell {id}" if id else "exit leaves and ends it"
            terminal.note(f"a shell in a sandbox of {here}; {left}")
        result = await attached.converse(started, own)
        if result is None and id is not None:
            terminal.note(f"the shell goes on: belljar attach {id} {started.id}")
        return result


@asynccontextmanager
async def _box(
    id: str | None, backend: str, options: dict[str, Any]
) -> AsyncIterator[AsyncSandbox | AsyncRemoteLivingSandbox]:
    """Gives the sandbox for a shell: that of this id, or a new one, which is ended afterwards."""
    if id is None and remote.is_here():
        from belljar.sandbox import AsyncSandbox

        engine = process.make_engine()
        with terminal.steps() as engine.on_setup:
            async with AsyncSandbox(backend=backend, engine=engine, living=True, **options) as box:
                yield box
        return
    async with remote.served("a shell by its id" if id else "shell --server") as client:
        if id is not None:
            yield await client.sandbox(id)
            return
        check(backend=backend, living=True, **options)
        opening = client.sandbox(living=True, backend=backend, expires=_EXPIRES_SECONDS, **options)
        async with opening as box:
            with lone_errors():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_keep_alive, box)
                    yield box
                    tasks.cancel_scope.cancel()


async def _keep_alive(box: AsyncRemoteLivingSandbox) -> None:
    """Lets it live for as long as we are here, and not much longer, whatever becomes of us."""
    while True:
        await anyio.sleep(_EXTEND_SECONDS)
        with suppress(errors.BelljarError):  # such as the end of the time that an administrator allows
            await box.extend(_EXPIRES_SECONDS)
