"""Comes to what is in a container by the host's own hand: where its kernel is the host's, and we are root.

Nothing runs inside for that, and nothing that a guest says is believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import anyio.to_thread
from anyio.abc import ByteStream

from belljar.backends.containers import spec
from belljar.core.process import BoxProcess
from belljar.host import cgroups, files
from belljar.host.box_network import BoxNetwork
from belljar.host.box_tree import HostTree
from belljar.host.process_table import described, namespace

_MOST = 10_000  # processes that are listed


class AccessFromHost:
    """Files, processes and ports of a container that runs on this host's kernel, through its first process."""

    def __init__(self, group: cgroups.Group, network: BoxNetwork, tree: HostTree, root: int) -> None:
        self.tree: HostTree = tree
        self.network = network
        self.root = root
        self._group = group

    @classmethod
    @contextmanager
    def opened(
        cls, first: int, group: cgroups.Group, uid: int, writable: Sequence[str]
    ) -> Iterator[AccessFromHost]:  # fmt: skip
        """Opens what is needed, so that it stays the container's whatever becomes of the first process' number.

        Args:
            first: the container's first process.
            group: its control group.
            uid: the guest's.
            writable: the folders that the guest may write to.

        Raises:
            OSError: the container has ended.
        """
        with ExitStack() as stack:
            root = stack.enter_context(files.opened(f"/proc/{first}/root"))
            network = stack.enter_context(BoxNetwork.of(first))
            if first not in group.pids():
                raise ProcessLookupError(first, "the container has ended")
            yield cls(group, network, HostTree(root, writable, owner=uid), root)

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs."""
        return await anyio.to_thread.run_sync(self._processes)

    def _processes(self) -> tuple[BoxProcess, ...]:
        found = []
        for pid in self._group.pids()[:_MOST]:
            with suppress(OSError, ValueError, IndexError, KeyError):
                if _owner(pid) != spec.KEEPER and (one := described(pid)) and one.parent:
                    found.append(one)
        return tuple(sorted(found, key=lambda one: one.pid))

    async def listens(self, port: int) -> bool:
        """Whether something listens on a TCP port."""
        return await anyio.to_thread.run_sync(self.network.listens, port)

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the loopback."""
        return await self.network.dial(port)


def can_reach(first: int, group: cgroups.Group | None) -> bool:
    """Whether this host's own hand reaches into a container: we are root, and a user has the same number there."""
    here = namespace(os.getpid(), "user")
    return group is not None and os.geteuid() == 0 and here != "" and namespace(first, "user") == here


def _owner(pid: int) -> int:
    """The uid by which a process comes to files, or -1."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1
