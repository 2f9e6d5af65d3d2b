"""The way out of a container that was granted hosts: a second container, in the network of the first and no other.

The guest's own container keeps its empty network: a loopback, no route, no name service. On that loopback the second
one listens (`guest/egress_relay.py`), and carries what it hears to a socket of ours, where the filtering proxy answers.
Of the two only the second can see that socket.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio

from belljar.backends.containers import spec
from belljar.backends.containers.cleanup import Cleanup, Leftovers
from belljar.backends.containers.standby import Standby
from belljar.backends.guest_text import python_program
from belljar.core import errors
from belljar.core.request import Limits
from belljar.core.values import KIB, MIB
from belljar.host import ownership
from belljar.host.egress.guest import PORT
from belljar.host.engine_address import Flavour

if TYPE_CHECKING:
    from aiodocker import Docker

_SUFFIX = ".sock"
LONGEST_FOLDER_BYTES = 56  # a socket's path has at most 107, and its name an owner's and a number
_INSIDE = "/belljar.sock"
_LIMITS = Limits(memory=128 * MIB, pids=16, disk=64 * KIB)
_OPENING_SECONDS = 30.0


class EgressRelay(NamedTuple):
    """What it takes to start a relay; each run has its own."""

    client: Docker
    flavour: Flavour
    cleanup: Cleanup
    image: str  # any that has Python
    owner: str
    run: str
    folder: Path  # where the socket goes
    runtime: str | None = None  # the guest's

    @asynccontextmanager
    async def open(self, guest: Standby) -> AsyncIterator[socket.socket]:
        """Starts the relay, and yields a listening socket that hears whatever the guest says to its proxy."""
        name = f"{self.run}-egress-{secrets.token_hex(4)}"
        path = self.folder / f"{self.owner}-{secrets.token_hex(4)}{_SUFFIX}"
        standby: Standby | None = None
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(str(path))
                path.chmod(0o666)  # the folder is ours alone, and only one container is shown the file
                listener.listen(64)
                standby = await Standby.create(self.client, name, self._body(guest, path))
                await standby.start(local=False)
                await self._wait_for(standby)
                yield listener
            finally:
                if standby:
                    await standby.close()
                self.cleanup.remove_later(Leftovers([name]))
                path.unlink(missing_ok=True)

    def _body(self, beside: Standby, path: Path) -> dict[str, object]:
        argv = ("python3", "-I", "-S", "-c", python_program("egress_relay"), str(PORT), _INSIDE)
        guest = spec.ContainerSpec(
            self.flavour, self.image, argv, spec.KEEPER, _LIMITS, self.owner, self.run,
            runtime=self.runtime, beside=str(beside.container.id), shown={str(path): _INSIDE},
        )  # fmt: skip
        return spec.container(guest)

    async def _wait_for(self, standby: Standby) -> None:
        said = {"stdout": b"", "stderr": b""}
        with anyio.move_on_after(_OPENING_SECONDS):
            async for name, data in standby.streams.parts():
                said[name] += data
                if said["stdout"].startswith(b"open\n"):
                    return
        words = said["stderr"].decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise errors.StartFailed(
            f"the relay to the listed hosts could not be started: {words[-1][:300]}",
            fix=f"the image {self.image} must have python3: set container.images.execution",
        )


def reap(folder: Path) -> None:
    """Removes the sockets of dead owners."""
    for path in folder.glob(f"*{_SUFFIX}"):
        if ownership.is_dead(path.name.removesuffix(_SUFFIX).rpartition("-")[0]):
            with suppress(OSError):
                path.unlink()
