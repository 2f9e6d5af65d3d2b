"""`belljar --server URL run …`: the commands that a server can do for us, and a no to all others.

The options that say where may stand before the command or after it; what stands after it counts more.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from belljar.core import errors
from belljar.core.version import __version__

if TYPE_CHECKING:
    from belljar.client.async_client import AsyncClient
    from belljar.control.callbacks import Listener
    from belljar.control.control import Control
    from belljar.core.capabilities import Capabilities, LanguageSupport
    from belljar.core.request import RunRequest
    from belljar.core.result import Result
    from belljar.engine.engine import Engine

LIVING = (
    "shell", "open", "close", "ps", "start", "attach", "cp", "port", "pause", "resume", "extend", "network", "snapshot",
    "snapshots", "fork",
)  # fmt: skip
COMMANDS = frozenset(("run", "exec", "test", "session", "languages", "doctor", "top", *LIVING))
SERVER = "http://127.0.0.1:8080"  # where `belljar serve` serves


class ChosenServer(NamedTuple):
    """Where a command is done: on a server, or here if none is named."""

    server: str | None = None
    key: str | None = None
    insecure: bool = False


_place = ChosenServer()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"belljar {__version__}")
        raise typer.Exit


Server = Annotated[str | None, typer.Option("--server", metavar="URL", help="Let this server do it, not this machine.")]
LivingServer = Annotated[
    str | None,
    typer.Option("--server", envvar="BELLJAR_SERVER", metavar="URL", help=f"The server to ask, if not {SERVER}."),
]
Key = Annotated[
    str | None, typer.Option("--key", envvar="BELLJAR_KEY", help="For --server. Others see it here: set the variable.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send the key in the clear, in a network you trust.")]
Version = Annotated[
    bool, typer.Option("--version", help="Print Belljar's version.", is_eager=True, callback=_print_version)
]


def is_here() -> bool:
    """Whether commands are done on this machine."""
    return _place.server is None


def choose(
    context: typer.Context, server: Server = None, key: Key = None, insecure: Insecure = False, version: Version = False
) -> None:
    """Before the command: where it is done. What a server cannot do is refused: it must not be done here instead."""
    global _place
    _place = ChosenServer(server, key, insecure)
    if server is not None and context.invoked_subcommand not in COMMANDS:
        raise refusal(str(context.invoked_subcommand))


def refusal(command: str) -> errors.InvalidRequest:
    """Says that a command is done on this machine only, and which are done on servers."""
    return errors.InvalidRequest(f"{command} does not work with --server", fix=f"it goes with {_listed()}")


def use(server: str | None, key: str | None, insecure: bool) -> None:
    """Takes what stands after the command: it counts more than what stands before it, and the variables least."""
    global _place
    server = _what_counts(server, _place.server, "BELLJAR_SERVER")
    _place = ChosenServer(server, _what_counts(key, _place.key, "BELLJAR_KEY"), insecure or _place.insecure)


def _what_counts(after: str | None, before: str | None, variable: str) -> str | None:
    return before if before and after == os.environ.get(variable) else after or before


def the_server() -> ChosenServer:
    """Returns the server that was named, or the usual one, for what only a server can do."""
    return _place._replace(server=_place.server or SERVER)


def client() -> AsyncClient | None:
    """Returns a client of the server that was named; None if the command is to be done here."""
    if _place.server is None:
        return None
    from belljar.client.async_client import AsyncClient

    return AsyncClient(_place.server, _place.key or None, insecure=_place.insecure, retries=3)


@asynccontextmanager
async def served(what: str) -> AsyncIterator[AsyncClient]:
    """Gives a client of the server that was named, or of the usual one, for what only a server can do.

    Args:
        what: that in words, for somebody who has no server.
    """
    from belljar.client.async_client import AsyncClient
    from belljar.client.connections import Unanswered

    url, problem = _place.server or SERVER, ""
    try:
        async with AsyncClient(url, _place.key or None, insecure=_place.insecure, retries=2) as client:
            yield client
        return
    except Unanswered as error:
        if error.sent:
            raise
        problem = f"{what} needs a server, and there is none at {url}"
    raise errors.NotAvailable(problem, fix="start one: belljar serve   (or name one with --server URL)")


def _listed() -> str:
    return ", ".join(sorted(COMMANDS))


async def run(engine: Engine, asked: RunRequest, *, listener: Listener | None, control: Control) -> Result:
    if (there := client()) is None:
        return await engine.run(asked, listener=listener, control=control)
    async with there:
        return await there.execute(asked, listener=listener, control=control)


async def backends(engine: Engine) -> tuple[Capabilities, ...]:
    if (there := client()) is None:
        return tuple(await engine.backends())
    async with there:
        return await there.backends()


async def languages(engine: Engine) -> list[tuple[str, LanguageSupport]]:
    if (there := client()) is None:
        return await engine.supported_languages()
    async with there:
        return await there.languages()
