"""`belljar records …`: what was run here, for as long as it is kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import anyio
import typer

from belljar.cli import terminal
from belljar.core import errors
from belljar.settings import load

if TYPE_CHECKING:
    from belljar.protocol.records import LogLine, RunRecord
    from belljar.service.store.store import Store

T = TypeVar("T")
app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Records of runs: list, show and export them, push them, let them go.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Where = Annotated[str | None, typer.Option("--store", metavar="URL", help="Instead of the setting service.store.")]
_COLOURS = {"finished": "green", "failed": "red", "refused": "yellow", "lost": "red"}


def _with(where: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    try:
        return anyio.run(_open, where, work)
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(141) from None


async def _open(where: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    settings = load()
    try:
        from belljar.service.store.store import Store, store_url
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sqlalchemy":
            raise
        raise errors.NotAvailable("records need the service", fix="pip install 'belljar-sandbox[service]'") from None
    store = Store(where or store_url(settings), outbox=bool(settings.service.shared_store))
    if store.database.name == "sqlite" and not os.path.exists(store.database.where):
        raise errors.InvalidRequest(
            f"{store.database.where}: there are no records", fix="check --store; they begin with `belljar serve`"
        )
    async with store:
        return await work(store)


@app.command("list")
def list_runs(
    where: Where = None,
    caller: Annotated[str | None, typer.Option("--caller")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="queued, running, finished, failed, refused, lost")
    ] = None,
    language: Annotated[str | None, typer.Option("--language")] = None,
    last: Annotated[int, typer.Option("--last", min=1, max=10_000, help="At most so many, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """List runs, the newest first."""
    found = _with(where, lambda store: store.runs(caller=caller, state=state, language=language, limit=last))
    if as_json:
        terminal.print_json([run.model_dump(mode="json") for run in found])
        return
    for run in found:
        terminal.say(_sentence(run))
    if not found:
        terminal.say("no run is recorded here")


def _sentence(run: RunRecord) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created))
    took = f"{run.ended - run.started:.2f} s" if run.ended is not None and run.started is not None else ""
    facts = terminal.escape(f"{run.language or 'command':10} {run.backend:8} {run.caller} {took}")
    colour = _COLOURS.get(run.state, "cyan")
    return f"{when} {terminal.escape(run.id)} [{colour}]{run.state:8}[/] {facts}"


@app.command()
def show(id: Annotated[str, typer.Argument(metavar="ID")], where: Where = None, as_json: Json = False) -> None:
    """Show one run: how it ended, and what it printed."""

    async def find(store: Store) -> tuple[RunRecord | None, list[LogLine], list[Any]]:
        return await store.run(id), await store.lines(id), await store.alerts(id)

    run, lines, alerts = _with(where, find)
    if run is None:
        raise errors.NotFound(f"there is no run {id[:80]!r}", fix="belljar records list")
    if as_json:
        more = {"lines": [line.model_dump(mode="json") for line in lines]}
        more["alerts"] = [alert.model_dump(mode="json") for alert in alerts]
        terminal.print_json(run.model_dump(mode="json") | more)
        return
    terminal.say(_sentence(run))
    for line in lines:
        terminal.say(f"[dim]{line.number:6} {line.stream}[/] {terminal.escape(line.message)}")
    for alert in alerts:
        terminal.say(f"[yellow]alert[/] {terminal.escape(alert.message)}")
    if run.problem:
        terminal.say(f"[red]{terminal.escape(str(run.problem.get('message') or run.problem))}[/]")
    if run.result:
        code = "" if run.result.exit_code is None else f", exit code {run.result.exit_code}"
        terminal.say(f"{run.result.status}{code}")


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Such as 12h or 30d; else service.keep.")
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=0, help="The newest so many stay, however old.")] = 0,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Remove runs that ended long ago, with their lines, samples and alerts. What is under way stays."""
    seconds = load().service.keep if older_than is None else terminal.seconds(older_than)
    gone = _with(where, lambda store: store.prune(seconds, keep=keep))
    told = ", ".join(f"{count} {name}" for name, count in gone.items() if count)
    terminal.print_json({"removed": gone}) if as_json else terminal.say(
        f"removed {told}" if told else "nothing to remove"
    )


@app.command()
def sync(
    to: Annotated[str | None, typer.Option("--to", metavar="URL", help="Instead of service.shared_store.")] = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Push the records that the shared store does not have yet. `belljar serve` does so by itself."""
    shared = to or load().service.shared_store
    if not shared:
        raise errors.InvalidRequest("there is no shared store", fix="set BELLJAR_SHARED_STORE, or give --to")

    async def push(store: Store) -> int:
        from belljar.service.store.sync import Syncer

        syncer = Syncer(store, shared)
        try:
            return await syncer.push()
        finally:
            await syncer.close()

    pushed = _with(where, push)
    terminal.print_json({"pushed": pushed}) if as_json else terminal.say(f"{pushed} changes pushed; nothing waits")


@app.command()
def export(
    where: Where = None,
    logs: Annotated[bool, typer.Option("--logs", help="With the lines that each run printed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="It is JSON in any case.")] = False,
) -> None:
    """Print all runs with their results, the oldest first, one line of JSON for each."""

    async def write(store: Store) -> None:
        async for run in store.history():
            record = run.model_dump(mode="json")
            if logs:
                record["lines"] = [line.model_dump(mode="json") async for line in _all_lines(store, run.id)]
            terminal.print_json(record)

    _with(where, write)
    sys.stdout.flush()


async def _all_lines(store: Store, id: str) -> Any:
    after = 0
    while page := await store.lines(id, after):
        for line in page:
            yield line
        after = page[-1].number
