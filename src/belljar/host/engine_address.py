"""Where container engines listen, and what differs between Docker and Podman: one row of data each."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from belljar.core.settings import Settings

DEFAULT_SOCKET = "/var/run/docker.sock"
_CONNECT_SECONDS = 5


class Flavour(NamedTuple):
    """What differs from one engine to the other; both speak Docker's API."""

    name: str
    start: str  # how to get it running
    init: str = ""  # how to get the init that reaps zombies, where it is a package of its own
    profile_by_path: bool = False  # does it want the seccomp profile's path, instead of its text?
    one_runtime: bool = False  # does its API ignore which runtime a container asks for?
    counts_files: bool = True  # can the number of files in a fresh folder be limited?
    owned_folders: bool = True  # can it be told whose a fresh folder is?
    names_host_dns: bool = False  # does it tell a container without a network which name servers the host has?
    ulimits: tuple[tuple[str, int], ...] = ()
    folders: tuple[tuple[str, str], ...] = ()


DOCKER = Flavour(
    "docker", "start it (systemctl start docker), or set DOCKER_SOCKET_PATH or DOCKER_HOST", names_host_dns=True
)
PODMAN = Flavour(
    "podman",
    "start it (podman system service --time=0), or set CONTAINER_HOST",
    init="apt install catatonit",
    profile_by_path=True,
    one_runtime=True,
    counts_files=False,  # it knows no such option; what files cost counts as memory, and goes with the container
    owned_folders=False,
    # Its own default is over what an ordinary host lets it set. Our limit on processes is the control group's.
    ulimits=(("nproc", 16_384),),
    # Under a read-only root it would make these writable, each of any size.
    folders=(("/run", "ro,size=64k"), ("/var/tmp", "ro,size=64k")),
)
FLAVOURS = {flavour.name: flavour for flavour in (DOCKER, PODMAN)}


class EngineAddress(NamedTuple):
    """Where an engine listens; the version of its API is known once it has answered."""

    flavour: Flavour
    url: str = ""  # empty: aiodocker looks for the current context, then for the usual sockets
    version: str = "auto"
    outside: bool = False  # is it outside of the container that we are in? Known once it has answered, too

    @property
    def local(self) -> bool:
        """Whether the engine sees the folders and processes that we see."""
        return not self.outside and (not self.url or self.url.startswith("unix://"))

    def __str__(self) -> str:
        return self.url or f"{DEFAULT_SOCKET} or the current context"


def engine_address(name: str, settings: Settings) -> EngineAddress:
    """Returns where the settings say that an engine listens.

    Args:
        name: `docker` or `podman`.
        settings: Belljar's settings.
    """
    return podman_address(settings.podman_socket) if name == PODMAN.name else docker_address(settings.docker_socket)


def docker_address(place: str) -> EngineAddress:
    """Returns Docker's address; the settings' default leaves room for a context of Docker's own."""
    if place == DEFAULT_SOCKET:
        return EngineAddress(DOCKER, f"unix://{place}" if Path(place).exists() else "")
    return EngineAddress(DOCKER, _url(place))


def podman_address(place: str) -> EngineAddress:
    """Returns Podman's address; an empty place means the usual socket of this user."""
    mine = f"/run/user/{os.geteuid()}/podman/podman.sock" if os.geteuid() else "/run/podman/podman.sock"
    return EngineAddress(PODMAN, _url(place or mine))


def _url(place: str) -> str:
    return f"unix://{place}" if place.startswith("/") else place


def is_outside(url: str) -> bool:
    """Says whether whoever listens at a socket is in no pid namespace of ours: then the kernel gives its pid as 0."""
    if not url.startswith("unix://") or not hasattr(socket, "SO_PEERCRED"):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_CONNECT_SECONDS)
        line.connect(url.removeprefix("unix://"))
        return int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder) == 0
    return False
