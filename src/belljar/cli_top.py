"""`belljar top`: what runs on a server now, and what it uses."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import anyio
import typer

from belljar import errors, terminal
from belljar.backends.base import lone_errors

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from rich.table import Table

SERVER = "http://127.0.0.1:8080"
_SECONDS = 10.0  # for the server to answer
_SHOWN = 100  # rows at most: a terminal has no more
_AT_ONCE = 8  # requests
_RIGHT = ("seconds", "cpu %", "memory", "network")
_COLUMNS = ("id", "caller", "language", "backend", "state", *_RIGHT, "alerts")
_LEAST = {"id": 19, "state": 7, "seconds": 7, "cpu %": 5, "memory": 6, "network": 9}  # where a terminal is narrow
_STATES = {"running": "green", "queued": "yellow"}

# Typer reads BELLJAR_SERVER and BELLJAR_KEY: they say whom to ask and are no settings of the engine here.
Server = Annotated[str, typer.Option("--server", envvar="BELLJAR_SERVER", metavar="URL", help="The server to ask.")]
ApiKey = Annotated[str, typer.Option("--key", envvar="BELLJAR_KEY", help="An API key with the scope read.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for each look instead of a table.")]
Once = Annotated[bool, typer.Option("--once", help="Look once, and end.")]
Interval = Annotated[float, typer.Option("--interval", min=0.2, max=3600, help="Seconds between two looks.")]


def top(
    server: Server = SERVER, key: ApiKey = "", once: Once = False, as_json: Json = False, interval: Interval = 1.0
) -> None:
    """What runs on a server now: who, what, for how long, and what it uses. Ctrl-C ends it."""
    live = not once and not as_json and sys.stdout.isatty()
    once = once or not (live or as_json)  # a pipe gets one table, not an endless one
    anyio.run(_watch, server, key, once, as_json, interval)


async def _watch(server: str, key: str, once: bool, as_json: bool, interval: float) -> None:
    httpx2 = _client_library()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx2.AsyncClient(base_url=server, headers=headers, timeout=_SECONDS) as client:
            if once or as_json:
                await _print(client, once, as_json, interval)
            else:
                await _show(client, interval)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise errors.NotAvailable(
            f"{server} does not answer: {error or type(error).__name__}",
            fix="start it with `belljar serve`, or name another with --server",
        ) from None


def _client_library() -> Any:
    try:
        import httpx2
    except ImportError:
        raise errors.NotAvailable("httpx2 is not installed", fix="pip install 'belljar[client]'") from None
    return httpx2


async def _print(client: AsyncClient, once: bool, as_json: bool, interval: float) -> None:
    while True:
        runs, metrics = await look(client)
        if as_json:
            terminal.print_json({"runs": [{**run, **_figures(metrics.get(str(run["id"])))} for run in ordered(runs)]})
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


# --- asking ---


async def look(client: AsyncClient) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The runs that are under way or wait, and the figures of the first."""
    runs: list[dict[str, Any]] = []
    metrics: dict[str, dict[str, Any]] = {}
    for state in ("running", "queued"):
        runs += _records(await _ask(client, "/api/sandbox/runs", state=state, limit=_SHOWN))
    places = anyio.Semaphore(_AT_ONCE)

    async def measure(id: str) -> None:
        async with places:
            found = await _ask(client, f"/api/sandbox/{quote(id, safe='')}/metrics", missing={})
            metrics[id] = found if isinstance(found, dict) else {}

    with lone_errors():
        async with anyio.create_task_group() as tasks:
            for run in ordered(runs)[:_SHOWN]:
                if run.get("state") == "running":
                    tasks.start_soon(measure, str(run["id"]))
    return runs, metrics


