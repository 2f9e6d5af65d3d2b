"""`belljar --server URL run …`: the commands that a server can do for us, and a no to all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from belljar.core import errors

if TYPE_CHECKING:
    from belljar.client.async_client import AsyncClient
    from belljar.control.callbacks import Listener
    from belljar.control.control import Control
    from belljar.core.capabilities import Capabilities, LanguageSupport
    from belljar.core.request import RunRequest
    from belljar.core.result import Result
    from belljar.engine.engine import Engine

COMMANDS = frozenset(("run", "exec", "languages", "doctor", "version"))
_client: AsyncClient | None = None

Server = Annotated[str | None, typer.Option("--server", metavar="URL", help="Let this server do it, not this machine.")]
Key = Annotated[
    str | None, typer.Option("--key", envvar="BELLJAR_KEY", help="For --server. Others see it here: set the variable.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send the key in the clear, in a network you trust.")]


def choose(context: typer.Context, server: Server = None, key: Key = None, insecure: Insecure = False) -> None:
    """Before the command: where it is done. What a server cannot do is refused: it must not be done here instead."""
    global _client
    _client = None
    if server is None:
        return
    if context.invoked_subcommand not in COMMANDS:
        raise errors.InvalidRequest(
            f"{context.invoked_subcommand} does not work with --server",
            fix=f"it goes with {', '.join(sorted(COMMANDS))}",
        )
    from belljar.client.async_client import AsyncClient

    _client = AsyncClient(server, key or None, insecure=insecure, retries=3)


async def run(engine: Engine, asked: RunRequest, *, listener: Listener | None, control: Control) -> Result:
    if _client is None:
        return await engine.run(asked, listener=listener, control=control)
    async with _client as client:
        return await client.execute(asked, listener=listener, control=control)


async def backends(engine: Engine) -> tuple[Capabilities, ...]:
    if _client is None:
        return tuple(await engine.backends())
    async with _client as client:
        return await client.backends()


async def languages(engine: Engine) -> list[tuple[str, LanguageSupport]]:
    if _client is None:
        return await engine.supported_languages()
    async with _client as client:
        return await client.languages()
