"""The command line. Each command parses, asks the engine, prints, and ends with an exit code that means something.

the guest's own code, or   124 timeout   137 out of memory   125 Belljar's own failure   126 refused   130 Ctrl-C
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from anyio.abc import TaskStatus

from belljar import __version__
from belljar.backends.base import Preparable
from belljar.backends.control import Control
from belljar.cli import (
    audit,
    images,
    keys,
    proxy,
    records,
    remote,
    terminal,
)
from belljar.cli import (
    mcp as cli_mcp,
)
from belljar.cli import (
    serve as cli_serve,
)
from belljar.cli import (
    top as cli_top,
)
from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.options import request as make_request
from belljar.core.request import RunRequest
from belljar.core.result import Result, Status
from belljar.engine.engine import Engine
from belljar.host import files
from belljar.host.loops import lone_errors
from belljar.sandbox import default_engine

app = typer.Typer(
    name="belljar", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Runs code that nobody has read yet, where it can do no harm.",
)  # fmt: skip
app.callback()(remote.choose)
app.add_typer(images.app, name="images")
app.add_typer(audit.app, name="audit")
app.add_typer(keys.app, name="keys")
app.add_typer(records.app, name="records")
app.command()(cli_serve.serve)
app.command()(cli_mcp.mcp)
app.command()(cli_top.top)
app.command()(proxy.socket_proxy)

_OWN_CODES = {Status.TIMEOUT: 124, Status.OOM_KILLED: 137, Status.ABORTED: 130, Status.KILLED: 137}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Backend = Annotated[str, typer.Option("--backend", "-b", help="auto, or a backend's name.")]
Isolation = Annotated[
    str | None, typer.Option("--isolation", help="The least isolation to accept: namespace or kernel.")
]
Timeout = Annotated[float | None, typer.Option("--timeout", "-t", help="Seconds of wall clock.")]
Memory = Annotated[str | None, typer.Option("--memory", "-m", help='Such as "512M" or "4G".')]
Cpus = Annotated[float | None, typer.Option("--cpus")]
Pids = Annotated[int | None, typer.Option("--pids", help="The most processes and threads at once.")]
Disk = Annotated[str | None, typer.Option("--disk", help="Size of /workspace and of /tmp, each.")]
Stdin = Annotated[str | None, typer.Option("--stdin", metavar="FILE", help="What the guest reads; - is our own stdin.")]
InFiles = Annotated[list[str] | None, typer.Option("--file", "-f", metavar="PATH[:NAME]", help="Given read-only.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V")]
Collect = Annotated[list[str] | None, typer.Option("--collect", metavar="GLOB", help="Files to bring back.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where collected files go.")]
Net = Annotated[list[str] | None, typer.Option("--net", metavar="HOST", help="A host the guest may reach.")]
Fuel = Annotated[int | None, typer.Option("--fuel", help="The most WebAssembly instructions, about.")]
Fixed = Annotated[bool, typer.Option("--deterministic", help="Fix clock and randomness: a run that can be repeated.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of a deterministic run's randomness.")]
Profile = Annotated[str | None, typer.Option("--profile", help="Packages to find imported, such as numeric.")]
Retry = Annotated[bool, typer.Option("--retry-stronger", help="If auto's choice lacks something, run it on another.")]
Image = Annotated[str | None, typer.Option("--image", help="Of a container; by default the language's.")]
Type = Annotated[str | None, typer.Option("--type", help="Kind of work, such as test-runner: image and limits.")]
Runtime = Annotated[str | None, typer.Option("--runtime", help="Of containers: runc, runsc (gVisor), …")]
Packages = Annotated[Path | None, typer.Option("--packages", metavar="VENV", help="A Python environment, read-only.")]


def main() -> None:
    """The entry point: every failure of ours ends in a sentence and an exit code, never in a traceback."""
    _mend_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` leaves it: then none of them could end us
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _signals():
        signal.signal(number, _as_interrupt)
    code: int | None = 125
    try:
        code = app(standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except typer.TyperException as error:
        _fail(errors.InvalidRequest(str(error), fix="belljar --help")) if _wants_json() else error.show()  # type: ignore[attr-defined]
    except errors.BelljarError as error:
        _fail(error)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        fix = "this looks like a bug of Belljar: please report it with the command you typed"
        _fail(errors.ExecutionFailed(f"{type(error).__name__}: {error}", fix=fix))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to leave
    raise SystemExit(code or 0)


def _fail(error: errors.BelljarError) -> None:
    with suppress(OSError):  # nobody may be there to be told
        terminal.print_json({"error": error.as_dict()}) if _wants_json() else terminal.problem(error)


def _wants_json() -> bool:
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def _mend_streams() -> None:
    """A closed or narrow stream is no reason to fail: what cannot be shown is replaced."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the life of the process)
        getattr(sys, name).reconfigure(errors="replace")


