"""Belljar at work, in a few seconds: what `make run` shows. Exits 1 if a step does not come out as claimed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import anyio
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax

import belljar
from belljar import Result, Status
from belljar.cli.terminal import doctor, offered
from belljar.core.display import neutralise

console = Console(highlight=False, soft_wrap=True, emoji=False)  # a passwd line holds ":x:"

SNIPPET = """\
from statistics import mean
words = "glass all round, you see everything inside".split()
print(len(words), "words of", round(mean(map(len, words)), 1), "letters")
"""

FAILING = """\
import moonphase
print(moonphase.tonight())
"""

RUNAWAY = """\
print("counting ...", flush=True)
n = 0
while True:
    n += 1
"""

THIEF = """\
from pathlib import Path
for door in "/etc/passwd", "/proc/1/root/etc/passwd", "/proc/self/root/../../etc/passwd", "/etc/shadow":
    try:
        print(Path(door).read_text(), end="")
    except OSError as error:
        print(f"{door}: {error.strerror}")
"""


class Step(NamedTuple):
    title: str
    code: str
    limits: dict[str, float]
    claim: str
    holds: Callable[[Result], bool]


def host_lines() -> set[str]:
    """The real accounts of this machine, which no guest may see."""
    return {line.strip() for line in Path("/etc/passwd").read_text().splitlines() if line.strip()}


def stolen(result: Result) -> set[str]:
    return host_lines() & {line.strip() for line in result.stdout.splitlines()}


STEPS = (
    Step(
        "A snippet", SNIPPET, {},
        "it ran, and its output came back",
        lambda r: r.ok and r.stdout == "7 words of 5.1 letters\n",
    ),
    Step(
        "A failing snippet, with a suggestion for the agent that wrote it", FAILING, {},
        "the failure is a value with a type and a way out",
        lambda r: r.error is not None and r.error.error_type == "MISSING_PACKAGE" and bool(r.error.suggestion),
    ),
    Step(
        "A runaway loop, given one second", RUNAWAY, {"timeout": 1},
        "it was stopped, and what it had printed is kept",
        lambda r: r.status is Status.TIMEOUT and r.stdout == "counting ...\n" and r.duration_ms < 10_000,
    ),
    Step(
        "A theft of this machine's /etc/passwd", THIEF, {},
        "not one line of the host's accounts was found",
        lambda r: r.ok and r.stdout.count("\n") >= 2 and bool(host_lines()) and not stolen(r),
    ),
)  # fmt: skip


def show_code(code: str) -> None:
    if console.is_terminal:
        console.print(Padding(Syntax(code, "python", background_color="default"), (0, 0, 0, 4)))
    else:
        console.print(indent(code, "    "), markup=False)


def show(number: int, step: Step, result: Result) -> bool:
    console.print(f"\n[bold]{number}. {step.title}[/]")
    show_code(step.code.rstrip())
    for text, style in ((result.stdout, "green"), (result.stderr, "red")):
        for line in neutralise(text).splitlines():
            console.print(f"  [{style}]│ {escape(line)}[/]")
    console.print(f"  [bold]{result.status}[/], exit code {result.exit_code}, {result.duration_ms:.0f} ms")
    if result.error:
        console.print(f"  [red]{result.error.error_type}[/] {escape(neutralise(result.error.message))}")
        console.print(f"  [cyan]→ {escape(neutralise(result.error.suggestion))}[/]")
    holds = step.holds(result)
    console.print(f"  [green]✓ {step.claim}[/]" if holds else f"  [bold red]✗ not so: {step.claim}[/]")
    return holds


def show_guarantees(result: Result) -> None:
    promise = result.guarantees
    assert promise is not None
    console.print(f"\n[bold]Backend {result.backend}[/]: {'; '.join(result.reasons)}")
    console.print(f"  isolation  {promise.isolation}; network: {promise.network}")
    console.print(f"  walls      {', '.join(promise.walls)}")
    console.print(f"  limits     {', '.join(f'{name}: {how}' for name, how in promise.limits.items())}")
    for weakness in promise.weaker:
        console.print(f"  [yellow]weaker     {escape(weakness)}[/]")


def run_all(steps: Iterable[Step]) -> list[str]:
    """Runs and shows each step; returns the titles of those that came out otherwise than claimed."""
    broken = []
    result = None
    for number, step in enumerate(steps, 1):
        result = belljar.run(step.code, **step.limits)
        if not show(number, step, result):
            broken.append(step.title)
    if result:
        show_guarantees(result)
    return broken


def main() -> int:
    console.print("[bold]Belljar[/] runs code that nobody has read yet, where it can do no harm.")
    began = time.perf_counter()
    try:
        broken = run_all(STEPS)
    except belljar.BackendError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        if not error.fix.startswith("belljar setup"):  # else one command is all it takes
            doctor(anyio.run(belljar.Engine().backends))
        return 1
    if broken:
        console.print(f"\n[bold red]Not as claimed:[/] {'; '.join(broken)}")
        return 1
    console.print(
        f"\nFour runs, four sandboxes, {time.perf_counter() - began:.1f} s. [bold]belljar --help[/] has the rest."
    )
    for line in offered([anyio.run(belljar.Engine().capabilities, "wasm")]):
        console.print(f"[dim]{escape(line)}[/]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