async def _ask(client: AsyncClient, path: str, *, missing: Any = None, **query: Any) -> Any:
    answer = await client.get(path, params=query)
    if answer.status_code == 404 and missing is not None:  # it ended between two questions
        return missing
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.is_success and body is not None:
        return body
    told = body if isinstance(body, dict) else {}
    kind = errors.PolicyDenied if answer.status_code in (401, 403) else errors.NotAvailable
    message = str(told.get("detail") or f"{client.base_url} answered {answer.status_code} to {path}")
    raise kind(message, fix=str(told.get("fix") or "is it a Belljar? look at its log"))


def _records(body: Any) -> list[dict[str, Any]]:
    """A list, or an object that has one; what has no id is no run."""
    found = body.get("runs") if isinstance(body, dict) else body
    return [run for run in found if isinstance(run, dict) and run.get("id")] if isinstance(found, list) else []


# --- showing ---


def ordered(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that run first, the longest first; then those that wait, in their order."""
    return sorted(runs, key=lambda run: (run.get("state") != "running", _began(run) or 0.0, str(run.get("id"))))


def rows(
    runs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Mapping[str, Any]], *, now: float | None = None
) -> Table:
    """The table. What a server says is shown, never obeyed: no markup, no escape codes."""
    from rich.table import Table

    now = time.time() if now is None else now
    running = sum(run.get("state") == "running" for run in runs)
    title = f"{running} running, {len(runs) - running} waiting"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        side: Literal["left", "right"] = "right" if name in _RIGHT else "left"
        table.add_column(name, justify=side, no_wrap=name in _LEAST, min_width=_LEAST.get(name), overflow="ellipsis")
    for run in ordered(runs)[:_SHOWN]:
        table.add_row(*_row(run, _figures(metrics.get(str(run.get("id")))), now))
    if len(runs) > _SHOWN:
        table.caption = f"… and {len(runs) - _SHOWN} more"
    return table


def _row(run: Mapping[str, Any], figures: Mapping[str, Any], now: float) -> list[str]:
    state = str(run.get("state", ""))
    place = f" {run['position']}" if isinstance(run.get("position"), int) else ""
    colour = _STATES.get(state, "red")
    began = _began(run)
    latest = figures["latest"]
    memory = _number(latest, "memory_mb")
    cpu = _number(latest, "cpu_percent")
    return [
        *(terminal.escape(str(run.get(name) or "-")) for name in ("id", "caller")),
        terminal.escape(str(run.get("language") or "command")),
        terminal.escape(str(run.get("backend") or "-")),
        f"[{colour}]{terminal.escape(state + place)}[/]",
        "-" if began is None else f"{max(0.0, now - began):.1f}",
        "-" if cpu is None else f"{cpu:.0f}",
        "-" if memory is None else _size(memory * 2**20),
        _traffic(latest),
        f"[red]{terminal.escape(', '.join(figures['alerts']))}[/]" if figures["alerts"] else "",
    ]


def _figures(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The latest sample, and the alerts that are raised and not over."""
    told = metrics or {}
    latest, alerts = told.get("latest"), told.get("alerts")
    raised: dict[str, bool] = {}
    known = [alert for alert in alerts if isinstance(alert, dict)] if isinstance(alerts, list) else []
    for alert in sorted(known, key=lambda alert: _number(alert, "at") or 0.0):
        raised[str(alert.get("kind"))] = not alert.get("over")
    return {
        "latest": latest if isinstance(latest, dict) else None,
        "alerts": [kind for kind, still in sorted(raised.items()) if still],
    }


def _traffic(latest: Mapping[str, Any] | None) -> str:
    """Received and sent."""
    rx, tx = _number(latest, "network_rx_bytes"), _number(latest, "network_tx_bytes")
    return "-" if rx is None or tx is None else f"{_size(rx)}/{_size(tx)}"


def _size(size: float) -> str:
    """Short, and always about as wide."""
    for unit in ("B", "K", "M", "G"):
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.4g}T"


def _began(run: Mapping[str, Any]) -> float | None:
    return _number(run, "started") or _number(run, "created")


def _number(source: Mapping[str, Any] | None, name: str) -> float | None:
    value = (source or {}).get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e18 else None
