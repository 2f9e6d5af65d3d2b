"""How long a run takes, beside its peers, in one go and interleaved: `make bench`.

Every side has a worker process (worker.py) that times one run when it is asked to; the rounds ask all sides in
random order, so that a noisy moment of the machine falls on each alike. As root, every side runs its guest as an
unprivileged uid, as Belljar does. This measures; it judges nothing, and exits 0 unless something broke.
bench_wasm.py and bench_containers.py do the same for WebAssembly and for container engines, and add their parts to the
same bench-results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import belljar
from belljar.backends.native.toolchains import find_bubblewrap

ROOT = Path(__file__).resolve().parents[2]
PEER = "llm-sandbox==0.3.46"
PEER_VENV = ROOT / ".venv-bench-llm-sandbox"
UID = 1_899_999_999  # below the range that sandboxes take theirs from, and nobody's
RESULTS = ROOT / "bench-results.json"
DEADLINE_SECONDS = 60.0

COMPARED = (
    ("hand", "python3 -I -S"), ("hand", "python3"), ("hand", "bwrap by hand"), ("walls", "bwrap with Belljar's walls"),
    ("belljar", "belljar.run"), ("llm-sandbox", "llm-sandbox"),
)  # fmt: skip
OURS = ("Sandbox open + exec", "Session turn")
WIDTHS = (1, 2, 4, 8)
FRESH = {
    "import belljar": "import belljar",
    "import belljar, and all that run needs": "import belljar; belljar.run; belljar.Session",
}
Phase = tuple[str, dict[str, Callable[[], float]], int]  # its title, what it compares, how many rounds
TIMED_IMPORT = "import time; t = time.perf_counter(); {}; print((time.perf_counter() - t) * 1000)"

err = Console(stderr=True, highlight=False)


class Part(NamedTuple):
    key: str  # in the results
    title: str
    what: str  # heads its table


class Worker:
    """A side of the comparison, waiting to be asked."""

    def __init__(self, python: Path, facts: dict[str, Any], patience: float = DEADLINE_SECONDS) -> None:
        self._patience = patience
        self.side = facts["side"]
        argv = [str(python), str(Path(__file__).with_name("worker.py")), json.dumps(facts)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT
        )
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise

    def time(self, contender: str) -> float:
        assert self._process.stdin
        self._process.stdin.write(contender + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(f"{contender}: {answer['error']}")
        return float(answer["ms"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            self._process.kill()  # it would not hear us close
            raise RuntimeError(f"{self.side}: no answer within {self._patience:g} s")
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{self.side} ended: {said[-1]}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def done(argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)


def peer_python(peer: str, venv: Path, module: str) -> Path:
    """The interpreter of a peer's own environment, made on first use."""
    python = venv / "bin" / "python"
    if not python.exists() or done([python, "-c", f"import {module}"]).returncode:
        with err.status(f"Installing {peer} into {venv.name} (once) …"):
            for argv in (
                [sys.executable, "-m", "venv", venv],
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", peer],
            ):
                if (outcome := done(argv)).returncode:
                    raise RuntimeError(f"{peer} could not be installed: {outcome.stderr.strip().splitlines()[-1]}")
    return python


async def prepared() -> tuple[Any, str]:
    """Our own probe's word on this machine, and the Python that guests get."""
    engine = belljar.Engine()
    offer = await engine.capabilities("native")
    if not offer.available:
        raise RuntimeError(f"native does not work here: {offer.why_not}; {offer.fix}")
    spoken = await engine.languages_of("native")
    return offer, next(support.program for support in spoken if support.name == "python")


def start(stack: ExitStack, facts: dict[str, Any], missing: list[str]) -> dict[str, Worker]:
    workers = {}
    for side in dict.fromkeys(side for side, _ in COMPARED):
        try:
            ours = side != "llm-sandbox"
            python = Path(sys.executable) if ours else peer_python(PEER, PEER_VENV, "llm_sandbox")
            workers[side] = Worker(python, facts | {"side": side})
        except RuntimeError as error:
            if side != "llm-sandbox":
                raise
            missing.append(str(error))  # the peer may be out of reach; the rest is still worth knowing
            continue
        stack.callback(workers[side].close)
    return workers


