"""`belljar open`, `close`, `ps`, `start`, `pause`, `resume`, `extend`, `snapshot`, `snapshots`, `fork`: on a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.cli.living import tables

if TYPE_CHECKING:
    from belljar.client.async_client import AsyncClient
    from belljar.client.living.process import AsyncRemoteProcess
    from belljar.client.living.sandbox import AsyncRemoteLivingSandbox
    from belljar.core.box_snapshot import BoxSnapshot
    from belljar.core.net_change import NetworkRecord
    from belljar.core.process import BoxProcess
    from belljar.protocol.living import SandboxRecord

T = TypeVar("T")

Id = Annotated[str, typer.Argument(metavar="ID", help="The sandbox, as `belljar ps` names it.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="To find it by; repeat it for more.")
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="Until it ends, such as 90m; 1h unless given.")
]
Idle = Annotated[str | None, typer.Option("--idle", metavar="TIME", help="Without use until it ends, such as 10m.")]


def open_(
    workspace: Annotated[
        str | None, typer.Option("--workspace", "-w", metavar="DIR", help="A folder of the server's, at /workspace.")
    ] = None,
    rw: opt.Rw = False, rw_git: opt.RwGit = False, backend: opt.Backend = "auto", memory: opt.Memory = None,
    cpus: opt.Cpus = None, pids: opt.Pids = None, disk: opt.Disk = None, in_files: opt.InFiles = None,
    env: opt.Env = None, net: opt.Net = None, packages: opt.Packages = None, image: opt.Image = None,
    label: Labels = None, expires: Expires = None, idle: Idle = None,
    on_expire: Annotated[str | None, typer.Option("--on-expire", help="remove, or pause.")] = None,
    snapshot_id: Annotated[str | None, typer.Option("--snapshot", metavar="ID", help="Begin with its files.")] = None,
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Open a living sandbox on a server, and print its id: it lives on when this command has ended."""
    given: dict[str, Any] = {
        "workspace": workspace, "write": rw or None, "write_git": rw_git or None, "memory": memory, "cpus": cpus,
        "pids": pids, "disk": disk, "files": opt.read_files(in_files) or None, "env": opt.read_env(env) or None,
        "net": net, "packages": opt.packages(packages), "image": image, "labels": _labels(label),
        "on_expire": on_expire, "expires": _seconds(expires), "idle": _seconds(idle), "snapshot": snapshot_id,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}

    async def work(client: AsyncClient) -> SandboxRecord:
        return (await client.sandbox(living=True, backend=backend, **options)).record

    _print_record(_ask(server, key, insecure, "open", work), as_json)


def close(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="The sandboxes.")],
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """End living sandboxes of a server, with all that runs in them."""

    async def work(client: AsyncClient) -> None:
        for id in ids:
            await (await client.sandbox(id)).close()

    _ask(server, key, insecure, "close", work)
    terminal.print_json({"closed": ids}) if as_json else None


def ps(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="A sandbox: list its processes.")] = None,
    label: Labels = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All processes, by the kernel's word.")] = False,
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """List the living sandboxes of a server, or the processes of one of them."""
    if id is None:
        found = _ask(server, key, insecure, "ps", lambda client: client.sandboxes(_labels(label)))
        documents = [one.model_dump(mode="json") for one in found]
        terminal.print_json(documents) if as_json else tables.sandboxes(found)
        return

    async def work(client: AsyncClient) -> tuple[tuple[AsyncRemoteProcess, ...], tuple[BoxProcess, ...]]:
        box = await client.sandbox(id)
        return await box.started, await box.processes() if everything or as_json else ()

    started, running = _ask(server, key, insecure, "ps", work)
    if as_json:
        told = [one.record.model_dump(mode="json") for one in started]
        terminal.print_json({"started": told, "processes": [one.model_dump(mode="json") for one in running]})
    elif everything:
        tables.processes(running)
    else:
        tables.started(started)


def start(
    id: Id,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="One word is a line of shell.")],
    cwd: Annotated[str | None, typer.Option("--cwd", metavar="DIR", help="The folder in which it starts.")] = None,
    env: opt.Env = None,
    pty: Annotated[bool, typer.Option("--pty", help="Give it a terminal, to attach to.")] = False,
    timeout: opt.Timeout = None, label: Labels = None,
    process_id: Annotated[str, typer.Option("--id", metavar="NAME", help="Its name in the sandbox.")] = "",
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Start a process in a living sandbox of a server, and print its id: it goes on when this command has ended."""

    async def work(client: AsyncClient) -> AsyncRemoteProcess:
        box = await client.sandbox(id)
        words: Any = command[0] if len(command) == 1 else command
        size = (80, 24) if pty else None
        return await box.start(
            words, cwd=cwd, env=opt.read_env(env), pty=size, timeout=timeout, labels=_labels(label), id=process_id
        )

    started = _ask(server, key, insecure, "start", work)
    terminal.print_json(started.record.model_dump(mode="json")) if as_json else print(started.id)


def pause(
    id: Id, as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Stop all processes of a living sandbox where they are, until it is resumed."""
    _change(server, key, insecure, "pause", id, as_json, lambda box: box.pause())


