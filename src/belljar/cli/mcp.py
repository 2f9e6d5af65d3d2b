"""`belljar mcp`: sandboxes as tools of a model. The MCP library takes a second to import, so only this command does."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Annotated, Any

import anyio
import typer

from belljar.cli import serve as cli_serve
from belljar.core import errors
from belljar.settings import load

Net = Annotated[
    list[str] | None,
    typer.Option("--net", metavar="HOST", help="A host that models may let their code reach; repeat it for more."),
]


def mcp(
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP at /mcp, on loopback, not stdio.")
    ] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="With --http; 0: any that is free.")] = None,
    net: Net = None,
    as_json: cli_serve.Json = False,
) -> None:
    """Offer sandboxes to models over MCP: on stdin and stdout, as clients start it, or over HTTP."""
    if port is not None and not http:
        raise errors.InvalidRequest("--port goes with --http")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    hosts = tuple(net or ())
    if not http:
        anyio.run(_package("belljar.service.mcp.stdio").serve, load(), hosts)
        return
    service: dict[str, Any] = {"host": "127.0.0.1"} | ({} if port is None else {"port": port})
    settings = load(service=service)
    cli_serve.listen(_package("belljar.service.mcp.http").create_app(settings, hosts), settings, as_json)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise errors.NotAvailable(
            f"MCP needs a package that is not installed: {error.name}", fix="pip install 'belljar-sandbox[mcp]'"
        ) from None