def fresh(code: str) -> float:
    return float(must([sys.executable, "-c", TIMED_IMPORT.format(code)]))


def command(*argv: str) -> float:
    began = time.perf_counter()
    must([Path(sys.executable).with_name("belljar"), *argv])
    return (time.perf_counter() - began) * 1000


def must(argv: Sequence[str | Path]) -> str:
    outcome = done(argv)
    if outcome.returncode:
        raise RuntimeError(f"{Path(argv[0]).name} {' '.join(map(str, argv[1:]))}: {outcome.stderr.strip()[-300:]}")
    return outcome.stdout


def measure(workers: dict[str, Worker], rounds: int, quick: bool) -> dict[str, list[float]]:
    jobs: dict[str, Any] = {
        name: (lambda side=side, name=name: workers[side].time(name)) for side, name in COMPARED if side in workers
    }
    mine = {name: (lambda name=name: workers["belljar"].time(name)) for name in OURS}
    rare: dict[str, Any] = {name: (lambda code=code: fresh(code)) for name, code in FRESH.items()}
    rare["belljar version (CLI)"] = lambda: command("version")
    rare["belljar run -c 'print(1)' (CLI)"] = lambda: command("run", "-c", "print(1)")
    wide = {name: (lambda name=name: workers["belljar"].time(name)) for name in widths()}
    phases: list[Phase] = [
        ("side by side", jobs, rounds),
        ("sandboxes and sessions", mine, rounds // 3),
        ("fresh processes", rare, rounds // 6),
        ("in parallel", wide, 1 if quick else 4),
    ]
    if "llm-sandbox" in workers:
        name = "llm-sandbox, default setup"
        phases.append(("the peer's default", {name: lambda: workers["llm-sandbox"].time(name)}, 1 if quick else 2))
    mine["Session turn"]()  # the first turn of a session opens it
    return interleave(phases)


def interleave(phases: Sequence[Phase]) -> dict[str, list[float]]:
    """Each phase so many rounds, and in each round all that it compares, in random order."""
    times: dict[str, list[float]] = {name: [] for _, phase, _ in phases for name in phase}
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bars:
        for title, phase, count in phases:
            for _ in bars.track(range(max(1, count)), description=title):
                for name in random.sample(list(phase), len(phase)):
                    times[name].append(phase[name]())
    return times


def widths() -> Iterable[str]:
    return (f"32 runs, {width} at a time" for width in WIDTHS)


def summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))], 2),
        "min_ms": round(ordered[0], 2),
        "n": len(ordered),
    }


def ratios(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    def ratio(over: str, under: str) -> float:
        return round(rows[over]["median_ms"] / rows[under]["median_ms"], 2)

    found = {
        "belljar.run / bwrap by hand": ratio("belljar.run", "bwrap by hand"),
        "belljar.run / bwrap with Belljar's walls": ratio("belljar.run", "bwrap with Belljar's walls"),
        "belljar.run / python3 -I -S": ratio("belljar.run", "python3 -I -S"),
    }
    if "llm-sandbox" in rows:
        found["llm-sandbox / belljar.run"] = ratio("llm-sandbox", "belljar.run")
    return found


def at_most(what: str, value: float | None, target: float, moonshot: float = 0) -> str:
    return _judged(what, value, target, moonshot, lambda number, most: number <= most)


def at_least(what: str, value: float | None, target: float, moonshot: float = 0) -> str:
    return _judged(what, value, target, moonshot, lambda number, least: number >= least)


def _judged(
    what: str, value: float | None, target: float, moonshot: float, good: Callable[[float, float], bool]
) -> str:
    if value is None:
        return f"{what}: not measured, target {target:g}"
    words = [
        f"{name} {limit:g}: {'met' if good(value, limit) else 'missed'}"
        for name, limit in (("target", target), ("moonshot", moonshot))
        if limit
    ]
    return f"{what}: {value:.1f}, {'; '.join(words)}"


def machine(offer: Any, python: str, bubblewrap: str) -> dict[str, Any]:
    def said(*argv: str) -> str:
        return done(argv).stdout.strip()

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release().split("-")[0],
        "machine": platform.machine(),
        "user": "root, guests as unprivileged uids" if os.geteuid() == 0 else "not root",
        "guest python": said(python, "--version").removeprefix("Python "),
        "our python": platform.python_version(),
        "bubblewrap": said(bubblewrap, "--version").removeprefix("bubblewrap "),
        "belljar": belljar.__version__,
        "limits by": offer.guarantees.limits["memory"],
        "peer": PEER,
    }


