"""`belljar audit …`: what was asked, what ran and what was refused, and whether the record is whole."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli import terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.engine.audit import Audit, Head
from belljar.settings import load

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="The audit log: show it, export it, prove that nothing was changed.",
)

Log = Annotated[Path | None, typer.Option("--log", metavar="FILE", help="Instead of the setting audit_log.")]


def _audit(log: Path | None) -> Audit:
    path = str(log or load().audit_log)
    if not path:
        raise errors.InvalidRequest("there is no audit log", fix="set BELLJAR_AUDIT_LOG or audit_log, or give --log")
    if not Path(path).exists():
        raise errors.InvalidRequest(
            f"{path}: there is no such file", fix="check the path; a log begins with its first run"
        )
    return Audit(path)


@app.command()
def verify(
    log: Log = None,
    head: Annotated[str | None, typer.Option(metavar="NUMBER:HASH", help="A head that was kept elsewhere.")] = None,
    as_json: Json = False,
) -> None:
    """Look at every line; exit code 1 if one was changed or is missing."""
    verdict = _audit(log).verify(Head.parse(head) if head else None)
    if as_json:
        told = {"whole": not verdict.problems, "head": str(verdict.head), "torn": verdict.torn}
        terminal.print_json(told | {"problems": verdict.problems})
    else:
        for problem in verdict.problems:
            terminal.warn(problem)
        if verdict.torn:
            terminal.warn(f"{verdict.torn} lines were cut short by a crash: what they were about was never run")
        if not verdict.problems:
            terminal.say(f"{verdict.head.number} lines, none changed, none missing\nhead: {verdict.head}")
    raise typer.Exit(1 if verdict.problems else 0)


@app.command()
def show(
    log: Log = None,
    run: Annotated[str | None, typer.Option("--run", help="Only of this run, sandbox or session.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only of this kind: requested, refused, limit, …")] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="At most so many, the latest.")] = 50,
    as_json: Json = False,
) -> None:
    """What happened, oldest first."""
    chosen = [
        line
        for line in _audit(log).lines()
        if run in (None, line.get("run"), line.get("session")) and kind in (None, line.get("kind"))
    ]
    if as_json:
        terminal.print_json(chosen[-last:])
        return
    for line in chosen[-last:]:
        terminal.say(_sentence(line))


def _sentence(line: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(line.get("at", 0))))
    rest = {
        key: value for key, value in line.items() if key not in ("number", "at", "kind", "caller", "before", "hash")
    }
    facts = " ".join(f"{key}={value}" for key, value in rest.items())
    return terminal.escape(f"{when} {line.get('kind'):10} {line.get('caller')} {facts}")


@app.command()
def rotate(log: Log = None, as_json: Json = False) -> None:
    """Begin a new file, at any time. The old one lies beside it, and `verify` reads both: they are one chain."""
    old = _audit(log).rotate()
    terminal.print_json({"moved_to": str(old) if old else None}) if as_json else terminal.say(
        terminal.escape(f"moved to {old}") if old else "nothing to move"
    )


@app.command()
def export(log: Log = None) -> None:
    """The whole log as it is, a line of JSON each, on stdout."""
    for line in _audit(log).raw():
        sys.stdout.buffer.write(line)
