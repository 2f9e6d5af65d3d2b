"""`belljar cp`: files and folders into living sandboxes of a server, and out of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import anyio.to_thread
import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.core import errors

if TYPE_CHECKING:
    from belljar.living.files import AsyncFiles

_THERE = re.compile(r"([A-Za-z0-9_-]{3,80}):(.*)", re.DOTALL)


class _InSandbox(NamedTuple):
    """A path of a sandbox."""

    sandbox: str
    path: str


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path, or ID:PATH of a sandbox.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The other of the two.")],
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Copy a file or a folder into a living sandbox of a server, or out of it: one side is ID:PATH."""
    remote.use(server, key, insecure)
    came, goes = _side(source), _side(target)
    if isinstance(came, _InSandbox) == isinstance(goes, _InSandbox):
        raise errors.InvalidRequest(
            "one of the two has to be in a sandbox", fix="write it as ID:PATH, and a path here with a colon as ./PATH"
        )

    async def work() -> tuple[str, ...]:
        async with remote.served("cp") as client:
            if isinstance(goes, _InSandbox):
                await _upload((await client.sandbox(goes.sandbox)).files, str(came), goes.path or ".")
                return ()
            assert isinstance(came, _InSandbox)
            return await _download((await client.sandbox(came.sandbox)).files, came.path or ".", str(goes))

    try:
        left_out = process.run_async(work)
    except BrokenPipeError:
        raise
    except OSError as error:
        told = f"{error.filename or source}: {error.strerror or error}"
        raise errors.InvalidRequest(told, fix="check both paths") from None
    if as_json:
        terminal.print_json({"left_out": left_out})
    for note in () if as_json else left_out:
        terminal.note(f"left out: {note}")


def _side(text: str) -> str | _InSandbox:
    found = None if text.startswith((".", "/")) else _THERE.fullmatch(text)
    return _InSandbox(found[1], found[2]) if found else text


async def _upload(files: AsyncFiles, local: str, path: str) -> None:
    """As `cp -r`: a folder goes into one that is there, and becomes one that is not."""
    if await anyio.to_thread.run_sync(os.path.isdir, local):
        if await files.exists(path) and (await files.stat(path)).kind == "folder":
            path = f"{path.rstrip('/')}/{Path(local).absolute().name}"
        await files.make_dir(path)
    elif path.endswith("/"):
        await files.make_dir(path)
    await files.upload(local, path)


async def _download(files: AsyncFiles, path: str, local: str) -> tuple[str, ...]:
    if (await files.stat(path)).kind == "folder" and await anyio.to_thread.run_sync(os.path.isdir, local):
        name = path.rstrip("/").rpartition("/")[2]
        local = os.path.join(local, name) if name not in ("", ".", "..", "~") else local
    return await files.download(path, local)
