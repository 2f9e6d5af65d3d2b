"""`belljar test`: the tests of a project in a sandbox of its own, and what came of them.

0 all passed   1 some failed, or there is no verdict   124 timeout   125 Belljar's own failure   126 refused
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.control.callbacks import Cancel
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.result import TIMEOUT_EXIT_CODE, Event
from belljar.core.spelling import respelled
from belljar.core.test_results.model import TestCase, TestFailure, TestReport
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from belljar.engine.engine import Engine

_MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "error": "[red]![/]", "skipped": "[yellow]-[/]"}
_BAR = 30  # columns
_TOLD_LINES = 40  # of a failure's traceback

Coverage = Annotated[bool, typer.Option("--coverage", help="Measure how much code the tests run.")]
Failed = Annotated[bool, typer.Option("--failed", help="Run only the tests that failed the last time.")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="ID", help="Run only this test.")]
Shard = Annotated[str | None, typer.Option("--shard", metavar="I/N", help="Run one part of the tests, such as 1/4.")]
Repeat = Annotated[int, typer.Option("--repeat", metavar="N", help="Run them N times, and tell which are flaky.")]
Reports = Annotated[
    list[str] | None,
    typer.Option("--report", metavar="GLOB", help="Files with JUnit XML or TAP that the command writes."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the files as the tests left them, as a snapshot.")]
Install = Annotated[bool, typer.Option("--install", help="Install first the packages that the project's files list.")]
JUnit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write the report as JUnit XML, too.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="A line for each test, and all that is printed.")]


def test(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The project's folder.")] = Path("."),
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND…]", help="Found unless given.")] = None,
    timeout: opt.Timeout = None, env: opt.Env = None, coverage: Coverage = False, failed: Failed = False,
    only: Only = None, shard: Shard = None, repeat: Repeat = 1, report: Reports = None, keep: Keep = False,
    install: Install = False,
    junit: JUnit = None, verbose: Verbose = False, packages: opt.Packages = None, net: opt.Net = None,
    backend: opt.Backend = "auto", image: opt.Image = None, memory: opt.Memory = None, cpus: opt.Cpus = None,
    pids: opt.Pids = None, disk: opt.Disk = None, as_json: opt.Json = False, server: remote.Server = None,
    key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Run a project's tests in a sandbox, and tell which failed and why."""
    remote.use(server, key, insecure)
    engine = process.make_engine(project=path)
    folder = str(path.absolute()) if remote.is_here() else str(path)
    memo = _memo(engine, folder)
    asked: dict[str, Any] = {
        "command": _line(command), "environment": opt.read_env(env), "timeout": timeout, "coverage": coverage,
        "only": (*(only or ()), *(_last_failed(memo) if failed else ())) or None, "shard": shard, "repeat": repeat,
        "reports": tuple(report or ()) or None, "keep": keep, "install": install, "backend": backend,
        "packages": opt.packages(packages),
        "net": net or (), "image": image, "memory": memory, "cpus": cpus, "pids": pids, "disk": disk,
    }  # fmt: skip
    view = _View(verbose=verbose, quiet=as_json)
    done = process.run_async(lambda: _conduct(engine, folder, asked, view))
    view.end()
    _remember(memo, done)
    if junit is not None:
        from belljar.core.test_results.junit import as_junit

        junit.write_text(as_junit(done), "utf-8")
    terminal.print_json(done.model_dump(mode="json")) if as_json else _show(done, verbose=verbose)
    raise typer.Exit(exit_code(done))


def _line(command: list[str] | None) -> str | list[str] | None:
    """One word is a line of shell, as elsewhere; several are a program with its arguments."""
    return None if not command else command[0] if len(command) == 1 else command


def exit_code(report: TestReport) -> int:
    """Returns 0 where all passed, 124 at a timeout, and else 1."""
    return 0 if report.ok else TIMEOUT_EXIT_CODE if report.status == "timeout" else 1


async def _conduct(engine: Engine, folder: str, asked: dict[str, Any], view: _View) -> TestReport:
    """Runs them here or on the server; a signal ends them, and what they told until then is reported."""
    from belljar.cli.run import _stop_on_signal

    control, cancel = Control(), Cancel()

    async def stop() -> None:
        await control.stopped()
        cancel.cancel()

    with terminal.steps() as engine.on_setup, lone_errors():
        async with anyio.create_task_group() as tasks:
            await tasks.start(_stop_on_signal, control)
            tasks.start_soon(stop)
            report = await _run(engine, folder, asked, view, cancel)
            tasks.cancel_scope.cancel()
    return respelled(report, "cli")


async def _run(engine: Engine, folder: str, asked: dict[str, Any], view: _View, cancel: Cancel) -> TestReport:
    if (there := remote.client()) is None:
        from belljar.project_tests import atest

        return await atest(folder, engine=engine, on_event=view.hear, cancel=cancel, **asked)
    async with there:
        return await there.test(folder, on_event=view.hear, cancel=cancel, **asked)


# --- what failed the last time ---


