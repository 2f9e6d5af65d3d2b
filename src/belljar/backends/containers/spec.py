"""The walls of a container, as the engine's API wants them. Every dangerous choice is in this file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from belljar.backends.guest_text import shell_script
from belljar.core import errors
from belljar.core.labels import (
    BOOT_LABEL,
    CREATED_LABEL,
    KEPT_LABEL,
    LABEL,
    LATEST_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    USER_LABEL,
)
from belljar.core.plan import INPUTS
from belljar.core.request import Limits, Workspace
from belljar.core.values import MIB, WORKSPACE
from belljar.host.engine_address import Flavour
from belljar.host.guest_uid import group_of
from belljar.host.seccomp.guest_profile import PROFILE_PATH, profile_text
from belljar.host.seccomp.profiles import read_profile

KEEPER = 60_998  # owns what goes in read-only, and the shared folders: a uid that no guest ever has
PLAIN_GUEST = 60_999  # for engines that map uids themselves, where ours would not exist
GUEST_ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "guest", "LOGNAME": "guest", "LANG": "C.UTF-8"}
_SHM_BYTES = 64 * MIB
_OWN_PROCESSES = 2  # the init and the launcher count against the pids limit
_KERNEL_PROCESSES = 1024  # what a kernel in user space needs for itself, on the host
# Control groups version 1 count what waits in sockets apart, and engines set no limit for it: so a thousand must fit.
_SMALL_BUFFERS = {f"net.ipv4.tcp_{way}mem": "4096 65536 65536" for way in "rw"}
_CPU_PERIOD_MICROSECONDS = 100_000
_LEAST_QUOTA_MICROSECONDS = 1000

KEPT_LOG = {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "1"}}  # of a container that is kept
LAUNCHER = ("/bin/sh", "-c", shell_script("containers/launch"))
KEPT_LAUNCHER = (*LAUNCHER, "keep")  # ends with the guest's exit code
HOLD = shell_script("containers/hold")


def order(cwd: str, env: Mapping[str, str], argv: Sequence[str]) -> bytes:
    """Returns the line that tells the launcher (`guest/shell/containers/launch.sh`) what to run, and where."""
    # By `env`, so that it is a program and never a word that the shell knows; which would take a=b for a variable.
    program = ["sh", "-c", 'exec "$@"', "sh"] if "=" in argv[0] else []
    words = (cwd, "env", "--", *(f"{name}={value}" for name, value in env.items()), *program, *argv)
    return " ".join(map(_quoted, words)).encode() + b"\n"


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'").replace("\n", "'\"$n\"'") + "'"


class Options(NamedTuple):
    """What an administrator, or a plan's network, changes of the walls. The defaults change nothing."""

    cpu_shares: int | None = None
    cpu_affinity: str = ""  # the CPUs that it may use, such as 0-3,5; empty: all
    io_weight: int | None = None
    disk: str = ""  # the device that limits of block I/O are for
    network: str = ""  # the name of the engine's network; empty: none at all
    dns: tuple[str, ...] = ()
    writable_root: bool = False
    capabilities: tuple[str, ...] = ()
    profile: str = ""  # path of a seccomp profile, instead of ours
    security: tuple[str, ...] = ()  # AppArmor's profile and SELinux's label, as the engine wants them


class GuestFolder(NamedTuple):
    """One fresh folder in memory of a living box."""

    uid: int  # whose it is
    size: int  # bytes
    mode: int = 0o755


class ContainerSpec(NamedTuple):
    """All that differs from one container to the next."""

    flavour: Flavour
    image: str
    argv: Sequence[str]
    uid: int
    limits: Limits
    owner: str
    run: str  # the id of its box
    runtime: str | None = None
    env: Mapping[str, str] = {}
    volumes: Mapping[str, str] = {}  # name -> where it is mounted
    workspace: Workspace | None = None
    inputs: bool = False  # does it need a place for inputs beside a granted folder?
    locked: Sequence[str] = ()  # which of the volumes' places are read-only
    declared: Sequence[str] = ()  # where the image wants volumes
    small_buffers: bool = False  # is what waits in sockets not counted as its memory?
    own_kernel: bool = False  # is there a kernel between it and the host's, with processes of its own on the host?
    beside: str = ""  # the id of a container whose network it shares
    shown: Mapping[str, str] = {}  # sockets of the host -> where it finds them
    options: Options = Options()
    kept: bool = False  # is it to be kept when it has ended?
    places: Mapping[str, GuestFolder] = {}  # of a living box: there are no other writable folders then
    latest: float = 0.0  # of one that goes on without its owner: when it is nobody's; 0: at once


