"""`belljar top`: what runs on a server now, and what it uses."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer

from belljar.cli import remote, terminal
from belljar.core import errors
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from rich.table import Table

    from belljar.client.async_client import AsyncClient
    from belljar.protocol.records import RunRecord, Sample, SandboxMetrics

_SECONDS = 10.0  # for the server to answer
_SHOWN = 100  # rows at most: a terminal has no more
_AT_ONCE = 8  # requests
_RIGHT = ("seconds", "cpu %", "memory", "network")
_COLUMNS = ("id", "caller", "language", "backend", "state", *_RIGHT, "alerts")
_LEAST = {"id": 19, "state": 7, "seconds": 7, "cpu %": 5, "memory": 6, "network": 9}  # where a terminal is narrow
_STATES = {"running": "green", "queued": "yellow"}

# Typer reads BELLJAR_SERVER and BELLJAR_KEY: they say whom to ask and are no settings of the engine here.
ApiKey = Annotated[str | None, typer.Option("--key", envvar="BELLJAR_KEY", help="An API key with the scope read.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for each look instead of a table.")]
Once = Annotated[bool, typer.Option("--once", help="Look once, and end.")]
Interval = Annotated[float, typer.Option("--interval", min=0.2, max=3600, help="Seconds between two looks.")]


def top(
    server: remote.LivingServer = None, key: ApiKey = None, once: Once = False, as_json: Json = False,
    interval: Interval = 1.0, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Show what runs on a server now: who, what, for how long, and what it uses. Ctrl-C ends it."""
    from belljar.client.async_client import AsyncClient

    remote.use(server, key, insecure)
    asked = remote.the_server()
    client = AsyncClient(str(asked.server), asked.key or None, timeout=_SECONDS, retries=2, insecure=asked.insecure)
    live = not once and not as_json and sys.stdout.isatty()
    once = once or not (live or as_json)  # a pipe gets one table, not an endless one
    anyio.run(_watch, client, once, as_json, interval)


async def _watch(client: AsyncClient, once: bool, as_json: bool, interval: float) -> None:
    async with client:
        await (_print(client, once, as_json, interval) if once or as_json else _show(client, interval))


async def _print(client: AsyncClient, once: bool, as_json: bool, interval: float) -> None:
    while True:
        runs, metrics = await look(client)
        if as_json:
            terminal.print_json({"runs": [_document(run, metrics.get(run.id)) for run in runs]})
        else:
            terminal.console().print(rows(runs, metrics, now=time.time()))
        if once:
            return
        await anyio.sleep(interval)


async def _show(client: AsyncClient, interval: float) -> None:
    from rich.live import Live

    with Live(console=terminal.console(), screen=True, auto_refresh=False) as screen:
        while True:
            runs, metrics = await look(client)
            screen.update(rows(runs, metrics, now=time.time()), refresh=True)
            await anyio.sleep(interval)


async def look(client: AsyncClient) -> tuple[list[RunRecord], dict[str, SandboxMetrics]]:
    """Returns the runs that are under way or wait, and the figures of the first."""
    runs = ordered([run for state in _STATES for run in await client.runs(state=state, limit=_SHOWN)])
    metrics: dict[str, SandboxMetrics] = {}
    places = anyio.Semaphore(_AT_ONCE)

    async def measure(id: str) -> None:
        async with places:
            with suppress(errors.NotFound):  # it ended between two questions
                metrics[id] = await client.metrics(id)

    with lone_errors():
        async with anyio.create_task_group() as tasks:
            for run in runs[:_SHOWN]:
                if run.state == "running":
                    tasks.start_soon(measure, run.id)
    return runs, metrics


# --- showing ---


def ordered(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Returns those that run first, the longest first; then those that wait, in their order."""
    return sorted(runs, key=lambda run: (run.state != "running", _began(run), run.id))


def rows(runs: list[RunRecord], metrics: Mapping[str, SandboxMetrics], *, now: float) -> Table:
    """Returns the table. What a server says is shown, never obeyed: no markup, no escape codes."""
    from rich.table import Table

    running = sum(run.state == "running" for run in runs)
    title = f"{running} running, {len(runs) - running} waiting"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        side: Literal["left", "right"] = "right" if name in _RIGHT else "left"
        table.add_column(name, justify=side, no_wrap=name in _LEAST, min_width=_LEAST.get(name), overflow="ellipsis")
    for run in ordered(runs)[:_SHOWN]:
        table.add_row(*_row(run, metrics.get(run.id), now))
    if len(runs) > _SHOWN:
        table.caption = f"… and {len(runs) - _SHOWN} more"
    return table


def _row(run: RunRecord, figures: SandboxMetrics | None, now: float) -> list[str]:
    latest = figures.latest if figures else None
    alerts = _raised(figures)
    place = "" if run.position is None else f" {run.position}"
    words = (run.id, run.caller or "-", run.language or "command", run.backend or "-")
    return [
        *(terminal.escape(word) for word in words),
        f"[{_STATES.get(run.state, 'red')}]{run.state}{place}[/]",
        f"{max(0.0, now - _began(run)):.1f}",
        f"{latest.cpu_percent:.0f}" if latest else "-",
        terminal.short_size(latest.memory_mb * 2**20) if latest else "-",
        _traffic(latest),
        f"[red]{', '.join(alerts)}[/]" if alerts else "",
    ]


def _document(run: RunRecord, figures: SandboxMetrics | None) -> dict[str, Any]:
    told = figures.model_dump(mode="json", include={"latest"}) if figures else {"latest": None}
    return run.model_dump(mode="json") | told | {"alerts": _raised(figures)}


def _raised(figures: SandboxMetrics | None) -> list[str]:
    """Returns the kinds of the alerts that are not over."""
    told = sorted(figures.alerts, key=lambda alert: alert.timestamp) if figures else ()
    still = {str(alert.kind): not alert.over for alert in told}
    return sorted(kind for kind in still if still[kind])


def _traffic(latest: Sample | None) -> str:
    """Returns the bytes received and sent, as a cell of the table."""
    if latest is None or latest.network_rx_bytes is None or latest.network_tx_bytes is None:
        return "-"
    return f"{terminal.short_size(latest.network_rx_bytes)}/{terminal.short_size(latest.network_tx_bytes)}"


def _began(run: RunRecord) -> float:
    return run.created if run.started is None else run.started
