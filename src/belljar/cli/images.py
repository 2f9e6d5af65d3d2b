"""`belljar images …`: the images of container engines, from the command line."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer

from belljar.cli import terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.core.version import __version__
from belljar.settings import load

if TYPE_CHECKING:
    from belljar.images.build_log import BuildReport
    from belljar.images.images import Images
    from belljar.images.progress import Listener, Progress, PullText
    from belljar.images.pull import ImageOutcome

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Images of container engines: build, pull, pin, verify, scan, clean up.",
)

Name = Annotated[str, typer.Argument(metavar="IMAGE", help="[registry/]name[:tag][@sha256:…]")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[IMAGE…]")]
Engine = Annotated[Literal["docker", "podman"], typer.Option("--engine", help="Whose images.")]
LockFile = Annotated[Path | None, typer.Option("--lock-file", metavar="FILE", help="Instead of belljar.images.lock.")]


def _images(engine: str, lock_file: Path | None = None) -> Images:
    from belljar.host.engine_address import engine_address
    from belljar.images.images import Images

    settings = load()
    return Images(settings, engine_address(engine, settings), lock_file=lock_file)


def _await(function: Callable[[Listener], Awaitable[Any]], *, quiet: bool = False) -> Any:
    async def work() -> Any:
        with _shown(quiet) as listener:
            return await function(listener)

    return anyio.run(work)


@contextmanager
def _shown(quiet: bool) -> Iterator[Listener]:
    """Shows bars in megabytes on a terminal, one for each image and one for each layer; elsewhere lines on stderr."""
    err = terminal.console(stderr=True)
    if quiet or not err.is_terminal:
        yield _Lines() if not quiet else (lambda progress: None)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from belljar.images.progress import PullTotals

    bars = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=err, transient=True)
    tasks: dict[str, Any] = {}
    totals: dict[str, PullTotals] = {}

    def show_total(progress: Any) -> None:
        totals.setdefault(progress.image, PullTotals()).add(progress)
        here, whole = totals[progress.image].bytes
        if whole:
            key = f"all of {progress.image}"
            if key not in tasks:
                tasks[key] = bars.add_task(terminal.escape(f"pulling {progress.image}"[:100]), total=None)
            bars.update(tasks[key], completed=here, total=whole)

    def show(progress: Any) -> None:
        show_total(progress)
        key = progress.layer or progress.image
        if key not in tasks:
            tasks[key] = bars.add_task("", total=None)
        text = terminal.escape(f"{progress.layer or progress.image}: {progress.step}"[:100])
        bars.update(tasks[key], description=text, completed=progress.current, total=progress.total or None)

    with bars:
        yield show


class _Lines:
    """Tells a build's steps, and how many megabytes of a pull are here, as lines on stderr."""

    def __init__(self) -> None:
        self._pulls: dict[str, PullText] = {}

    def __call__(self, progress: Progress) -> None:
        from belljar.images.progress import PullText

        if progress.step.lower().startswith("step "):
            terminal.warn(terminal.escape(progress.step))
        elif progress.layer:
            image = progress.image
            if image not in self._pulls:
                self._pulls[image] = PullText(image, lambda text: terminal.warn(terminal.escape(text)))
            self._pulls[image](progress)


def _tell(as_json: bool, data: Any, text: str) -> None:
    terminal.print_json(data) if as_json else terminal.say(text)


# --- building ----------------------------------------------------------------------------------


