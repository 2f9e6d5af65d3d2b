"""A process that keeps namespaces and their mounts alive, and does nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

import anyio

from belljar.core import errors
from belljar.host import process

_START_SECONDS = 10.0


class Holder(NamedTuple):
    """A holder: its pid on the host, and bubblewrap, which ends with it."""

    pid: int
    bubblewrap: process.Child


@asynccontextmanager
async def held(
    before: Sequence[str], bubblewrap: str, arguments: Sequence[str], fds: Sequence[int] = ()
) -> AsyncIterator[Holder]:  # fmt: skip
    """Starts a holder, and gives it once it has said that it is ready; it ends with the block, and with us.

    Args:
        before: the command line before bubblewrap.
        bubblewrap: its program.
        arguments: its arguments, with the holder's command.
        fds: the descriptors that they name.

    Raises:
        StartFailed: it did not get ready.
    """
    ready_read, ready_write = os.pipe()
    status_read, status_write = os.pipe()
    hold_read, hold_write = os.pipe()
    with ExitStack() as ours:
        for fd in (ready_read, status_read, hold_write):
            ours.callback(os.close, fd)
        try:
            line = [*before, bubblewrap, "--json-status-fd", str(status_write), *arguments]
            child = process.Child(
                line, stdin=hold_read, stdout=ready_write, stderr=ready_write, fds=(status_write, *fds)
            )
        finally:
            for fd in (ready_write, status_write, hold_read):
                os.close(fd)
        try:
            # Shielded: bubblewrap that is killed before it has let its child go leaves the child waiting for ever.
            with anyio.fail_after(_START_SECONDS, shield=True):
                said = await process.read_some(ready_read)
                status = await process.read_some(status_read)
            if not said.startswith(b"ready"):
                raise errors.StartFailed(f"the sandbox's folders could not be made: {said.decode(errors='replace')}")
            yield Holder(json.loads(status.splitlines()[0])["child-pid"], child)
        finally:
            child.kill()
            with anyio.CancelScope(shield=True):
                await child.wait()
