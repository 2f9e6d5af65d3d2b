"""What Belljar asks a container engine for, for tests of who stands in between."""

from __future__ import annotations

from typing import Any

from belljar.backends.containers import spec
from belljar.core.request import Limits
from belljar.host.engine_address import DOCKER


def body(**guest: Any) -> dict[str, Any]:
    """What Belljar itself would send."""
    facts = {"flavour": DOCKER, "image": "i", "argv": ("true",), "uid": 12345, "limits": Limits(), "owner": "o"}
    return spec.container(spec.ContainerSpec(**facts | {"run": "r"} | guest))


def told(name: str, path: str = "", value: Any = None) -> dict[str, Any]:
    """What an engine says of such a container, with one field otherwise."""
    asked = body()
    facts: dict[str, Any] = {"Id": name, "Config": asked, "HostConfig": asked.pop("HostConfig"), "Mounts": []}
    facts["HostConfig"] |= {"PidMode": "", "UTSMode": "", "Devices": []}
    if path:
        *folders, last = path.split(".")
        place = facts
        for folder in folders:
            place = place[folder]
        place[last] = value
    return facts
