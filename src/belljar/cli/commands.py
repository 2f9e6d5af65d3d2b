"""The table of commands: finds the one that was typed, and imports what that command needs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from belljar.cli import lean, process, remote
from belljar.cli.examples import epilog
from belljar.core.version import __version__


class LazyCommand(NamedTuple):
    """Where a command is defined: a function of a module below `belljar.cli`, or a Typer with commands of its own."""

    module: str
    attribute: str
    help: str
    settings: dict[str, Any] = {}  # noqa: RUF012 (read only)


# In the order in which a newcomer needs them. The sentences stand here too, so that help imports none of the modules.
COMMANDS = {
    "run": LazyCommand("run", "run", "Run a snippet or a file in a sandbox of its own."),
    "session": LazyCommand("session", "session", "Open an interactive prompt with one sandboxed interpreter."),
    "exec": LazyCommand(
        "run", "exec_", "Run a command in a sandbox, with a folder of the host at /workspace if you grant one.",
        {"ignore_unknown_options": True},
    ),
    "test": LazyCommand(
        "tests", "test", "Run a project's tests in a sandbox, and tell which failed and why.",
        {"ignore_unknown_options": True},
    ),
    "shell": LazyCommand(
        "living.shell", "shell",
        "Open a terminal in a living sandbox: a new one, which ends with the shell, or one of a server's.",
    ),
    "open": LazyCommand("living.boxes", "open_", "Open a living sandbox on a server, and print its id."),
    "close": LazyCommand("living.boxes", "close", "End living sandboxes of a server, with all that runs in them."),
    "ps": LazyCommand("living.boxes", "ps", "List the living sandboxes of a server, or the processes of one of them."),
    "start": LazyCommand(
        "living.boxes", "start", "Start a process in a living sandbox of a server, and print its id.",
        {"ignore_unknown_options": True},
    ),
    "attach": LazyCommand("living.shell", "attach", "Show a process of a living sandbox from its beginning."),
    "cp": LazyCommand(
        "living.copying", "cp", "Copy a file or a folder into a living sandbox of a server, or out of it."
    ),
    "port": LazyCommand(
        "living.forward", "port", "Forward a port of this machine's loopback to one of a living sandbox of a server."
    ),
    "pause": LazyCommand("living.boxes", "pause", "Stop all processes of a living sandbox where they are."),
    "resume": LazyCommand("living.boxes", "resume", "Let the processes of a paused living sandbox go on."),
    "extend": LazyCommand("living.boxes", "extend", "Move the end of a living sandbox."),
    "network": LazyCommand("living.boxes", "network", "Show or change what a living sandbox may reach."),
    "snapshot": LazyCommand("living.boxes", "snapshot", "Keep the files of a living sandbox as they are now."),
    "snapshots": LazyCommand("living.boxes", "snapshots", "List the snapshots on a server, or remove some."),
    "fork": LazyCommand("living.boxes", "fork", "Open another living sandbox with the files of one."),
    "preview": LazyCommand(
        "preview", "preview",
        "Show a project in a browser: its server runs in a sandbox, and is seen at an address of this machine.",
        {"ignore_unknown_options": True},
    ),
    "doctor": LazyCommand("doctor", "doctor", "Show for every backend whether it works here, why not, how to fix it."),
    "setup": LazyCommand("doctor", "setup", "Prepare a backend that needs it, once."),
    "languages": LazyCommand("doctor", "languages", "List the languages that this installation can run now."),
    "mcp": LazyCommand("mcp", "app", "Offer sandboxes to models over MCP."),
    "serve": LazyCommand("serve", "serve", "Serve HTTP, WebSocket and MCP."),
    "top": LazyCommand("top", "top", "Show what runs on a server now: who, what, for how long, and what it uses."),
    "keys": LazyCommand("keys", "app", "The keys of the service: create, list, revoke."),
    "records": LazyCommand("records", "app", "Records of runs: list, show and export them, push them, let them go."),
    "images": LazyCommand("images", "app", "Images of container engines: build, pull, pin, verify, scan, clean up."),
    "packages": LazyCommand("packages", "app", "Packages that were installed for guests: list them, let them go."),
    "profiles": LazyCommand("profiles", "app", "Profiles of guests in containers: load ours for AppArmor, show them."),
    "audit": LazyCommand("audit", "app", "The audit log: show it, export it, prove that nothing was changed."),
    "attack": LazyCommand("checks", "attack", "Attack a sandbox in every way we know."),
    "conformance": LazyCommand("checks", "conformance", "Check a backend against the contract."),
    "socket-proxy": LazyCommand("proxy", "socket_proxy", "Let only Belljar's own calls through to a container engine."),
    "version": LazyCommand("commands", "version", "Print Belljar's version."),
}  # fmt: skip


class CommandTable(TyperGroup):
    """The group `belljar`: a command's module is imported when the command is called, or its help is asked for."""

    def get_params(self, ctx: Any) -> list[Any]:
        return lean.lightened(super().get_params, ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.add_command(lean.lighten(load(cmd_name)), cmd_name)
            process.collect()
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


app: typer.Typer = typer.Typer(
    name="belljar", cls=CommandTable, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Runs code that nobody has read yet, where it can do no harm.",
)  # fmt: skip
app.callback()(remote.choose)


def load(name: str) -> Any:
    """Imports a command's module and returns the command as Typer calls it."""
    command = COMMANDS[name]
    found = getattr(import_module(f"belljar.cli.{command.module}"), command.attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, context_settings=command.settings, epilog=epilog(name))(found)
        found = alone
    else:
        found.info.epilog = epilog(name)
    return get_command(found)


def typed() -> str:
    """Returns the command that was typed."""
    names = [word for word in sys.argv[1:] if word in COMMANDS]
    return names[0] if names else "this"


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Print Belljar's version."""
    if not as_json:
        print(f"belljar {__version__}")
        return
    from belljar.cli import terminal

    terminal.print_json({"version": __version__})
