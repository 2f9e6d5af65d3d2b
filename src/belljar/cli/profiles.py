"""`belljar profiles …`: what holds guests in containers beside namespaces, from the command line."""

from __future__ import annotations

from typing import Annotated, Literal

import anyio
import typer

from belljar.cli import terminal
from belljar.cli.options import Json

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Profiles of guests in containers: load ours for AppArmor, show them.",
)


@app.command()
def install(as_json: Json = False) -> None:
    """Load our AppArmor profile now and at every boot; as root. Containers then use it by themselves."""
    from belljar.host import apparmor

    path = anyio.run(apparmor.install)
    if as_json:
        terminal.print_json({"profile": apparmor.PROFILE, "path": str(path)})
    else:
        terminal.say(f"[green]✓[/] {apparmor.PROFILE} is loaded, and will be at every boot ({path})")


@app.command()
def status(as_json: Json = False) -> None:
    """Say whether the kernel has AppArmor, and our profile is loaded."""
    from belljar.host import apparmor

    why = apparmor.missing()
    loaded = not why and apparmor.is_loaded()
    if as_json:
        terminal.print_json({"profile": apparmor.PROFILE, "loaded": loaded, "why_not": why})
    elif loaded:
        terminal.say(f"[green]✓[/] {apparmor.PROFILE} is loaded: containers use it")
    else:
        terminal.say(f"[yellow]{apparmor.PROFILE} is not loaded[/]" + (f": {why}" if why else ""))
        if not why:
            terminal.say("  [cyan]→[/] sudo belljar profiles install")


@app.command()
def show(name: Annotated[Literal["apparmor", "seccomp"], typer.Argument(help="Which.")]) -> None:
    """Print a profile, as engines and the kernel take it."""
    from belljar.host import apparmor
    from belljar.host.seccomp.guest_profile import PROFILE_PATH

    path = apparmor.PROFILE_PATH if name == "apparmor" else PROFILE_PATH
    typer.echo(path.read_text(), nl=False)
