"""`belljar mcp`: sandboxes as tools of a model. The MCP library takes a second to import, so only this command does."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from belljar.cli import options as opt
from belljar.cli import serve as cli_serve
from belljar.cli import terminal
from belljar.core import errors
from belljar.core.package_names import package, project
from belljar.settings import load

if TYPE_CHECKING:
    from belljar.cli.mcp_install import Change

Net = Annotated[
    list[str] | None,
    typer.Option("--net", metavar="HOST", help="A host that models may let their code reach; repeat it for more."),
]
Folder = Annotated[
    Path | None, typer.Option("--workspace", "-w", metavar="DIR", help="A folder that all code finds at /workspace.")
]
Rw = Annotated[bool, typer.Option("--rw", help="Let models' code change that folder.")]

app: typer.Typer = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, add_completion=False,
    help="Offer sandboxes to models over MCP: on stdin and stdout, as clients start it, or over HTTP.",
)  # fmt: skip


@app.callback()
def mcp(
    context: typer.Context,
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP at /mcp, on loopback, not stdio.")
    ] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="With --http; 0: any that is free.")] = None,
    net: Net = None, workspace: Folder = None, rw: Rw = False, packages: opt.Packages = None,
    as_json: cli_serve.Json = False,
) -> None:  # fmt: skip
    """Serves, unless a command follows."""
    if context.invoked_subcommand is not None:
        if http or port is not None or net or workspace or rw or packages:
            raise errors.InvalidRequest("these options belong after `install`", fix="belljar mcp install --help")
        return
    if port is not None and not http:
        raise errors.InvalidRequest("--port goes with --http")
    opt.check_grant(workspace, rw, False)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    service: dict[str, Any] = {"host": "127.0.0.1"} if http else {}
    service |= {} if port is None else {"port": port}
    given = _packages(packages)
    environment = Path(given) if isinstance(given, str) else None
    folders = [_folder(path) for path in (workspace, environment) if path is not None]
    if folders:  # whoever starts the server is its administrator
        service["projects"] = [*load().service.projects, *folders]
    if isinstance(given, tuple):
        service["packages"] = [*load().service.packages, *map(project, given)]
    settings = load(service=service) if service else load()
    grants = _package("belljar.service.mcp.calls").OperatorGrants(
        hosts=tuple(net or ()), workspace=workspace and _folder(workspace), write=rw,
        packages=given,
    )  # fmt: skip
    if http:
        cli_serve.listen(_package("belljar.service.mcp.http").create_app(settings, grants), settings, as_json)
    else:
        anyio.run(_package("belljar.service.mcp.stdio").serve, settings, grants)


def _packages(given: list[str] | None) -> str | tuple[str, ...] | None:
    """Reads `--packages`: checked now, as nobody is there to be told later."""
    packages = opt.packages(given)
    if isinstance(packages, str):
        return _folder(Path(packages))
    try:
        return None if packages is None else tuple(map(package, packages))
    except ValueError as error:
        raise errors.InvalidRequest(f"--packages: {error}") from None


def _folder(path: Path) -> str:
    if not path.is_dir():
        raise errors.InvalidRequest(f"{path}: is no folder", fix="check the path")
    return str(path.absolute())


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise errors.NotAvailable(
            f"MCP needs a package that is not installed: {error.name}", fix="pip install 'belljar-sandbox[mcp]'"
        ) from None


@app.command()
def install(
    client: Annotated[
        str,
        typer.Argument(
            help="claude-code, claude-desktop, cursor, vscode, codex, gemini, windsurf or zed.",
        ),
    ],
    scope: Annotated[
        str | None, typer.Option("--scope", help="user or project: whose file. Claude Code's default is the project.")
    ] = None,
    net: Net = None, workspace: Folder = None, rw: Rw = False, packages: opt.Packages = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Tell an MCP client of Belljar: shows the change of its file, asks, keeps a copy of the old one."""
    from belljar.cli import mcp_install

    opt.check_grant(workspace, rw, False)
    words = ["mcp", *(word for host in net or () for word in ("--net", host))]
    words += ["--workspace", _folder(workspace)] if workspace else []
    words += ["--rw"] if rw else []
    given = _packages(packages)
    words += [word for one in ([given] if isinstance(given, str) else given or ()) for word in ("--packages", one)]
    change = mcp_install.plan(client, scope, words)
    if not change.diff():
        _report(as_json, change, None, f"{change.path} has it already")
        return
    if not as_json:
        _show(change)
    if not (yes or _agreed(change)):
        raise typer.Exit(1)
    kept = mcp_install.apply(change)
    copy = f"; the old one is {kept}" if kept else ""
    _report(as_json, change, kept, f"wrote {change.path}{copy}\nRestart {mcp_install.CLIENTS[client].title} to see it")


def _show(change: Change) -> None:
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in change.diff():
        colour = colours.get(line[:1])
        text = terminal.escape(line)
        terminal.say(f"[{colour}]{text}[/]" if colour else text)


def _agreed(change: Change) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise errors.InvalidRequest("there is no terminal to ask on, and nothing was changed", fix="add --yes")
    return bool(typer.confirm(f"Write this to {change.path}?", err=True))


def _report(as_json: bool, change: Change, kept: Path | None, words: str) -> None:
    if as_json:
        terminal.print_json({"file": change.path, "changed": bool(change.diff()), "backup": kept})
    else:
        terminal.warn(terminal.escape(words))
