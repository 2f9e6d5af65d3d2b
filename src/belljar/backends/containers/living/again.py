"""Finds the container of a living box again that an earlier server has left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from belljar.backends.containers import spec
from belljar.backends.containers.cleanup import Leftovers, remove
from belljar.backends.containers.standby import Standby
from belljar.core import errors
from belljar.core.labels import BOOT_LABEL, LABEL, OWNER_LABEL, RUN_LABEL
from belljar.host import files, ownership
from belljar.host.docker_api import asking, list_volumes

if TYPE_CHECKING:
    from aiodocker import Docker

    from belljar.backends.containers.box import ContainerHost


def name(id: str) -> str:
    """Returns the name of the container of a living box."""
    return f"{id}-living"


def place(container: str, first: int, owner: str, uid: int, path: str) -> Mapping[str, str | int]:
    """Returns by what a container is found again.

    Args:
        container: its id.
        first: its first process, as this machine sees it.
        owner: the process that made it.
        uid: the guest's.
        path: the guest's PATH, as the image has it.
    """
    return {
        "container": container, "first": ownership.name_of(first), "owner": owner, "uid": uid, "path": path,
        "boot": spec.boot(),
    }  # fmt: skip


async def look(host: ContainerHost, id: str, place: Mapping[str, str | int]) -> tuple[Standby, bool]:
    """Returns the container, if it is still what it was, and whether its processes are stopped where they are.

    Raises:
        SessionEnded: it is not.
    """
    facts = await _facts(host.client, place)
    if not is_ours(facts, id, place):
        raise errors.SessionEnded("its container is gone, or not what it was", fix="open another")
    state = facts["State"]
    if not (state.get("Running") or state.get("Paused")):
        raise errors.SessionEnded("its container has ended meanwhile", fix="open another")
    standby = Standby(host.client.containers.container(str(place["container"])), name(id), f"{place['uid']}")
    standby.note(facts, local=host.local)
    if ownership.name_of(standby.first) != place["first"]:
        raise errors.SessionEnded("its container was started anew", fix="open another")
    standby.up = True
    return standby, bool(state.get("Paused"))


def is_ours(facts: Mapping[str, Any], id: str, place: Mapping[str, str | int]) -> bool:
    """Whether a container is the one that was written down: anybody can give one our labels, nobody our id of it."""
    labels = (facts.get("Config") or {}).get("Labels") or {}
    wanted = {LABEL: "1", RUN_LABEL: id, OWNER_LABEL: place["owner"], BOOT_LABEL: spec.boot()}
    named = str(facts.get("Name", "")).lstrip("/") == name(id)
    return named and facts.get("Id") == place["container"] and wanted.items() <= labels.items()


async def _facts(client: Docker, place: Mapping[str, str | int]) -> Mapping[str, Any]:
    async with asking("the sandbox's container", errors.SessionEnded):
        return await client.containers.container(str(place["container"])).show()


async def discard(client: Docker, id: str, place: Mapping[str, str | int]) -> None:
    """Removes a container that was written down, if it is still ours, and the volumes that are its own."""
    containers = []
    with suppress(errors.BelljarError):
        containers = [str(place["container"])] if is_ours(await _facts(client, place), id, place) else []
    async with asking("the list of volumes"):
        rows = await list_volumes(client, label=f"{RUN_LABEL}={id}")
    volumes = [str(row["Name"]) for row in rows if str(row["Name"]).startswith(f"{id}-")]
    await remove(client, Leftovers(containers, volumes))


def exit_code(root: int, word: str) -> int | None:
    """Takes the exit code that the launcher of a process wrote down; None: there is none.

    Args:
        root: the container's, open.
        word: the launcher's, which no other program was told.
    """
    with suppress(OSError, ValueError), files.descended(root, ["run"]) as folder:
        name = f".{word}"
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            said = os.read(fd, 16)
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=folder)
        return min(int(said), 255) if said.strip().isdigit() else None
    return None
