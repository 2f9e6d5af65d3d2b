"""Comes to what is in a container by the host's own hand: where its kernel is the host's, and we are root.

Nothing runs inside for that, and nothing that a guest says is believed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import anyio.to_thread
from anyio.abc import ByteStream

from belljar.backends.containers import spec
from belljar.core import errors
from belljar.core.process import BoxProcess
from belljar.host import cgroups, files
from belljar.host.box_network import BoxNetwork
from belljar.host.box_tree import HostTree
from belljar.host.process_table import described, namespace

_MOST = 10_000  # processes that are listed


class AccessFromHost:
    """A `MachineAccess` through the first process of a container that runs on this host's kernel."""

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


@contextmanager
def shared_tree(group: cgroups.Group, uid: int, writable: Sequence[str]) -> Iterator[HostTree]:
    """Opens the files of a container whose kernel is none of the host's, but whose folders lie on the host.

    Such a runtime has a process that comes to them for the guest, and sees them as the guest does: gVisor's gofer.

    Args:
        group: the container's control group.
        uid: the guest's.
        writable: the folders that the guest may write to.

    Raises:
        NotAvailable: no process of the runtime sees those folders.
    """
    with ExitStack() as stack:
        for pid in group.pids()[:_MOST]:
            with suppress(OSError):
                root = stack.enter_context(files.opened(f"/proc/{pid}/root"))
                if all(_is_folder_of(root, place, uid) for place in writable):
                    yield HostTree(root, writable, owner=uid)
                    return
        raise errors.NotAvailable("the folders of this runtime's containers cannot be seen from the host")


def _is_folder_of(root: int, place: str, uid: int) -> bool:
    """Whether it is a folder of the guest's, mounted below this root."""
    *above, name = place.strip("/").split("/")
    with files.descended(root, above) as folder:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == uid and facts.st_dev != os.fstat(root).st_dev


def can_reach(first: int, group: cgroups.Group | None, *, own_kernel: bool) -> bool:
    """Whether this host's own hand reaches into a container: we are root, and a user has the same number there."""
    if group is None or os.geteuid() != 0:
        return False
    here = namespace(os.getpid(), "user")
    return own_kernel or (here != "" and namespace(first, "user") == here)


def _owner(pid: int) -> int:
    """The uid by which a process comes to files, or -1."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1
