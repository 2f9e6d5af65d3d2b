"""Tables of living sandboxes, their processes and snapshots. What servers and guests say is shown, never obeyed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from belljar.cli import terminal

if TYPE_CHECKING:
    from belljar.client.living.process import AsyncRemoteProcess
    from belljar.core.box_snapshot import BoxSnapshot
    from belljar.core.process import BoxProcess
    from belljar.protocol.living import SandboxRecord

_COLOURS = {"running": "green", "paused": "yellow"}
_WHOLE = ("sandbox", "process", "snapshot", "pid")  # columns that are never wrapped


def sandboxes(found: Iterable[SandboxRecord]) -> None:
    """Prints living sandboxes."""
    now = time.time()
    rows = (
        (
            one.id, one.state, one.backend, "-" if one.expires is None else _duration(one.expires - now),
            _duration(now - one.created), _words(one.labels),
        )
        for one in found
    )  # fmt: skip
    _print(("sandbox", "state", "backend", "ends in", "age", "labels"), rows, "there are no living sandboxes")


def started(found: Iterable[AsyncRemoteProcess]) -> None:
    """Prints the processes that were started in a sandbox."""
    now = time.time()
    rows = (
        (one.id, str(one.pid), _state(one), _duration(now - one.started), one.command, _words(one.labels))
        for one in found
    )
    _print(("process", "pid", "state", "age", "command", "labels"), rows, "nothing was started here")


def processes(found: Iterable[BoxProcess]) -> None:
    """Prints what runs in a sandbox."""
    now = time.time()
    rows = (
        (
            str(one.pid), str(one.parent), "-" if one.cpu_ms is None else f"{one.cpu_ms / 1000:.1f} s",
            "-" if one.memory is None else terminal.short_size(one.memory), _duration(now - one.started), one.command,
        )
        for one in found
    )  # fmt: skip
    _print(("pid", "parent", "cpu", "memory", "age", "command"), rows, "nothing runs there")


def snapshots(found: Iterable[BoxSnapshot]) -> None:
    """Prints snapshots."""
    rows = (
        (
            one.id, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.created)), terminal.short_size(one.size),
            str(one.files), one.box, _words(one.labels),
        )
        for one in found
    )  # fmt: skip
    _print(("snapshot", "made", "size", "files", "of", "labels"), rows, "there are no snapshots")


def _print(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], nothing: str) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=name in _WHOLE, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, text) for name, text in zip(columns, row, strict=True)))
    terminal.console().print(table) if table.row_count else terminal.note(nothing)


def _cell(column: str, text: str) -> str:
    shown = terminal.escape(text)
    return f"[{_COLOURS.get(text, 'red')}]{shown}[/]" if column == "state" else shown


def _state(one: AsyncRemoteProcess) -> str:
    record = one.record
    if record.state != "ended":
        return record.state
    return f"ended, {record.status or '-'}" if record.exit_code is None else f"ended, {record.exit_code}"


def _words(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


def _duration(seconds: float) -> str:
    """Returns a time in its largest unit: 45s, 12m, 3h, 9d."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