def _memo(engine: Engine, folder: str) -> Path:
    name = sha256(os.path.realpath(folder).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return Path(engine.settings.data_dir, "tests", f"{name}.json")


def _last_failed(memo: Path) -> tuple[str, ...]:
    try:
        ids = json.loads(memo.read_text("utf-8"))["failed"]
    except FileNotFoundError:
        raise errors.InvalidRequest(
            "--failed: the tests of this project were not run before", fix="run them without --failed first"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise errors.InvalidRequest(f"--failed: {memo} cannot be read", fix="run all tests again") from None
    if not ids:
        raise errors.InvalidRequest("--failed: no test failed the last time", fix="leave it out to run all tests")
    return tuple(map(str, ids))


def _remember(memo: Path, report: TestReport) -> None:
    """Keeps what failed; a run without a verdict changes nothing."""
    if report.status not in ("passed", "failed"):
        return
    memo.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = memo.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"failed": [failure.id for failure in report.failures]}), "utf-8")
    draft.replace(memo)


# --- what people see ---


class _View:
    """Shows how the tests go on: a bar on a terminal, or a line for each test, and all that is printed."""

    def __init__(self, *, verbose: bool, quiet: bool) -> None:
        self._verbose = verbose
        self._bar = not verbose and not quiet and sys.stderr.isatty()
        self._quiet = quiet
        self._failed = 0

    def hear(self, event: Event) -> None:
        """Takes an event of the run."""
        if self._quiet:
            return
        case = event.data.get("application/vnd.belljar.test+json") if event.kind == "display" else None
        if self._verbose:
            if event.kind == "display":
                terminal.say(terminal.escape(event.text) if case is None else _case_line(TestCase.model_validate(case)))
            else:
                terminal.relay(event)
        elif self._bar and event.kind == "display":
            self._failed += " failed " in event.text or " error " in event.text
            self._draw(event.text)

    def _draw(self, text: str) -> None:
        count, _, rest = text.removeprefix("[").partition("]")
        done, _, whole = count.partition("/")
        share = min(int(done) / int(whole), 1.0) if done.isdigit() and whole.isdigit() and int(whole) else 0.0
        bar = "█" * round(share * _BAR) + "░" * (_BAR - round(share * _BAR))
        failed = f", {self._failed} failed" if self._failed else ""
        sys.stderr.write(f"\r\x1b[K{bar} {count}{failed} {neutralise(rest.strip())[:60]}")
        sys.stderr.flush()

    def end(self) -> None:
        """Takes the bar away."""
        if self._bar:
            sys.stderr.write("\r\x1b[K")


def _case_line(case: TestCase) -> str:
    spent = "" if case.duration_ms is None else f" [dim]{case.duration_ms:.0f} ms[/]"
    return f"{_MARKS[case.outcome]} {terminal.escape(case.id)}{spent}"


def _show(report: TestReport, *, verbose: bool) -> None:
    for reason in report.reasons[:1]:
        terminal.note(reason)
    if not verbose and report.status not in ("passed", "failed") and report.output:
        terminal.print_guest(_tail(report.output))
    for failure in report.failures:
        _show_failure(failure)
    for flaky in report.flaky:
        terminal.say(
            f"[yellow]flaky[/] {terminal.escape(flaky.id)}: passed {flaky.passed}, failed {flaky.failed} times"
        )
    if report.coverage:
        terminal.say(f"coverage {report.coverage.percent:g} % ({terminal.escape(report.coverage.source)})")
        for file in report.coverage.files if verbose else ():
            terminal.say(f"  {file.percent:6.2f} % {terminal.escape(file.path)}")
    for warning in report.warnings:
        terminal.note(warning)
    colour = "green" if report.ok else "red"
    times = f", each {report.runs} times" if report.runs > 1 else ""
    counted = f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped{times}"
    terminal.say(
        f"[{colour}]{report.status}[/]: {counted} [dim]({report.duration_ms / 1000:.1f} s, {report.backend})[/]"
    )
    if report.kept:
        terminal.note(f"the files are kept: {report.kept}")
    if report.error:
        terminal.warn(f"[red]belljar:[/] {terminal.escape(report.error.message)}")
        terminal.warn(f"  [cyan]→[/] {terminal.escape(report.error.suggestion)}")


def _show_failure(failure: TestFailure) -> None:
    escape: Callable[[str], str] = terminal.escape
    place = f"{escape(failure.file)}:{failure.line} " if failure.file and failure.line else ""
    terminal.say(f"[red]{failure.kind}[/] [bold]{escape(failure.id)}[/]")
    terminal.say(f"  {place}{escape(failure.message)}")
    indent = partial(str.join, "\n    ")
    if failure.traceback:
        terminal.say("[dim]    " + indent(escape(_tail(failure.traceback)).splitlines()) + "[/]")
    if failure.output.strip():
        terminal.say("    " + indent(escape(_tail(failure.output)).splitlines()))


def _tail(text: str) -> str:
    lines = text.rstrip("\n").splitlines()
    return "\n".join(lines if len(lines) <= _TOLD_LINES else ["…", *lines[-_TOLD_LINES:]]) + "\n"
