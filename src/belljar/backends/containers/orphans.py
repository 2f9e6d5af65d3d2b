"""Removes the containers, volumes and sockets of Belljars that have died."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from belljar.backends.containers import egress_relay, spec
from belljar.backends.containers.cleanup import Cleanup, Leftovers, remove
from belljar.core.labels import BOOT_LABEL, CREATED_LABEL, KEPT_LABEL, LABEL, LATEST_LABEL, OWNER_LABEL, RUN_LABEL
from belljar.host import ownership
from belljar.host.docker_api import asking, list_containers, list_volumes

if TYPE_CHECKING:
    from aiodocker import Docker

_ABANDONED_SECONDS = 3600  # after which a container of an earlier boot is nobody's


async def reap(client: Docker, cleanup: Cleanup, state_dir: Path) -> int:
    """Removes the containers, and then the volumes, whose owner is dead; returns how many containers that were.

    Args:
        client: Of the engine.
        cleanup: Gets what the engine does not let go of at once, and asks again.
        state_dir: Where the sockets of egress relays are.
    """
    egress_relay.reap(state_dir)
    cleanup.retry()  # what would not go earlier; the engine may have been restarted
    async with asking("the list of containers"):
        containers = await list_containers(client, label=f"{LABEL}=1")
        volumes = await list_volumes(client, label=f"{LABEL}=1")
    waiting = {(each.get("Labels") or {}).get(RUN_LABEL) for each in containers if _waits_for_owner(each)}
    dead = [
        str(each["Id"]) for each in containers
        if not _waits_for_owner(each) and _is_orphan(each.get("Labels"), each.get("State") == "running")
    ]  # fmt: skip
    folders = [
        str(each["Name"]) for each in volumes
        if (each.get("Labels") or {}).get(RUN_LABEL) not in waiting and _is_orphan(each.get("Labels"), False)
    ]  # fmt: skip
    async with anyio.create_task_group() as tasks:
        for each in dead:
            tasks.start_soon(_remove, client, cleanup, Leftovers([each]))
    await _remove(client, cleanup, Leftovers((), folders))
    return len(dead)


async def _remove(client: Docker, cleanup: Cleanup, leftovers: Leftovers) -> None:
    if not await remove(client, leftovers):
        cleanup.remove_later(leftovers)


def _waits_for_owner(container: Mapping[str, Any]) -> bool:
    """Whether it goes on without its server, which may be started again; it ends by itself where it is not."""
    latest = (container.get("Labels") or {}).get(LATEST_LABEL, "")
    return container.get("State") in ("running", "paused") and latest.isdigit() and time.time() < int(latest)


def _is_orphan(labels: Mapping[str, str] | None, running: bool) -> bool:
    labels = labels or {}
    if labels.get(KEPT_LABEL) == "1" and not running:
        return False  # its user has to remove it
    if labels.get(BOOT_LABEL) == spec.boot():
        return ownership.is_dead(labels.get(OWNER_LABEL, ""))
    made = labels.get(CREATED_LABEL, "")
    return not running and made.isdigit() and time.time() - int(made) > _ABANDONED_SECONDS