def container(guest: ContainerSpec) -> dict[str, Any]:
    """Returns the request body that creates a container."""
    return {
        "Image": guest.image,
        "Entrypoint": [],
        "Cmd": list(guest.argv),
        "User": f"{guest.uid}:{group_of(guest.uid)}",
        "WorkingDir": "/",
        **({} if guest.beside else {"Hostname": "belljar"}),
        "Env": [f"{name}={value}" for name, value in guest.env.items()],
        "Labels": labels(guest.owner, guest.run, kept=guest.kept, latest=guest.latest),
        "OpenStdin": not guest.latest,  # what goes on without us must not end with our end of its stdin
        "StdinOnce": not guest.latest,
        "AttachStdin": not guest.latest,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Healthcheck": {"Test": ["NONE"]},  # else the image says what the host runs in it, and how often
        # With networks switched off, Docker would give a machine no /etc/hosts, and so no localhost.
        "NetworkDisabled": not (guest.options.network or guest.beside or guest.places),
        "HostConfig": _walls(guest),
    }


def _walls(guest: ContainerSpec) -> dict[str, Any]:
    limits, options = guest.limits, guest.options
    walls = {
        "NetworkMode": f"container:{guest.beside}" if guest.beside else options.network or "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "ReadonlyRootfs": not options.writable_root,
        "Privileged": False,
        "CapDrop": ["ALL"],
        # AppArmor's and SELinux's own profiles hold unless they are switched off, and we never do that.
        "SecurityOpt": ["no-new-privileges", f"seccomp={_filter(guest)}", *options.security],
        "Init": True,
        "Memory": limits.memory,
        "MemorySwap": limits.memory,  # memory and swap together: so no swap
        "CpuPeriod": _CPU_PERIOD_MICROSECONDS,
        "CpuQuota": max(_LEAST_QUOTA_MICROSECONDS, math.ceil(limits.cpus * _CPU_PERIOD_MICROSECONDS)),
        "PidsLimit": _KERNEL_PROCESSES + 2 * limits.pids if guest.own_kernel else limits.pids + _OWN_PROCESSES,
        "ShmSize": _SHM_BYTES,
        "Ulimits": [{"Name": name, "Soft": most, "Hard": most} for name, most in _ulimits(guest)],
        "LogConfig": KEPT_LOG if guest.kept else {"Type": "none", "Config": {}},  # else a flood would fill the disk
        "RestartPolicy": {"Name": "no"},
        "Tmpfs": _folders(guest),
        # Without a copy of what the image has there, whose owner and permissions would come along.
        "Binds": [
            f"{name}:{path}:{'ro' if path in guest.locked else 'rw'},nocopy" for name, path in guest.volumes.items()
        ],
    }
    walls |= _changes(options) | _throttle(limits, options.disk)
    if guest.places and not options.network and guest.flavour.names_host_dns:  # not the host's own name servers
        walls |= {"Dns": ["127.0.0.1"], "DnsSearch": ["."]}
    mounts = [_mount(path, place, read_only=False) for path, place in guest.shown.items()]
    if guest.workspace:
        mounts.append(_mount(guest.workspace.path, WORKSPACE, read_only=not guest.workspace.write))
    walls |= {"Mounts": mounts} if mounts else {}
    if guest.runtime:
        walls["Runtime"] = guest.runtime
    if guest.small_buffers:
        walls["Sysctls"] = _SMALL_BUFFERS
    return walls


def _changes(options: Options) -> dict[str, Any]:
    """What the administrator asks for beyond the walls, and nothing where that is nothing."""
    given = {
        "CapAdd": list(options.capabilities), "CpuShares": options.cpu_shares,
        "CpusetCpus": options.cpu_affinity, "BlkioWeight": options.io_weight,
        "Dns": list(options.dns) if options.network else [],
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}


def _throttle(limits: Limits, disk: str) -> dict[str, Any]:
    rates = (("Bps", limits.io_bps), ("IOps", limits.io_iops))
    return {
        f"BlkioDevice{way}{what}": [{"Path": disk, "Rate": most}]
        for what, most in rates if most and disk for way in ("Read", "Write")
    }  # fmt: skip


