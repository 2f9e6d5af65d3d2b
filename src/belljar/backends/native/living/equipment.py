"""What a living sandbox finds on its PATH: the host's toolchains, all of them, and a granted Python environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from belljar.backends.native.living.walls import PROGRAMS
from belljar.backends.native.toolchains import Grant, Toolchains
from belljar.core.plan import Plan

_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
# Root inside has one uid and no capability: tar cannot unpack for other owners, and so does not try; pip need not warn.
_AS_ROOT = {"TAR_OPTIONS": "--no-same-owner", "PIP_ROOT_USER_ACTION": "ignore"}


class Equipment(NamedTuple):
    """Programs and variables that every command of a living sandbox has."""

    grants: tuple[str, ...]  # folders of the host
    links: Mapping[str, str]  # names for programs -> where they are
    env: Mapping[str, str]
    binds: Mapping[str, str]  # folders of the host that are elsewhere inside: inside -> outside

    @classmethod
    def find(cls, toolchains: Toolchains, plan: Plan, packages: Grant | None) -> Equipment:
        """Looks for what this host has."""
        tools = toolchains.all()
        python = tools.get("python3")
        links = {} if python is None or toolchains.find("python") else {"python": python.path}
        grants = [tool.folder for tool in tools.values() if tool.folder]
        bins = [os.path.dirname(tool.path) for tool in tools.values() if tool.folder]
        env = {
            "HOME": plan.home, "USER": plan.user, "LOGNAME": plan.user, "LANG": "C.UTF-8", "TMPDIR": "/tmp",
            "SHELL": "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh",
            "npm_config_prefix": f"{plan.home}/.local", "PIP_BREAK_SYSTEM_PACKAGES": "1",
        }  # fmt: skip
        if plan.user == "root":
            env |= _AS_ROOT
        if packages:
            grants += packages.folders
            bins[:0] = packages.bins
            env |= packages.env
        path = (f"{plan.home}/.local/bin", *dict.fromkeys(bins), *_PATH, *([PROGRAMS] if links else []))
        binds = packages.binds if packages else {}
        return cls(_outermost(grants), links, env | {"PATH": ":".join(path)}, binds)


def _outermost(folders: list[str]) -> tuple[str, ...]:
    """Without those that lie in another."""
    return tuple(
        folder
        for folder in dict.fromkeys(folders)
        if not any(folder != other and folder.startswith(f"{other}/") for other in folders)
    )