def show(report: dict[str, Any], title: str = "print(1)") -> None:
    out = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    for heading in ("median ms", "p99", "min", "n"):
        table.add_column(heading, justify="right")
    for name, row in report["times"].items():
        cells = (f"{row[key]:.1f}" for key in ("median_ms", "p99_ms", "min_ms"))
        table.add_row(name, *cells, str(row["n"]))
    out.print(table)
    out.print()
    for name, value in report["throughput"].items():
        out.print(f"{name}: {value:g} runs a second")
    for name, value in report["ratios"].items():
        out.print(f"{name}: {value:g}")
    for line in report.get("targets", ()):
        out.print(line, style="bold")
    out.print(", ".join(f"{name} {value}" for name, value in report["machine"].items()), style="dim")
    for line in report["missing"]:
        out.print(f"skipped: {line}", style="yellow")


def readable_folder(stack: ExitStack) -> Path:
    """For files that the unprivileged sides read too."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    folder.chmod(0o755)
    return folder


def bench(rounds: int, quick: bool) -> dict[str, Any]:
    missing: list[str] = []
    offer, python = anyio.run(prepared)
    bubblewrap = find_bubblewrap()[0]
    with ExitStack() as stack:
        main = readable_folder(stack) / "main.py"
        main.write_text("print(1)\n")
        facts = {
            "python": python, "bubblewrap": bubblewrap, "main": str(main), "uid": UID if os.geteuid() == 0 else None,
        }  # fmt: skip
        workers = start(stack, facts, missing)
        times = measure(workers, rounds, quick)
        workers["belljar"].time("close")
    wide = set(widths())
    rows = {name: summary(values) for name, values in times.items() if name not in wide}
    throughput = {
        f"belljar.run, {width} at a time": round(32_000 / statistics.median(times[name]), 1)
        for width, name in zip(WIDTHS, widths(), strict=True)
    }
    return {
        "machine": machine(offer, python, bubblewrap), "times": rows, "ratios": ratios(rows), "throughput": throughput,
        "missing": missing,
    }  # fmt: skip


def asked(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help="how often each side runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def add_part(
    doc: str | None, measure: Callable[[int, bool], dict[str, Any]], rounds: tuple[int, int], part: Part
) -> int:
    """The whole of another benchmark: measured, added to the results of this one, and shown."""
    options = asked(doc)
    try:
        report = measure(options.rounds or rounds[options.quick], options.quick)
    except RuntimeError as error:
        err.print(f"[red]bench: {error}[/]")
        return 1
    whole = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(whole | {part.key: report}, indent=2) + "\n")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        Console().print(f"\n{part.title}", style="bold")
        show(report, part.what)
    return 0


def main() -> int:
    options = asked(__doc__)
    try:
        report = bench(options.rounds or (15 if options.quick else 100), options.quick)
    except RuntimeError as error:
        err.print(f"[red]bench: {error}[/]")
        return 1
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2)) if options.json else show(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