def resume(
    id: Id, as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Let the processes of a paused living sandbox go on."""
    _change(server, key, insecure, "resume", id, as_json, lambda box: box.resume())


def network(
    id: Id,
    what: Annotated[str, typer.Argument(metavar="show|allow|deny|set", help="What to do.")] = "show",
    entries: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST]...", help="Hosts, addresses, named sets, or '*' for any.")
    ] = None,
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Show or change what a living sandbox may reach, at once: what is denied is cut."""
    listed = tuple(entries or ())
    fits = {"show": not listed, "set": True, "allow": bool(listed), "deny": bool(listed)}
    if not fits.get(what):
        raise typer.BadParameter("write show, allow HOST..., deny HOST... or set [HOST]...")

    async def work(client: AsyncClient) -> NetworkRecord:
        box = await client.sandbox(id)
        if what == "set":
            return await box.network.set(listed)
        if what == "show":
            return await box.network.show()
        return await (box.network.allow(*listed) if what == "allow" else box.network.deny(*listed))

    found = _ask(server, key, insecure, "network", work)
    if as_json:
        terminal.print_json(found.model_dump(mode="json"))
        return
    print("\n".join(found.net) or "nothing")
    for one in found.denied:
        print(f"but not {one}")


def extend(
    id: Id, duration: Annotated[str, typer.Argument(metavar="TIME", help="Such as 90m or 2h, from now.")],
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Move the end of a living sandbox."""
    seconds = terminal.seconds(duration)
    _change(server, key, insecure, "extend", id, as_json, lambda box: box.extend(seconds))


def snapshot(
    id: Id, label: Labels = None, as_json: opt.Json = False, server: remote.LivingServer = None,
    key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Keep the files of a living sandbox as they are now, and print the id: `belljar open --snapshot ID`."""

    async def work(client: AsyncClient) -> BoxSnapshot:
        return await (await client.sandbox(id)).snapshot(labels=_labels(label))

    made = _ask(server, key, insecure, "snapshot", work)
    if as_json:
        terminal.print_json(made.model_dump(mode="json"))
        return
    print(made.id)
    for note in (*made.warnings, *made.left_out):
        terminal.note(note)


def snapshots(
    label: Labels = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="ID", help="Remove it; may be repeated.")
    ] = None,
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """List the snapshots on a server, or remove some."""

    async def work(client: AsyncClient) -> list[BoxSnapshot]:
        for id in remove or ():
            await client.remove_snapshot(id)
        return [] if remove else await client.snapshots(_labels(label))

    found = _ask(server, key, insecure, "snapshots", work)
    if remove:
        terminal.print_json({"removed": remove}) if as_json else None
    elif as_json:
        terminal.print_json([one.model_dump(mode="json") for one in found])
    else:
        tables.snapshots(found)


def fork(
    id: Id, label: Labels = None, expires: Expires = None, as_json: opt.Json = False,
    server: remote.LivingServer = None, key: remote.Key = None, insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Open another living sandbox with the files of one, and print its id. Processes are not copied."""

    async def work(client: AsyncClient) -> SandboxRecord:
        return (await (await client.sandbox(id)).fork(labels=_labels(label), expires=_seconds(expires))).record

    _print_record(_ask(server, key, insecure, "fork", work), as_json)


# --- asking ---


def _ask(
    server: str | None, key: str | None, insecure: bool, what: str, work: Callable[[AsyncClient], Awaitable[T]]
) -> T:
    """Does something with a client of the server."""
    remote.use(server, key, insecure)

    async def ask() -> T:
        async with remote.served(what) as client:
            return await work(client)

    return process.run_async(ask)


def _change(
    server: str | None, key: str | None, insecure: bool, what: str, id: str, as_json: bool,
    work: Callable[[AsyncRemoteLivingSandbox], Awaitable[None]],
) -> None:  # fmt: skip
    async def change(client: AsyncClient) -> SandboxRecord:
        box = await client.sandbox(id)
        await work(box)
        return box.record

    record = _ask(server, key, insecure, what, change)
    terminal.print_json(record.model_dump(mode="json")) if as_json else tables.sandboxes([record])


def _labels(pairs: list[str] | None) -> dict[str, str] | None:
    return opt.read_env(pairs, "--label") or None


def _seconds(text: str | None) -> float | None:
    return None if text is None else terminal.seconds(text)


def _print_record(record: SandboxRecord, as_json: bool) -> None:
    terminal.print_json(record.model_dump(mode="json")) if as_json else print(record.id)
