"""The TCP ports of a living sandbox: waited for, and connected to without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from belljar.core.options import check_port, check_seconds

if TYPE_CHECKING:
    from belljar.living.machine import LivingMachine

_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.02, 0.25  # between two looks: they become rarer
_READ_BYTES = 64 * 1024


async def wait_for(machine: LivingMachine, port: int, timeout: float) -> None:
    """Waits until something in the sandbox listens on a port.

    Raises:
        TimeoutError: nothing does after so many seconds.
    """
    check_port(port)
    check_seconds(timeout=timeout)
    pause = _FIRST_LOOK_SECONDS
    try:
        with anyio.fail_after(timeout):
            while not await machine.box.listens(port):
                await anyio.sleep(pause)
                pause = min(pause * 1.5, _LAST_LOOK_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"nothing listens on port {port} after {timeout:g} seconds") from None


async def dialled(machine: LivingMachine, port: int) -> ByteStream:
    """Connects to a port of the sandbox's own loopback."""
    check_port(port)
    machine.require("dial", "cannot reach the ports of a sandbox")
    return await machine.box.dial(port)