def _signals() -> list[signal.Signals]:
    """Those that mean "end"; one that is ignored, as a hangup under nohup, stays so."""
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def _as_interrupt(number: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)  # the event loop cancels on it, and so everything is cleaned up


def _await(function: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return anyio.run(function)
    except BrokenPipeError:  # nobody reads any more; Typer would make it exit code 1, which is a guest's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(141) from None


@app.command()
def run(
    file: Annotated[str | None, typer.Argument(metavar="[FILE|-]", help="A file, or - for stdin.")] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="The code itself.")] = None,
    language: Annotated[str | None, typer.Option("--language", "-l", help="If the extension does not tell.")] = None,
    backend: Backend = "auto", isolation: Isolation = None, timeout: Timeout = None, memory: Memory = None,
    cpus: Cpus = None, pids: Pids = None, disk: Disk = None, stdin: Stdin = None, in_files: InFiles = None,
    env: Env = None, collect: Collect = None, out: Out = None, net: Net = None, packages: Packages = None,
    image: Image = None, runtime: Runtime = None, type: Type = None, fuel: Fuel = None, deterministic: Fixed = False,
    seed: Seed = None, profile: Profile = None, retry_stronger: Retry = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Run a snippet or a file in a sandbox of its own."""
    if (code is None) == (file is None):
        raise errors.InvalidRequest("give code with -c, or one file, or - for stdin", fix='belljar run -c "print(1)"')
    engine = default_engine()
    if code is None:
        assert file is not None
        code = _text(file)
        if language is None and file != "-":
            language = engine.languages.of_file(file).name
    asked = make_request(
        code, language=language or "python", backend=backend, isolation=isolation, timeout=timeout, memory=memory,
        cpus=cpus, pids=pids, disk=disk, stdin=_stdin(stdin), files=_files(in_files), env=_env(env),
        collect=tuple(collect or ()), net=net or (), packages=_absolute(packages), image=image, runtime=runtime,
        type=type, fuel=fuel, profile=profile,
        deterministic={"seed": seed} if seed is not None else deterministic,
        retry="stronger" if retry_stronger else "never",
    )  # fmt: skip
    _execute(engine, asked, out, as_json)


@app.command(name="exec", context_settings={"ignore_unknown_options": True})
def exec_(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…")],
    workspace: Annotated[Path | None, typer.Option("--workspace", "-w", metavar="DIR", help="At /workspace.")] = None,
    rw: Annotated[bool, typer.Option("--rw", help="Let the command change the workspace.")] = False,
    backend: Backend = "auto", isolation: Isolation = None, timeout: Timeout = None, memory: Memory = None,
    cpus: Cpus = None, pids: Pids = None, disk: Disk = None, stdin: Stdin = None, in_files: InFiles = None,
    env: Env = None, collect: Collect = None, out: Out = None, net: Net = None, packages: Packages = None,
    image: Image = None, runtime: Runtime = None, type: Type = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Run a command in a sandbox, with a folder of the host at /workspace if you grant one."""
    if rw and workspace is None:
        raise errors.InvalidRequest("--rw goes with --workspace DIR")
    asked = make_request(
        command=command, workspace=_absolute(workspace), write=rw, backend=backend, isolation=isolation,
        timeout=timeout, memory=memory, cpus=cpus, pids=pids, disk=disk, stdin=_stdin(stdin), files=_files(in_files),
        env=_env(env), collect=tuple(collect or ()), net=net or (), packages=_absolute(packages), image=image,
        runtime=runtime, type=type,
    )  # fmt: skip
    _execute(default_engine(), asked, out, as_json)


