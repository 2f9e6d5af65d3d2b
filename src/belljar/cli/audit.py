"""`belljar audit …`: what was asked, what ran and what was refused, and whether the record is whole."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli import terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.engine.audit import Audit
from belljar.engine.audit_chain import AuditEntry, Head
from belljar.settings import load

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="The audit log: show it, export it, prove that nothing was changed.",
)

_SHOWN_BYTES = 2000  # of a line that is not Belljar's
_BESIDE = ("number", "at", "kind", "caller", "before", "hash")  # what is said already, or to nobody

Log = Annotated[Path | None, typer.Option("--log", metavar="FILE", help="Instead of the setting audit_log.")]


def _audit(log: Path | None) -> Audit:
    path = str(log or load().audit_log)
    if not path:
        raise errors.InvalidRequest("there is no audit log", fix="set BELLJAR_AUDIT_LOG or audit_log, or give --log")
    audit = Audit(path)
    if not audit.begun:
        raise errors.InvalidRequest(f"{path}: there is no such log", fix="check the path; it begins with its first run")
    return audit


@app.command()
def verify(
    log: Log = None,
    head: Annotated[str | None, typer.Option(metavar="NUMBER:HASH", help="A head that was kept elsewhere.")] = None,
    as_json: Json = False,
) -> None:
    """Check every line; exits 1 if one was changed or is missing, or the head is."""
    verdict = _audit(log).verify(Head.parse(head) if head else None)
    if as_json:
        told = {"whole": not verdict.problems, "head": str(verdict.head), "problems": verdict.problems}
        terminal.print_json(told | {"torn": verdict.torn, "unconfirmed": verdict.unconfirmed})
    else:
        for problem in verdict.problems:
            terminal.warn(problem)
        if verdict.torn:
            terminal.warn("the last line was cut short by a crash: what it was about was never run")
        if verdict.unconfirmed:
            terminal.warn("the last line is newer than the head: a crash came between the two, or somebody added it")
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
    """Show what happened, oldest first. What is not as Belljar wrote it is marked, whatever run or kind it names."""
    chosen = deque[AuditEntry](maxlen=last)

    def take(entry: AuditEntry) -> None:
        if not entry.verified or _is_of(entry.facts, run, kind):
            chosen.append(entry)

    verdict = _audit(log).verify(each=take)
    if as_json:
        terminal.print_json([_marked(entry) for entry in chosen])
    else:
        for entry in chosen:
            terminal.say(terminal.escape(_sentence(entry)))
    if verdict.problems:
        terminal.warn("NOT VERIFIED: this log was changed or is not whole; `belljar audit verify` says where")


def _is_of(facts: dict[str, Any], run: str | None, kind: str | None) -> bool:
    return run in (None, facts.get("run"), facts.get("session")) and kind in (None, facts.get("kind"))


def _problem(entry: AuditEntry) -> str:
    return "it was cut short by a crash" if entry.torn else entry.problem


def _marked(entry: AuditEntry) -> dict[str, Any]:
    if entry.verified:
        return entry.facts | {"verified": True}
    return {"verified": False, "problem": _problem(entry), "raw": entry.raw[:_SHOWN_BYTES].decode("utf-8", "replace")}


def _sentence(entry: AuditEntry) -> str:
    if not entry.verified:
        text = entry.raw[:_SHOWN_BYTES].decode("utf-8", "replace").rstrip("\n")
        return f"NOT VERIFIED ({_problem(entry)}): {text}"
    facts = {name: value for name, value in entry.facts.items() if name not in _BESIDE}
    told = " ".join(f"{name}={value}" for name, value in facts.items())
    return f"{_time(entry.facts.get('at'))} {entry.facts.get('kind')!s:10} {entry.facts.get('caller')} {told}"


def _time(at: object) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at if isinstance(at, int | float) else 0))
    except (OverflowError, ValueError, OSError):
        return str(at)


@app.command()
def rotate(log: Log = None, as_json: Json = False) -> None:
    """Begin a new file, at any time. The old one lies beside it, and `verify` reads both: they are one chain."""
    old = _audit(log).rotate()
    terminal.print_json({"moved_to": str(old) if old else None}) if as_json else terminal.say(
        terminal.escape(f"moved to {old}") if old else "nothing to move"
    )


@app.command()
def export(log: Log = None) -> None:
    """Print the whole log as it is, one line of JSON for each record."""
    for line in _audit(log).raw():
        sys.stdout.buffer.write(line)
