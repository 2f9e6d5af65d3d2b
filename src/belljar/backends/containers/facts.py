"""What a container engine says of itself: its version, its runtimes, its limits, and the walls of its host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio.to_thread

from belljar.core import errors
from belljar.core.settings import ContainerSettings
from belljar.host import apparmor
from belljar.host.block_device import disk_of
from belljar.host.docker_api import asking, version_of
from belljar.host.engine_address import EngineAddress, is_outside

if TYPE_CHECKING:
    from aiodocker import Docker

_MINIMUM_API = (1, 41)  # Docker 20.10, Podman 4
_ANSWER_SECONDS = 30.0
_SHARED_KERNEL = re.compile(r"runc|crun|youki|io\.containerd\.runc\..*|io\.containerd\.runtime\.v1\.linux")


def has_own_kernel(runtime: str) -> bool:
    """Says whether a runtime puts a kernel of its own between a guest and the host's, as gVisor does."""
    return not _SHARED_KERNEL.fullmatch(runtime)


def living_features(facts: EngineFacts, runtime: str) -> frozenset[str] | None:
    """Returns what living sandboxes of a runtime can do here; None: there are none.

    Args:
        facts: What the engine says of itself.
        runtime: The name of the runtime.
    """
    return None if no_life(facts, runtime) else frozenset({"pty", "dial", "pause", "watch", "snapshot"})


def no_life(facts: EngineFacts, runtime: str) -> str:
    """Returns why a runtime has no living sandboxes here; empty if it has."""
    if has_own_kernel(runtime):
        return f"{runtime} has a kernel of its own, which cannot end one program for its memory, and go on"
    if not facts.address.local:
        return "the engine is on another machine, or outside of the container that Belljar is in"
    if facts.maps_uids or os.geteuid() != 0:
        return "the host comes to files and ports of a container as root, beside an engine that has root"
    return ""


class EngineFacts(NamedTuple):
    """What an engine says of itself."""

    version: str
    address: EngineAddress
    kernel: str
    cgroup: str
    limits: Mapping[str, bool]
    runtimes: tuple[str, ...]
    default: str
    maps_uids: bool
    labelled: bool
    security: str = ""  # its walls beside seccomp, in its own words
    disk: str = ""  # the device below its data, where block I/O can be limited; empty: none is known
    apparmor: str = ""  # our own AppArmor profile, where the engine's kernel has it


def read_facts(address: EngineAddress, version: str, said: Mapping[str, Any]) -> EngineFacts:
    """Reads what an engine says of itself (`GET /info`).

    Args:
        address: Where it listens.
        version: Its name and version.
        said: Its answer.
    """
    security = " ".join(map(str, said.get("SecurityOptions") or ()))
    default = os.path.basename(str(said.get("DefaultRuntime") or ""))  # Podman tells its path
    rootless = bool(said.get("Rootless")) or "rootless" in security  # Podman's word, and Docker's
    version_1 = str(said.get("CgroupVersion", "1")) == "1"
    return EngineFacts(
        version=version, address=address, kernel=str(said.get("KernelVersion", "")),
        cgroup=f"cgroup v{said.get('CgroupVersion', '1')}",
        # Without root, version 1 lets nobody set a limit; Podman takes them, leaves them out and says yes here.
        limits={name: bool(said.get(key)) and not (rootless and version_1) for name, key in
                (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpus", "CpuCfsQuota"))},
        runtimes=(default,) if address.flavour.one_runtime else tuple(said.get("Runtimes") or {}),
        default=default,
        maps_uids=rootless or "name=userns" in security, labelled="selinux" in security,
        security=security, disk=_disk(address, said),
    )  # fmt: skip


def _disk(address: EngineAddress, said: Mapping[str, Any]) -> str:
    warnings = " ".join(map(str, said.get("Warnings") or ()))
    if not address.local or re.search(r"No (blkio throttle|io\.max)", warnings):
        return ""
    with suppress(OSError):
        number = disk_of(str(said.get("DockerRootDir") or ""))
        found = re.search(r"^DEVNAME=(.+)$", Path(f"/sys/dev/block/{number}/uevent").read_text(), re.MULTILINE)
        if number and found and os.path.exists(f"/dev/{found[1]}"):
            return f"/dev/{found[1]}"
    return ""


async def ask_facts(client: Docker, address: EngineAddress, options: ContainerSettings) -> EngineFacts:
    """Asks an engine what it is.

    Raises:
        NotAvailable: It does not answer, is too old, or lacks a wall that the settings name.
    """
    name = address.flavour.name
    async with asking(f"{name} at {address}", errors.NotAvailable, seconds=_ANSWER_SECONDS, fix=address.flavour.start):
        version = await version_of(client)
        said: dict[str, Any] = dict(await client.system.info())
        api = tuple(int(part) for part in str(version["ApiVersion"]).split("."))
        outside = await anyio.to_thread.run_sync(is_outside, address.url)
        known = address._replace(version="v" + ".".join(map(str, api)), outside=outside)
    if api < _MINIMUM_API:
        raise errors.NotAvailable(
            f"{name} {version.get('Version')} is too old", fix="Docker 20.10, Podman 4, or later is needed"
        )
    facts = read_facts(known, f"{name} {version.get('Version')}", said)
    if facts.address.local and "apparmor" in facts.security and await anyio.to_thread.run_sync(apparmor.is_loaded):
        facts = facts._replace(apparmor=apparmor.PROFILE)
    security(options, facts)
    return facts


def security(options: ContainerSettings, facts: EngineFacts, runtime: str = "") -> tuple[str, ...]:
    """Returns the AppArmor profile and SELinux label of the settings, as the engine wants them.

    Where the settings name no AppArmor profile and ours is loaded (`belljar profiles install`), it is ours; but not for
    a runtime with a kernel of its own, whose processes on the host are no guest's.

    Args:
        options: The settings.
        facts: What the engine says of itself.
        runtime: The guest's; empty: the engine's own default.

    Raises:
        NotAvailable: The settings name one that the engine does not have: that would be no wall.
    """
    ours = "" if has_own_kernel(runtime or facts.default) else facts.apparmor
    wanted = {"apparmor": options.apparmor_profile or ours, "selinux": options.selinux_label}
    for name, value in wanted.items():
        if value and name not in facts.security:
            key = "apparmor_profile" if name == "apparmor" else "selinux_label"
            raise errors.NotAvailable(
                f"container.{key} is {value!r}, but the engine knows no {name} here",
                fix=f"unset container.{key}, or switch {name} on in the host's kernel and in the engine",
            )
    words = {"apparmor": "apparmor", "selinux": "label"}
    return tuple(f"{words[name]}={value}" for name, value in wanted.items() if value)
