"""`belljar keys …`: who may ask a service, and for what. Once there is a key, everybody needs one."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from belljar.cli import terminal
from belljar.cli.options import Json
from belljar.core import errors
from belljar.core.settings import Settings
from belljar.settings import load

if TYPE_CHECKING:
    from belljar.protocol.records import Key
    from belljar.service.store.store import Store

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="The keys of the service: create, list, revoke.",
)

_LONGEST = 100 * 365 * 86400.0
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Of the server, where that is another than the settings name."),
]


@asynccontextmanager
async def open_keys(data_dir: Path | None = None) -> AsyncIterator[Store]:
    """Opens the store that the settings name, the same that `belljar serve` opens, or the one in a folder."""
    settings = load() if data_dir is None else load(data_dir=str(data_dir))
    if data_dir is not None:
        _check_folder(data_dir, settings)
    try:
        from belljar.service.store.store import Store, store_url
    except ModuleNotFoundError as error:
        raise errors.NotAvailable(
            f"keys are kept by the service, which needs {error.name}", fix="pip install 'belljar-sandbox[service]'"
        ) from None
    async with Store(store_url(settings)) as store:
        yield store


def _check_folder(folder: Path, settings: Settings) -> None:
    """Refuses a folder whose server would not read the key, or could not write its records afterwards."""
    if settings.service.store:
        raise errors.InvalidRequest(
            "--data-dir: service.store is set, and keys are kept there", fix="leave --data-dir out"
        )
    if not folder.is_dir():
        raise errors.InvalidRequest(
            f"--data-dir: {folder} is no folder, so no server reads it", fix="name the BELLJAR_DATA_DIR of the server"
        )
    owner = folder.stat().st_uid
    if owner != os.geteuid():  # files of ours in there would be out of the server's reach
        raise errors.PolicyDenied(
            f"--data-dir: {folder} belongs to another user ({_user(owner)})",
            fix=f"do it as that user: runuser -u {_user(owner)} -- belljar keys …",
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _with_keys(function: Callable[[Store], Awaitable[Any]], data_dir: Path | None = None) -> Any:
    async def work() -> Any:
        async with open_keys(data_dir) as keys:
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
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Create a key. Its secret is shown this once, and kept nowhere."""
    from belljar.service.auth.access import new_key

    lifetime = None if expires is None else seconds(expires)
    if net and no_net:
        raise errors.InvalidRequest("--net: does not go with --no-net", fix="give one of the two")
    hosts = () if no_net else net or None
    key, secret = new_key(name, frozenset(scope), lifetime=lifetime, rate=rate, concurrency=concurrency, net=hosts)

    async def work(keys: Store) -> tuple[bool, str]:
        namesakes = [other for other in await keys.keys() if other.name == name]  # dead ones too: their runs are kept
        await keys.add_key(key)
        return bool(namesakes), keys.database.where

    namesakes, where = _with_keys(work, data_dir)
    if namesakes:
        terminal.warn(f"[yellow]another key is or was named {terminal.escape(name)} too: both see the same runs[/]")
    if as_json:
        terminal.print_json(_told(key) | {"key": secret})
        return
    told = f"it is known to servers that keep their records in {where}; for another one's folder: --data-dir"
    terminal.warn(terminal.escape(told))
    terminal.warn("keep it now: it is not shown again, and the service knows only its hash")
    terminal.say(secret)


@app.command()
def generate() -> None:
    """Print a key that no server knows yet, for the file that service.first_key_file names (a Secret)."""
    from belljar.service.auth.access import new_key

    print(new_key("first", frozenset(("run",)))[1])


@app.command("list")
def list_(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List all keys, without their secrets."""
    found: list[Key] = sorted(_with_keys(lambda keys: keys.keys(), data_dir), key=lambda key: key.created)
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
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Revoke a key, for good. A running service knows within a second."""
    identity = key_id.split("_")[1] if key_id.startswith("bj_") and key_id.count("_") == 2 else key_id
    if not _with_keys(lambda keys: keys.revoke_key(identity), data_dir):
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
