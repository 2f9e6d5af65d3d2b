"""What a living box of a container engine can be asked from outside: its files, processes and ports."""

from __future__ import annotations

from typing import Protocol

from anyio.abc import ByteStream

from belljar.control.box_tree import BoxTree
from belljar.core.process import BoxProcess


class MachineAccess(Protocol):
    """One way to come to what is in a container: by the host's own hand, or by programs that run in it."""

    @property
    def tree(self) -> BoxTree:
        """The files, by whole paths."""
        ...

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs, but for what is ours: our own user's, and whose parent is outside, started by the engine."""
        ...

    async def listens(self, port: int) -> bool:
        """Whether something listens on a TCP port."""
        ...

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the loopback."""
        ...
