"""Podman: the same API at another socket."""

from __future__ import annotations

from belljar.backends.containers.backend import Containers
from belljar.core.languages import Languages
from belljar.core.settings import Settings
from belljar.host.engine_address import podman_address


def create(settings: Settings, languages: Languages | None = None) -> Containers:
    return Containers(podman_address(settings.podman_socket), settings, languages)
