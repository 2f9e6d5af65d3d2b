"""What Belljar asks a container engine for, for tests of who stands in between."""

from __future__ import annotations

from typing import Any

from belljar.backends import docker_spec
from belljar.backends.docker_engine import DOCKER
from belljar.models import Limits


def body(**guest: Any) -> dict[str, Any]:
    """What Belljar itself would send."""
    facts = {"flavour": DOCKER, "image": "i", "argv": ("true",), "uid": 12345, "limits": Limits(), "owner": "o"}
    return docker_spec.container(docker_spec.Guest(**facts | {"run": "r"} | guest))