@app.command()
def build(
    languages: Annotated[list[str] | None, typer.Argument(metavar="[LANGUAGE…]", help="Ours; all, if none.")] = None,
    base: Annotated[str, typer.Option("--base", metavar="IMAGE", help="Start from another image.")] = "",
    context: Annotated[Path | None, typer.Option("--context", metavar="DIR", help="A project of your own.")] = None,
    tag: Annotated[str, typer.Option("--tag", "-t", help="What to call it.")] = "",
    file: Annotated[str, typer.Option("--file", "-f", help="The Dockerfile, in the context.")] = "Dockerfile",
    memory: Annotated[str | None, typer.Option("--memory", "-m", help='Such as "2G".')] = None,
    cpus: Annotated[float | None, typer.Option("--cpus")] = None,
    network: Annotated[bool, typer.Option("--network", help="Let the steps reach the network.")] = False,
    engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Build our hardened language images, or with --context and --tag a project of your own."""
    from belljar.images.build import LANGUAGES

    if context is None and tag:
        raise errors.InvalidRequest("--tag goes with --context DIR")
    if context is not None and (not tag or languages):
        raise errors.InvalidRequest(
            "--context needs --tag, and no language", fix="belljar images build --context . -t app"
        )
    images = _images(engine, lock_file)

    async def work(listener: Listener) -> list[BuildReport]:
        if context is not None:
            return [await images.build(context, tag, file, memory, cpus, network=network, listener=listener)]
        names = languages or LANGUAGES
        return [await images.build_language(name, __version__, base=base, listener=listener) for name in names]

    reports = _await(work, quiet=as_json)
    if as_json:
        terminal.print_json({"builds": [report.model_dump(mode="json") for report in reports]})
    else:
        for report in reports:
            _tell_build(report)
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


def _tell_build(report: BuildReport) -> None:
    for left_out in report.left_out:
        terminal.warn(f"[yellow]not sent: {terminal.escape(left_out)}[/]")
    for limit in report.weaker:
        terminal.warn(f"[yellow]{limit}: this engine cannot[/]")
    if report.ok:
        terminal.say(f"[green]✓[/] {report.tag} {report.id[:19]}")
        for base in report.bases:
            terminal.say(f"  from {terminal.escape(base)}")
        return
    terminal.warn(f"[red]✗ {report.tag}[/] {terminal.escape(report.problem)}")
    terminal.warn(f"  {terminal.escape(report.step)}")
    for line in report.last_lines:
        terminal.warn(f"  [dim]│[/] {terminal.escape(line)}")


# --- having ------------------------------------------------------------------------------------


@app.command(name="list")
def list_(
    ours: Annotated[bool, typer.Option("--ours", help="Only those Belljar built.")] = False,
    engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """List the images of the engine: size, digest, whether they are pinned, what the last scan said."""
    images = _images(engine, lock_file)
    rows = []
    pins = {pin.digest for pin in images.records.lock().images.values()}
    for image in _await(lambda _: images.list(ours=ours), quiet=True):
        scan = images.records.scan(image.id)
        worst = scan.worst(images.settings.scan_unknown_as) or "clean" if scan else ""
        pinned = bool({image.id, image.digest} & pins)
        rows.append({**image.model_dump(mode="json"), "pinned": pinned, "scan": worst})
    if as_json:
        terminal.print_json({"images": rows})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("image", "id", "size", "pinned", "scan"):
        table.add_column(column, overflow="fold")
    for row in rows:
        pinned_text = "yes" if row["pinned"] else "no"
        shown = terminal.escape(row["reference"]) if row["tags"] else "[dim]no name[/]"
        table.add_row(shown, row["id"][7:19], _size(row["size"]), pinned_text, row["scan"])
    terminal.console().print(table)


def _size(size: int) -> str:
    return f"{max(1, size >> 20)}M" if size else "0"


@app.command()
def pull(
    name: Name,
    policy: Annotated[
        Literal["always", "if-not-present", "never"] | None, typer.Option("--policy", help="Instead of the settings'.")
    ] = None,
    engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Pull an image by policy, with its pinned digest, signature and scan."""
    images = _images(engine, lock_file)
    done = _await(lambda listener: images.pull(name, policy=policy, listener=listener), quiet=as_json)
    said = "pulled" if done.pulled else f"not pulled: {done.reason}"
    _tell(as_json, done.model_dump(mode="json"), f"[green]✓[/] {done.image.reference} {done.image.pin[:19]} {said}")


@app.command()
def prepull(names: Names = None, engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False) -> None:
    """Pull several images before they are needed; without names, those of images.prepull."""
    images = _images(engine, lock_file)
    _tell_outcomes(_await(lambda listener: images.prepull(names or (), listener=listener), quiet=as_json), as_json)


def _tell_outcomes(outcomes: Iterable[ImageOutcome], as_json: bool) -> None:
    outcomes = tuple(outcomes)
    if as_json:
        terminal.print_json({"images": [outcome.model_dump(mode="json") for outcome in outcomes]})
    else:
        for outcome in outcomes:
            mark = "[green]✓[/]" if outcome.ok else "[red]✗[/]"
            terminal.say(f"{mark} {terminal.escape(outcome.reference)} {terminal.escape(outcome.text)}")
        if not outcomes:
            terminal.say("nothing to do: no image is named")
    refused = any(outcome.error and outcome.error["kind"] == "policy_denied" for outcome in outcomes)
    failed = any(not outcome.ok for outcome in outcomes)
    raise typer.Exit(126 if refused else 125 if failed else 0)


# --- trusting ----------------------------------------------------------------------------------


@app.command()
def lock(
    names: Names = None,
    by: Annotated[str, typer.Option("--by", help="Who vouches for it; your account's name by default.")] = "",
    engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Pin the digests of images as they are on the engine now."""
    images = _images(engine, lock_file)
    kept = _await(lambda _: images.lock(names or (), by=by), quiet=True)
    if as_json:
        terminal.print_json(kept.model_dump(mode="json"))
        return
    for key, pin in kept.images.items():
        terminal.say(f"{terminal.escape(key)} {pin.digest[:19]} {terminal.escape(pin.at)} {terminal.escape(pin.by)}")
    if not kept.images:
        terminal.say("nothing is pinned: name an image")


@app.command()
def verify(name: Name, engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False) -> None:
    """Check digest, signature and scan of an image that is here, by policy; exits 126 if one speaks against it."""
    images = _images(engine, lock_file)
    facts = _await(lambda _: images.verify(name), quiet=True)
    _tell(as_json, facts.model_dump(mode="json"), f"[green]✓[/] {facts.reference} {facts.pin[:19]} holds")


@app.command()
def scan(
    name: Name,
    again: Annotated[bool, typer.Option("--again/--if-stale", help="Even if there is a fresh record.")] = True,
    engine: Engine = "docker", as_json: Json = False,
) -> None:  # fmt: skip
    """Ask the configured scanner about an image, and keep what it says; exits 126 past the threshold."""
    from belljar.images.rules import check_scan

    images = _images(engine)
    record = _await(lambda _: images.scan(name, again=again), quiet=True)
    counts = ", ".join(f"{count} {severity}" for severity, count in record.counts.items()) or "nothing found"
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at))
    if as_json:
        terminal.print_json(record.model_dump(mode="json"))
    else:
        terminal.say(f"{terminal.escape(record.reference)}: {counts} ({at})")
        for finding in record.findings[:10]:
            terminal.say(f"  {terminal.escape(finding)}")
    try:
        check_scan(record, images.settings)
    except errors.ImageRefused as error:
        if not as_json:
            terminal.problem(error)
        raise typer.Exit(error.exit_code) from None


# --- keeping -----------------------------------------------------------------------------------


@app.command()
def update(
    names: Names = None,
    check: Annotated[bool, typer.Option("--check", help="Only look.")] = False,
    engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Fetch what pinned names mean today and move the pins, after signature and scan; without names, all of them."""
    images = _images(engine, lock_file)
    done = _await(lambda listener: images.update(names or (), check=check, listener=listener), quiet=as_json)
    _tell_outcomes(done, as_json)


@app.command()
def remove(
    names: Annotated[list[str], typer.Argument(metavar="IMAGE…")],
    force: Annotated[bool, typer.Option("--force", help="Even if a stopped container uses it.")] = False,
    engine: Engine = "docker", as_json: Json = False,
) -> None:  # fmt: skip
    """Remove images by name."""
    images = _images(engine)

    async def work(_: Listener) -> list[Any]:
        return [await images.remove(name, force=force) for name in names]

    gone = _await(work, quiet=True)
    data = {"removed": [image.model_dump(mode="json") for image in gone]}
    _tell(as_json, data, "\n".join(f"removed {terminal.escape(image.reference)}" for image in gone))


@app.command()
def gc(
    older_than: Annotated[str | None, typer.Option("--older-than", metavar="AGE", help="Such as 12h or 30d.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    engine: Engine = "docker", lock_file: LockFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Remove images that Belljar built, that no container uses, that are not pinned and old enough."""
    images = _images(engine, lock_file)
    age = None if older_than is None else terminal.seconds(older_than)
    done = _await(lambda _: images.gc(older_than=age, dry_run=dry_run), quiet=True)
    lines = [f"{'would remove' if dry_run else 'removed'} {terminal.escape(image.reference)}" for image in done.removed]
    lines += [f"kept {terminal.escape(name)}: {terminal.escape(why)}" for name, why in done.kept.items()]
    _tell(as_json, done.model_dump(mode="json"), "\n".join(lines) or "no image of ours is here")
