"""Keeps what a probe proved, so that the next process on this machine need not prove it again.

An entry counts for one day and for one state of the machine: its name is a hash of everything the proof depends on, so
another boot, kernel, user, control group, security label, bubblewrap or Belljar looks for another entry. Entries lie in
a folder of the user's own; one that somebody else could have written, or that cannot be read, is as good as none.
`docs/decisions/0013-a-probe-is-remembered.md` says what is given up.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.backends.base import Rememberable
from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.version import __version__
from belljar.host import own_files

LIFETIME_SECONDS = 24 * 3600.0
_MAX_ENTRY_BYTES = 1 << 20
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_STATUS = ("Cap", "NoNewPrivs:", "Seccomp")  # lines of /proc/self/status by how they begin
_SYSCTLS = (
    "kernel/unprivileged_userns_clone", "kernel/apparmor_restrict_unprivileged_userns", "user/max_user_namespaces",
)  # fmt: skip


class ProbeCache:
    """The probes that processes of this user kept in one folder."""

    def __init__(self, folder: Path, *, recalls: bool = True) -> None:
        """Keeps entries in `folder`, which is made if need be.

        Args:
            folder: must be ours, and nobody else's to write to.
            recalls: False: nothing is recalled and all is kept, so that everything is proved anew.
        """
        self._folder = folder
        self._recalls = recalls

    def recall(self, backend: Rememberable) -> Capabilities | None:
        """Returns what an earlier process proved of this backend, which then is as if it had been probed.

        Returns:
            None where nothing is known, where it is too old, or where it no longer holds.
        """
        if not self._recalls:
            return None
        try:
            entry = _read(self._path(backend))
            if not 0 <= time.time() - entry["at"] < LIFETIME_SECONDS:
                return None
            capabilities = Capabilities.model_validate(entry["capabilities"])
            backend.recall(entry["found"])
        except (errors.BelljarError, OSError, ValueError, KeyError, TypeError):
            return None
        return capabilities if capabilities.available and capabilities.backend == backend.name else None

    def keep(self, backend: Rememberable, capabilities: Capabilities) -> None:
        """Keeps what a probe has just proved; a backend that does not work, or a folder that is not ours, is left."""
        if not capabilities.available:
            return
        entry = {"at": time.time(), "capabilities": capabilities.model_dump(mode="json"), "found": backend.found()}
        with suppress(errors.BelljarError, OSError):
            path = self._path(backend)
            self._remove_old()
            own_files.write(path, json.dumps(entry).encode())

    def forget(self, backend: Rememberable) -> None:
        with suppress(errors.BelljarError, OSError):
            self._path(backend).unlink(missing_ok=True)

    def _path(self, backend: Rememberable) -> Path:
        own_files.check_folder(self._folder)
        facts = {"machine": _machine(), "backend": backend.depends_on()}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{backend.name}-{digest[:32]}.probe"

    def _remove_old(self) -> None:
        for path in self._folder.glob("*.probe"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > LIFETIME_SECONDS:
                    path.unlink()


def _read(path: Path) -> dict[str, Any]:
    """Reads an entry; raises OSError or ValueError where there is none, or where it is not ours alone."""
    entry = json.loads(own_files.read(path, _MAX_ENTRY_BYTES))
    if not isinstance(entry, dict):
        raise ValueError(f"{path} is no entry")
    return entry


def _machine() -> Mapping[str, Any]:
    """Everything about this boot, this user and this process that may decide what a sandbox can do."""
    kernel = os.uname()
    status = _text("/proc/self/status").splitlines()
    return {
        "belljar": __version__,
        "python": [sys.executable, sys.version],
        "kernel": [kernel.sysname, kernel.release, kernel.version, kernel.machine],
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "user": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "namespaces": [os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES],
        "status": [line for line in status if line.startswith(_STATUS)],
        "label": _text("/proc/self/attr/current"),
        "groups": _text("/proc/self/cgroup"),
        "sysctls": [_text(f"/proc/sys/{name}") for name in _SYSCTLS],
    }


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""