def _filter(guest: ContainerSpec) -> str:
    """The seccomp profile, by its path or as its text, as the engine wants it."""
    own, by_path = guest.options.profile, guest.flavour.profile_by_path
    if not own:
        return str(PROFILE_PATH) if by_path else profile_text(guest.own_kernel)
    try:
        text = read_profile(own)
    except ValueError as error:  # it was there when the settings were read
        raise errors.NotAvailable(str(error), fix="put it back, or change the setting") from None
    return own if by_path else text


def _ulimits(guest: ContainerSpec) -> Sequence[tuple[str, int]]:
    # gVisor counts a guest's processes itself; the host's limit would strike its kernel, and end the whole sandbox.
    own = (("nproc", guest.limits.pids + _OWN_PROCESSES),) if guest.own_kernel else guest.flavour.ulimits
    return (("core", 0), ("nofile", 1024), *own)


def _folders(guest: ContainerSpec) -> dict[str, str]:
    """Fresh ones for this container, where none are shared. Sticky, so that what the keeper puts in stays."""
    taken = {*guest.volumes.values(), *((WORKSPACE,) if guest.workspace else ())}
    # The image's own volumes among them: the engine would put those on its disk, writable and of any size.
    wanted = ("/tmp", WORKSPACE, *((INPUTS,) if guest.inputs else ()), *guest.declared)
    options = f"rw,nosuid,nodev,exec,mode=1777,size={guest.limits.disk}"
    # An image that has the folder gives ours its permissions. So the keeper owns it, where that can be said, and opens
    # it (`guest/shell/files/lay_and_say.sh`).
    options += f",uid={KEEPER},gid={KEEPER}" if guest.flavour.owned_folders else ""
    options += f",nr_inodes={guest.limits.kept_inodes}" if guest.flavour.counts_files else ""
    fresh = {path: options for path in wanted if path not in taken} | dict(guest.flavour.folders)
    fresh |= {path: _tmpfs(guest, place) for path, place in guest.places.items()}
    return {path: options for path, options in fresh.items() if path not in taken}


def _tmpfs(guest: ContainerSpec, place: GuestFolder) -> str:
    options = f"rw,nosuid,nodev,exec,mode={place.mode:o},size={place.size}"
    options += f",uid={place.uid},gid={group_of(place.uid)}" if guest.flavour.owned_folders else ""
    return options + (f",nr_inodes={guest.limits.kept_inodes}" if guest.flavour.counts_files else "")


def _mount(path: str, place: str, *, read_only: bool) -> dict[str, Any]:
    # Private: what is mounted below a folder later must not appear inside.
    return {
        "Type": "bind", "Source": path, "Target": place, "ReadOnly": read_only,
        "BindOptions": {"Propagation": "rprivate", "CreateMountpoint": False},
    }  # fmt: skip


def volume(
    name: str,
    limits: Limits,
    owner: str,
    run: str,
    *,
    kept: bool = False,
    place: GuestFolder | None = None,
    latest: float = 0.0,
) -> dict[str, Any]:
    """Returns the request body for a folder in memory that several containers share, as large as a box may fill."""
    place = place or GuestFolder(KEEPER, limits.kept_bytes, 0o1777)
    # Podman takes `size` for a quota of its own, which hardly any disk has; the kernel counts blocks just as well.
    blocks = -(-place.size // os.sysconf("SC_PAGE_SIZE"))
    options = f"nr_blocks={blocks},nr_inodes={limits.kept_inodes},mode={place.mode:o},uid={place.uid}"
    options += f",gid={group_of(place.uid)}"
    return {
        "Name": name, "Driver": "local",
        "DriverOpts": {"type": "tmpfs", "device": "tmpfs", "o": f"{options},nosuid,nodev"},
        "Labels": labels(owner, run, kept=kept, latest=latest),
    }  # fmt: skip


def labels(owner: str, run: str, *, kept: bool = False, latest: float = 0.0) -> dict[str, str]:
    """Returns labels that say who made a thing and when, for whoever finds it when we are gone."""
    return {
        LABEL: "1",
        OWNER_LABEL: owner,
        BOOT_LABEL: boot(),
        RUN_LABEL: run,
        CREATED_LABEL: str(int(time.time())),
        USER_LABEL: str(os.geteuid()),
        **({KEPT_LABEL: "1"} if kept else {}),
        **({LATEST_LABEL: str(int(latest))} if latest else {}),
    }


@cache
def boot() -> str:
    """Returns the id of this run of this machine's kernel: elsewhere an owner's name says nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