def _execute(engine: Engine, asked: RunRequest, out: Path | None, as_json: bool) -> None:
    if asked.collect and out is None and not as_json:
        raise errors.InvalidRequest("--collect needs a place for the files", fix="add --out DIR, or --json")

    if out is not None and out.exists() and not out.is_dir():
        raise errors.InvalidRequest(f"--out {out}: is not a folder", fix="name a new folder, or one that exists")

    async def work() -> Result:
        control = Control()
        with terminal.steps() as engine.on_setup, lone_errors():
            async with anyio.create_task_group() as tasks:
                await tasks.start(_stop_on_signal, control)
                listener = None if as_json else terminal.relay
                result = await remote.run(engine, asked, listener=listener, control=control)
                tasks.cancel_scope.cancel()
        return result

    result: Result = _await(work)
    if out is not None:
        _save(out, result)
    if as_json:
        terminal.print_json(result.model_dump(mode="json"))
    else:
        terminal.verdict(result)
    raise typer.Exit(exit_code(result))


async def _stop_on_signal(control: Control, *, task_status: TaskStatus[None]) -> None:
    """The first signal ends the guest, and its partial output is still told; more of them change nothing."""
    with anyio.open_signal_receiver(signal.SIGINT, *_signals()) as received:
        task_status.started()
        async for _ in received:
            control.stop()


def exit_code(result: Result) -> int:
    if result.status in _OWN_CODES:
        return _OWN_CODES[result.status]
    return result.exit_code if result.exit_code is not None else 1


def _save(out: Path, result: Result) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with files.opened(str(out)) as folder:
        files.write(folder, result.files)


def _text(path: str) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise errors.InvalidRequest(f"{path}: is not UTF-8 text", fix="save the code as UTF-8") from None


def _read(path: str) -> bytes:
    if path == "-" and sys.stdin is None:
        raise errors.InvalidRequest("stdin is closed", fix="give a file, or code with -c")
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error.strerror}", fix="check the path") from None


def _stdin(path: str | None) -> bytes | None:
    return None if path is None else _read(path)


def _files(names: list[str] | None) -> dict[str, bytes]:
    given = {}
    for name in names or ():
        path, _, target = name.partition(":")
        given[target or Path(path).name] = _read(path)
    return given


def _env(pairs: list[str] | None) -> dict[str, str]:
    env = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise errors.InvalidRequest(f"--env {pair!r} has no value", fix="write --env NAME=VALUE")
        env[name] = value
    return env


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


