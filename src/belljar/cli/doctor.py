"""`belljar doctor`, `setup` and `languages`: what works on this machine, and how to get the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from belljar.cli import process, remote, terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.core.capabilities import Capabilities


def doctor(
    as_json: Json = False, server: remote.Server = None, key: remote.Key = None, insecure: remote.Insecure = False
) -> None:
    """Show for every backend whether it works here, why not, how to fix it, and what it guarantees."""
    remote.use(server, key, insecure)
    found = process.run_async(lambda: remote.backends(process.make_engine(probe=True)))
    if as_json:
        terminal.print_json({"backends": [_document(capabilities) for capabilities in found]})
    else:
        terminal.doctor(found)
        _offer(found)
    raise typer.Exit(0 if any(capabilities.available for capabilities in found) else 1)


def _offer(found: Sequence[Capabilities]) -> None:
    """Says which backend only has to be set up; at a terminal, asks whether to do it now."""
    for line in terminal.offered(found):
        terminal.say(line)
    waiting = [one.backend for one in found if one.setup and not one.available]
    if waiting and remote.is_here() and sys.stdin.isatty() and sys.stdout.isatty():
        for name in waiting:
            if typer.confirm(f"Set up {name} now?", default=True):
                setup(name)


def setup(
    backend: Annotated[str, typer.Argument(help="The backend to prepare: wasm, or one whose image is to be pulled.")],
    as_json: Json = False,
) -> None:
    """Prepare a backend that needs it, once: wasm compiles its interpreters, docker and podman pull their image."""
    engine = process.make_engine(probe=True)
    if not engine.needs_setup(backend):
        raise errors.InvalidRequest(f"{backend!r} needs no setup", fix="belljar setup wasm")

    async def work() -> Capabilities:
        with terminal.steps() as engine.on_setup:
            await engine.setup(backend)
        return await engine.capabilities(backend)

    found = process.run_async(work)
    if not found.available:
        raise errors.NotAvailable(f"{backend}: {found.why_not}", fix=found.fix)
    profiles = f", profiles {', '.join(sorted(found.profiles))}" if found.profiles else ""
    ready = f"ready: {found.version}{profiles}"
    terminal.print_json(_document(found)) if as_json else terminal.say(ready)


def languages(
    as_json: Json = False, server: remote.Server = None, key: remote.Key = None, insecure: remote.Insecure = False
) -> None:
    """List the languages that this installation can run now, and how to get the others."""
    remote.use(server, key, insecure)
    rows = process.run_async(lambda: remote.languages(process.make_engine()))
    if as_json:
        terminal.print_json({"languages": [{"backend": name, **row.model_dump(mode="json")} for name, row in rows]})
    else:
        terminal.languages(rows)


def _document(capabilities: Capabilities) -> dict[str, object]:
    return capabilities.model_dump(mode="json", exclude={"modules"})
