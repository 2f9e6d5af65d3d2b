"""`belljar packages …`: the sets of packages that were installed for guests, from the command line."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from belljar.cli import terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.core.values import format_size, iso_time, parse_size
from belljar.engine.backends import package_store
from belljar.settings import load

app: typer.Typer = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    help="Packages that were installed for guests: list them, let them go.",
)  # fmt: skip


@app.command(name="list")
def list_(as_json: Json = False) -> None:
    """List the sets of packages that are kept: how large they are, and when they were used last."""
    found = package_store(load()).list()
    if as_json:
        rows = [one._asdict() | {"used": iso_time(one.used)} for one in found]
        terminal.print_json({"sets": rows, "size": sum(one.size for one in found)})
        return
    for one in found:
        age = max(0, int((time.time() - one.used) / 86400))
        print(f"{one.id[:12]}  {_size(one.size):>6}  {age:>4} d  {', '.join(one.names)}")


@app.command()
def prune(
    keep: Annotated[str, typer.Option("--keep", metavar="SIZE", help='What may be left, such as "1G".')] = "0",
    unused: Annotated[float, typer.Option("--unused", metavar="DAYS", min=0, help="Only what is unused so long.")] = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Remove sets of packages that no sandbox uses now, the longest unused first."""
    try:
        size = parse_size(keep if not keep.isdigit() else int(keep))
    except ValueError as error:
        raise errors.InvalidRequest(f"--keep: {error}") from None
    assert isinstance(size, int)
    removed = package_store(load()).prune(size, unused * 86400)
    freed = sum(one.size for one in removed)
    if as_json:
        terminal.print_json({"removed": [one.id for one in removed], "size": freed})
    else:
        print(f"removed {len(removed)} sets, {_size(freed)}")


def _size(size: int) -> str:
    return format_size(size // 1024 * 1024 if size < 1024**2 else size // 1024**2 * 1024**2)
