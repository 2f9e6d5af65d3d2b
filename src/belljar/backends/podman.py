"""Podman: the same API at another socket."""

from __future__ import annotations

from belljar.backends.docker import Containers
from belljar.backends.docker_engine import podman_address
from belljar.settings import Settings


def create(settings: Settings) -> Containers:
    return Containers(podman_address(settings.podman_socket), settings)