@app.command()
def session(
    backend: Backend = "auto", timeout: Timeout = None, memory: Memory = None, packages: Packages = None,
    load: Annotated[Path | None, typer.Option("--load", metavar="FILE", help="Go on from what :save wrote.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """An interactive prompt with one sandboxed interpreter: what you define stays. :help lists its commands."""
    from belljar.cli.prompt import Prompt
    from belljar.session.session import Session

    options: dict[str, Any] = {"timeout": timeout, "memory": memory, "packages": _absolute(packages)}
    if load is None:
        first = Session(backend=backend, **options)
    else:
        first = Session.load(load, backend="wasm" if backend == "auto" else backend, **options)
    _await(Prompt(first, as_json).run)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Every backend: does it work here, why not, how to fix it, and what it guarantees."""

    found = _await(lambda: remote.backends(default_engine()))
    if as_json:
        terminal.print_json({"backends": [one.model_dump(mode="json", exclude={"modules"}) for one in found]})
    else:
        terminal.doctor(found)
    raise typer.Exit(0 if any(one.available for one in found) else 1)


@app.command()
def setup(
    backend: Annotated[str, typer.Argument(help="The backend to prepare: wasm, or one whose image is to be pulled.")],
    as_json: Json = False,
) -> None:
    """Prepare a backend that needs it, once: wasm compiles its interpreters, docker and podman pull their image."""
    engine = default_engine()
    if backend not in engine.known or not isinstance(engine.backend(backend), Preparable):
        raise errors.InvalidRequest(f"{backend!r} needs no setup", fix="belljar setup wasm")

    async def work() -> Capabilities:
        with terminal.steps() as engine.on_setup:
            await engine.setup(backend)
        return await engine.capabilities(backend)

    one = _await(work)
    if not one.available:
        raise errors.NotAvailable(f"{backend}: {one.why_not}", fix=one.fix)
    profiles = f", profiles {', '.join(sorted(one.profiles))}" if one.profiles else ""
    ready = f"ready: {one.version}{profiles}"
    terminal.print_json(one.model_dump(mode="json", exclude={"modules"})) if as_json else terminal.say(ready)


@app.command()
def languages(as_json: Json = False) -> None:
    """The languages this installation can run now, and how to get the others."""

    rows = _await(lambda: remote.languages(default_engine()))
    if as_json:
        terminal.print_json({"languages": [{"backend": name, **row.model_dump(mode="json")} for name, row in rows]})
    else:
        terminal.languages(rows)


@app.command()
def version(as_json: Json = False) -> None:
    """Belljar's version."""
    terminal.print_json({"version": __version__}) if as_json else terminal.say(f"belljar {__version__}")


async def _working(backend: str) -> str:
    """The backend to put to the test: the one named, or the first that works here."""
    found = await default_engine().backends()
    return next((one.backend for one in found if backend in ("auto", one.backend) and one.available), backend)


@app.command()
def conformance(backend: Backend = "auto", as_json: Json = False) -> None:
    """Check a backend against the contract, one named check after the other."""
    from belljar.testing.conformance import checks, conform

    async def work() -> Any:
        name = await _working(backend)
        with terminal.progress(f"conformance of {name}", len(checks())) as step:
            return name, await conform(name, on_verdict=lambda verdict: step(verdict.name))

    backend, found = _await(work)
    failed = sum(verdict.status == "failed" for verdict in found)
    if as_json:
        rows = [{"name": v.name, "area": v.area, "status": v.status, "detail": v.detail} for v in found]
        terminal.print_json({"backend": backend, "checks": rows})
    else:
        terminal.verdicts(f"conformance of {backend}", ((v.status, v.area, v.name, v.detail) for v in found))
        terminal.say(f"{len(found) - failed} of {len(found)} checks passed or do not apply, {failed} failed")
    raise typer.Exit(1 if failed else 0)


@app.command()
def attack(backend: Backend = "auto", as_json: Json = False) -> None:
    """Attack a sandbox in every way we know; exits non-zero if one got through."""
    from belljar.testing.escape import ATTACKS
    from belljar.testing.escape import attack as run_attacks

    async def work() -> Any:
        name = await _working(backend)
        with terminal.progress(f"attacks on {name}", len(ATTACKS)) as step:
            return name, await run_attacks(name, on_verdict=lambda verdict: step(verdict.name))

    backend, found = _await(work)
    through = sum(not verdict.held for verdict in found)
    if as_json:
        rows = [{"name": v.name, "category": v.category, "held": v.held, "detail": v.detail} for v in found]
        terminal.print_json({"backend": backend, "attacks": rows})
    else:
        table = (("held" if v.held else "THROUGH", v.category, v.name, v.detail) for v in found)
        terminal.verdicts(f"attacks on {backend}", table)
        terminal.say(f"{len(found) - through} of {len(found)} attacks held, {through} got through")
    raise typer.Exit(1 if through else 0)
