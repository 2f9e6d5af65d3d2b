"""`belljar run` and `belljar exec`: one snippet or one command in a sandbox of its own."""

from __future__ import annotations

import signal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import anyio
import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.options import request as make_request
from belljar.core.result import TIMEOUT_EXIT_CODE, File, Result, Status
from belljar.core.spelling import respelled
from belljar.core.values import MIB
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from belljar.core.request import RunRequest
    from belljar.engine.engine import Engine

EXIT_CODES = {Status.TIMEOUT: TIMEOUT_EXIT_CODE, Status.OOM_KILLED: 137, Status.ABORTED: 130, Status.KILLED: 137}


def run(
    file: Annotated[str | None, typer.Argument(metavar="[FILE|-]", help="A file, or - for stdin.")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS…]", help="Arguments of the code.")] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="The code itself.")] = None,
    language: Annotated[str | None, typer.Option("--language", "-l", help="If the extension does not tell.")] = None,
    workspace: opt.Workspace = None, rw: opt.Rw = False, rw_git: opt.RwGit = False,
    backend: opt.Backend = "auto", isolation: opt.Isolation = None, timeout: opt.Timeout = None,
    grace: opt.Grace = None, memory: opt.Memory = None, cpus: opt.Cpus = None, pids: opt.Pids = None,
    disk: opt.Disk = None, stdin: opt.Stdin = None, in_files: opt.InFiles = None, env: opt.Env = None,
    collect: opt.Collect = None, out: opt.Out = None, net: opt.Net = None, packages: opt.Packages = None,
    image: opt.Image = None, runtime: opt.Runtime = None, type: opt.Type = None, fuel: opt.Fuel = None,
    deterministic: opt.Deterministic = False, seed: opt.Seed = None, profile: opt.Profile = None,
    retry_stronger: opt.Retry = False, require_library: opt.Require = None, as_json: opt.Json = False,
    server: remote.Server = None, key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Run a snippet or a file in a sandbox of its own."""
    remote.use(server, key, insecure)
    opt.check_grant(workspace, rw, rw_git)
    words = list(args or ())
    if code is not None and file is not None:  # as with `python -c CODE ARGS`
        words.insert(0, file)
        file = None
    if code is None and file is None:
        raise errors.InvalidRequest("give code with -c, or one file, or - for stdin", fix='belljar run -c "print(1)"')
    engine = process.make_engine()
    if code is None:
        assert file is not None
        code = opt.read_code(file)
        if language is None and file != "-":
            language = engine.languages.of_file(file).name
    asked = make_request(
        code, args=words, language=language or "python", workspace=opt.absolute(workspace), write=rw,
        write_git=rw_git, backend=backend, isolation=cast(Any, isolation), timeout=timeout,
        grace=grace, memory=memory, cpus=cpus, pids=pids, disk=disk, stdin=opt.read_stdin(stdin),
        files=opt.read_files(in_files), env=opt.read_env(env), collect=tuple(collect or ()), net=net or (),
        packages=opt.packages(packages), image=image, runtime=runtime, type=type, fuel=fuel, profile=profile,
        deterministic={"seed": seed} if seed is not None else deterministic,
        retry="stronger" if retry_stronger else "never", require_libraries=tuple(require_library or ()),
    )  # fmt: skip
    _execute(engine, asked, out, as_json)


def exec_(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…")],
    workspace: opt.Workspace = None, rw: opt.Rw = False, rw_git: opt.RwGit = False,
    backend: opt.Backend = "auto", isolation: opt.Isolation = None, timeout: opt.Timeout = None,
    grace: opt.Grace = None, memory: opt.Memory = None, cpus: opt.Cpus = None, pids: opt.Pids = None,
    disk: opt.Disk = None, stdin: opt.Stdin = None, in_files: opt.InFiles = None, env: opt.Env = None,
    collect: opt.Collect = None, out: opt.Out = None, net: opt.Net = None, packages: opt.Packages = None,
    image: opt.Image = None, runtime: opt.Runtime = None, type: opt.Type = None, as_json: opt.Json = False,
    server: remote.Server = None, key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Run a command in a sandbox, with a folder of the host at /workspace if you grant one."""
    remote.use(server, key, insecure)
    opt.check_grant(workspace, rw, rw_git)
    asked = make_request(
        command=command, workspace=opt.absolute(workspace), write=rw, write_git=rw_git, backend=backend,
        isolation=cast(Any, isolation), timeout=timeout, grace=grace, memory=memory, cpus=cpus, pids=pids, disk=disk,
        stdin=opt.read_stdin(stdin), files=opt.read_files(in_files), env=opt.read_env(env),
        collect=tuple(collect or ()), net=net or (), packages=opt.packages(packages), image=image, runtime=runtime,
        type=type,
    )  # fmt: skip
    _execute(process.make_engine(), asked, out, as_json)


def _execute(engine: Engine, asked: RunRequest, out: Path | None, as_json: bool) -> None:
    if asked.collect and out is None and not as_json:
        raise errors.InvalidRequest("--collect needs a place for the files", fix="add --out DIR, or --json")
    if out is not None and out.exists() and not out.is_dir():
        raise errors.InvalidRequest(f"--out {out}: is not a folder", fix="name a new folder, or one that exists")
    result = process.run_async(lambda: _conduct(engine, asked, as_json))
    if out is not None:
        _save(out, result)
    elif not as_json and (drawn := len(_pictures(result))):
        terminal.note(f"{drawn} figure{'s' if drawn > 1 else ''}: --out DIR saves them")
    if as_json:
        terminal.print_json(respelled(result, "cli").model_dump(mode="json"))
    else:
        terminal.verdict(result)
    raise typer.Exit(exit_code(result))


async def _conduct(engine: Engine, asked: RunRequest, as_json: bool) -> Result:
    """Runs it here or on the server, shows its output as it comes, and ends it on a signal."""
    control = Control()
    with terminal.steps() as engine.on_setup, lone_errors():
        async with anyio.create_task_group() as tasks:
            await tasks.start(_stop_on_signal, control)
            listener = None if as_json else terminal.relay
            result = await remote.run(engine, asked, listener=listener, control=control)
            tasks.cancel_scope.cancel()
    return result


async def _stop_on_signal(control: Control, *, task_status: TaskStatus[None]) -> None:
    """The first signal ends the guest, and its partial output is still told; more of them change nothing."""
    with anyio.open_signal_receiver(signal.SIGINT, *process.ending_signals()) as received:
        task_status.started()
        async for _ in received:
            control.stop()


def exit_code(result: Result) -> int:
    """The guest's own exit code, or ours for a limit or a signal that ended it."""
    if result.status in EXIT_CODES:
        return EXIT_CODES[result.status]
    return result.exit_code if result.exit_code is not None else 1


def _save(out: Path, result: Result) -> None:
    from belljar.host import files

    pictures = _pictures(result)
    out.mkdir(parents=True, exist_ok=True)
    with files.opened(str(out)) as folder:
        files.write(folder, (*result.files, *pictures))
    for picture in pictures:
        terminal.note(f"saved {out / picture.path}")


_MAX_PICTURE = 64 * MIB  # characters of one, in base64
_ENDINGS = {"image/png": "png", "image/jpeg": "jpg"}


def _pictures(result: Result) -> list[File]:
    """The images among the results as files, under names that no collected file has."""
    from base64 import b64decode

    from belljar.core.display import is_image

    taken = {file.path for file in result.files}
    names = (f"figure-{number}" for number in count(1))
    shown = [(end, bundle[mime]) for bundle in result.results for mime, end in _ENDINGS.items() if mime in bundle
             and is_image(mime, bundle[mime], _MAX_PICTURE)]  # fmt: skip
    return [
        File(path=next(f"{name}.{end}" for name in names if f"{name}.{end}" not in taken), content=b64decode(data))
        for end, data in shown
    ]
