"""Prints for people and machines: colours on a terminal, plain text elsewhere, JSON; reads durations as typed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from belljar.core.display import neutralise
from belljar.core.errors import BelljarError, InvalidRequest
from belljar.core.spelling import respell

if TYPE_CHECKING:
    from rich.console import Console

    from belljar.cli.pace import SetupPace
    from belljar.core.capabilities import Capabilities, LanguageSupport
    from belljar.core.result import Event, Result

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str) -> float:
    """Returns the seconds of a duration such as 30d, 12h or 90m; a bare number is seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw]?)", text.strip(), re.ASCII)
    if not match:
        raise InvalidRequest(f"{text[:40]!r} is no duration", fix="write it as 30d, 12h or 90m")
    return float(match[1]) * _SECONDS[match[2]]


def short_size(size: float) -> str:
    """Returns a size as a short text that is always about as wide."""
    for unit in ("B", "K", "M", "G"):
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.4g}T"


@cache
def console(*, stderr: bool = False) -> Console:
    """Returns rich's console, imported when it is needed: not by a run that prints only the guest's words."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    console().print(text)


def warn(text: str) -> None:
    console(stderr=True).print(text)


def escape(text: str) -> str:
    """Returns text with no markup in it, and nothing that would act on a terminal."""
    from rich.markup import escape as escape_markup

    return escape_markup(neutralise(text))


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, default=str) + "\n")
    sys.stdout.flush()


def relay(event: Event) -> None:
    """Prints guest output as it comes: stdout to stdout, stderr to stderr, harmless on a terminal."""
    if event.kind in ("stdout", "stderr"):
        stream = sys.stdout if event.kind == "stdout" else sys.stderr
        _write(stream, event.text)
    elif event.kind in ("limit", "denied"):
        warn(f"[yellow]belljar: {escape(respell(event.text, 'cli'))}[/]")


def print_guest(text: str) -> None:
    """Prints text that a guest wrote, harmless on a terminal."""
    _write(sys.stdout, text)


def _write(stream: TextIO, text: str) -> None:
    text = neutralise(text) if stream.isatty() else text
    stream.buffer.write(text.encode("utf-8", "replace"))
    stream.flush()


def note(text: str) -> None:
    """Says something of ours beside a guest's output."""
    warn(f"[dim]belljar: {escape(text)}[/]")


def verdict(result: Result) -> None:
    """Prints one line for what went wrong and one for what to do; nothing when all went well."""
    if result.truncated:
        warn("[yellow]belljar: output was cut; --json has its head and its tail[/]")
    if result.error:
        message = escape(result.error.message)
        warn(f"[red]belljar: {result.status}[/] [bold]{result.error.error_type}[/] {message}")
        warn(f"  [cyan]→[/] {escape(respell(result.error.suggestion, 'cli'))}")


def problem(error: BelljarError) -> None:
    warn(f"[red]belljar: {error.kind.replace('_', ' ')}:[/] {escape(error.message)}")
    if error.fix:
        warn(f"  [cyan]→[/] {escape(respell(error.fix, 'cli'))}")


def doctor(found: Iterable[Capabilities]) -> None:
    for backend in found:
        if backend.available and backend.guarantees:
            promise = backend.guarantees
            say(f"[green]✓ {backend.backend}[/] works ({backend.version}); isolation: {promise.isolation}")
            say(f"  walls    {', '.join(promise.walls)}")
            say(f"  limits   {', '.join(f'{name}: {how}' for name, how in promise.limits.items())}")
            say(f"  network  {promise.network}")
            living = None if backend.living is None else ", ".join(("processes", *sorted(backend.living)))
            say(f"  living   {living or 'no living sandboxes'}")
            for weakness in promise.weaker:
                say(f"  [yellow]weaker   {escape(weakness)}[/]")
            for note in backend.notes:
                if note not in promise.weaker:
                    say(f"  [yellow]note     {escape(note)}[/]")
        else:
            say(f"[red]✗ {backend.backend}[/] does not work here: {escape(backend.why_not)}")
            say(f"  [cyan]→[/] {escape(backend.fix)}")


def offered(found: Iterable[Capabilities]) -> Iterator[str]:
    """Yields a line for each backend that only has to be set up: what, how long, and the command."""
    for backend in found:
        if backend.setup and not backend.available:
            yield f"{backend.backend} is not set up yet ({backend.setup}, once): belljar setup {backend.backend}"


def languages(rows: Iterable[tuple[str, LanguageSupport]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("language", "backend", "version", "program, or how to get it"):
        table.add_column(column, overflow="fold")
    for backend, row in rows:
        mark = "[green]✓[/]" if row.available else "[red]✗[/]"
        table.add_row(f"{mark} {row.name}", backend, row.version, escape(row.program if row.available else row.fix))
    console().print(table)


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """Shows a bar on stderr while something long is under way; nothing where nobody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    err = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task(title, total=total)

        def step(name: str) -> None:
            bars.update(task, advance=1, description=f"{title}: {name}"[:60])

        yield step


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Shows the steps it is told, should there be any, and about how long is left: a bar, or lines elsewhere."""
    from belljar.cli.pace import SetupPace, in_words

    pace = SetupPace()
    with ExitStack() as stack:
        shown: list[Callable[[str], object]] = []

        def step(title: str) -> None:
            if not shown:
                shown.append(stack.enter_context(_bar(pace)) if console(stderr=True).is_terminal else warn)
            pace.begin(title, time.monotonic())
            left = "" if console(stderr=True).is_terminal else in_words(pace.left(time.monotonic()))
            shown[0](f"setting up, once: {title}" + (f", {left}" if left else ""))

        yield step


@contextmanager
def _bar(pace: SetupPace) -> Iterator[Callable[[str], None]]:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from belljar.cli.pace import in_words

    class TimeLeft(ProgressColumn):
        """Moves the bar, and says about how long is left, at each refresh."""

        def render(self, task: Task) -> Text:
            now = time.monotonic()
            known = pace.left(now) is not None
            task.total, task.completed = (1.0, pace.share(now)) if known else (None, 0.0)
            return Text(in_words(pace.left(now)))

    columns = (TextColumn("{task.description}"), TimeLeft(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda title: bars.update(task, description=title)


def verdicts(title: str, rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Prints a table of (mark, area, name, detail)."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    marks = {"held": "green", "passed": "green", "skipped": "yellow", "inconclusive": "yellow"}
    for mark, area, name, detail in rows:
        table.add_row(f"[{marks.get(mark, 'red')}]{mark}[/]", area, escape(name), escape((detail)[:100]))
    console().print(table)
