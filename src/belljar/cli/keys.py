"""`belljar keys …`: who may ask a service, and for what. Once there is a key, everybody needs one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from belljar.cli import terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.settings import load

if TYPE_CHECKING:
    from belljar.protocol.records import Key
    from belljar.service.auth.access import KeyStore

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="The keys of the service: create, list, revoke.",
)

_LONGEST = 100 * 365 * 86400.0


@asynccontextmanager
async def open_keys() -> AsyncIterator[KeyStore]:
    """Opens the store that the settings name, the same that `belljar serve` opens."""
    try:
        from belljar.service.store.store import Store, store_url
    except ModuleNotFoundError as error:
        raise errors.NotAvailable(
            f"keys are kept by the service, which needs {error.name}", fix="pip install 'belljar-sandbox[service]'"
        ) from None
    async with Store(store_url(load())) as store:
        yield store


def _with_keys(function: Callable[[KeyStore], Awaitable[Any]]) -> Any:
    async def work() -> Any:
        async with open_keys() as keys:
            return await function(keys)

    return anyio.run(work)


def seconds(text: str) -> float:
    """Returns a lifetime in seconds. It must have a unit: 30 would be seconds to us, and days to many."""
    found = terminal.seconds(text)
    if text.strip()[-1].isdigit() or not 0 < found <= _LONGEST:
        raise errors.InvalidRequest(f"{text[:40]!r} is no lifetime", fix="write it as 30d, 12h or 90m")
    return found


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is: their runs are recorded under it.")],
    scope: Annotated[list[str], typer.Option("--scope", help="run, read, sessions, files or admin; repeat it.")],
    expires: Annotated[str | None, typer.Option("--expires", metavar="TIME", help="Such as 30d, 12h, 90m.")] = None,
    rate: Annotated[str, typer.Option("--rate", help="Such as 60/minute; else the setting.")] = "",
    concurrency: Annotated[int, typer.Option("--concurrency", min=0, help="Runs at once; 0: the setting.")] = 0,
    net: Annotated[
        list[str] | None,
        typer.Option("--net", metavar="HOST", help="A host, or a set as @NAME, that its runs may ask for; repeat it."),
    ] = None,
    no_net: Annotated[
        bool, typer.Option("--no-net", help="Its runs may ask for no host, whatever the settings list.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a key. Its secret is shown this once, and kept nowhere."""
    from belljar.service.auth.access import new_key

    lifetime = None if expires is None else seconds(expires)
    if net and no_net:
        raise errors.InvalidRequest("--net: does not go with --no-net", fix="give one of the two")
    hosts = () if no_net else net or None
    key, secret = new_key(name, frozenset(scope), lifetime=lifetime, rate=rate, concurrency=concurrency, net=hosts)

    async def work(keys: KeyStore) -> bool:
        namesakes = [other for other in await keys.keys() if other.name == name]  # dead ones too: their runs are kept
        await keys.add_key(key)
        return bool(namesakes)

    if _with_keys(work):
        terminal.warn(f"[yellow]another key is or was named {terminal.escape(name)} too: both see the same runs[/]")
    if as_json:
        terminal.print_json(_told(key) | {"key": secret})
        return
    terminal.warn("keep it now: it is not shown again, and the service knows only its hash")
    terminal.say(secret)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List all keys, without their secrets."""
    found: list[Key] = sorted(_with_keys(lambda keys: keys.keys()), key=lambda key: key.created)
    if as_json:
        terminal.print_json({"keys": [_told(key) for key in found]})
        return
    if not found:
        terminal.say("no keys: the service answers on loopback only, and everybody there is the local user")
    for key in found:
        until = _ended(key) or (f"until {_day(key.expires)}" if key.expires is not None else "for good")
        quotas = " ".join(filter(None, (key.rate, f"{key.concurrency} at once" if key.concurrency else "", _net(key))))
        terminal.say(
            terminal.escape(f"{key.id}  {key.name}  {','.join(sorted(key.scopes))}  {until}  {quotas}".rstrip())
        )


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `belljar keys list` shows it; or the whole key.")],
    as_json: Json = False,
) -> None:
    """Revoke a key, for good. A running service knows within a second."""
    identity = key_id.split("_")[1] if key_id.startswith("bj_") and key_id.count("_") == 2 else key_id
    if not _with_keys(lambda keys: keys.revoke_key(identity)):
        raise errors.NotFound(f"there is no key {identity[:40]!r} that could be revoked", fix="belljar keys list")
    terminal.print_json({"id": identity, "revoked": True}) if as_json else terminal.say(
        f"{terminal.escape(identity)} is revoked"
    )


def _told(key: Key) -> dict[str, Any]:
    facts = key.model_dump(mode="json", exclude={"digest"})
    return facts | {"scopes": sorted(key.scopes), "state": _ended(key) or "valid"}


def _net(key: Key) -> str:
    return "" if key.net is None else f"net: {', '.join(key.net) or 'none'}"


def _ended(key: Key) -> str:
    if key.revoked is not None:
        return "revoked"
    return "expired" if key.expires is not None and key.expires <= time.time() else ""


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
