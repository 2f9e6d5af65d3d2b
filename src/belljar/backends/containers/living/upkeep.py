"""Lets a living box go on for a while when its server has ended, and no longer.

The container's first program waits on a pipe inside that no guest can open. The server has it open from outside, and so
has a program inside that sleeps, which is renewed: when the server has gone, the container ends with that program.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio

from belljar.backends.guest_text import shell_script
from belljar.core import errors
from belljar.core.plan import INPUTS
from belljar.host import files

PIDS = 3  # the first program's sleep, and two of ours, the old one and the new
_NAME = ".belljar-alive"
_HOLD = shell_script("containers/hold_alone")
_SLEEP = 'sleep "$1" >"$0" 2>/dev/null </dev/null &'
_LOOK_SECONDS = 2.0
_OPEN_SECONDS = 20.0
_OPEN_LOOK_SECONDS = 0.02
_NOTICE_SECONDS = 1.0  # by which a shorter life is told apart from the old one

Say = Callable[[list[str]], Awaitable[object]]  # runs a program of ours in the container


def hold(absence: float) -> tuple[str, ...]:
    """Returns the first program of a container that goes on without its server; for how long, at least."""
    return ("/bin/sh", "-c", _HOLD, f"{INPUTS}/{_NAME}", _seconds(2 * absence))


@contextmanager
def _opened(root: int) -> Iterator[int]:
    with files.descended(root, INPUTS.strip("/").split("/")) as folder:
        fd = os.open(_NAME, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


class Upkeep:
    """Looks after one box. Its life without us is between `absence` and twice that, but ends with its time."""

    def __init__(self, absence: float, life: Callable[[], float | None], say: Say) -> None:
        self._absence = absence
        self._life = life
        self._say = say
        self._until = -math.inf  # until when the box lives on by itself

    async def hold(self, root: int, stack_enter: Callable[..., object]) -> None:
        """Opens the pipe, and keeps it open; `root`: the container's, `stack_enter`: says for how long.

        Raises:
            StartFailed: its first program has not made it.
        """
        deadline = anyio.current_time() + _OPEN_SECONDS
        while True:
            try:
                stack_enter(_opened(root))
                return
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENXIO) or anyio.current_time() > deadline:
                    raise errors.StartFailed(f"the container does not wait for us: {error.strerror}") from None
            await anyio.sleep(_OPEN_LOOK_SECONDS)

    async def renew(self) -> None:
        """Renews the box's life for as long as the task runs; what fails is tried again."""
        while True:
            life = self._life()
            wanted = time.monotonic() + (2 * self._absence if life is None else min(2 * self._absence, max(life, 0.0)))
            bounded = life is not None and life < 2 * self._absence
            if wanted - self._until > (_NOTICE_SECONDS if bounded else self._absence):
                with suppress(errors.BelljarError, OSError):  # it is paused, or full of processes
                    seconds = _seconds(wanted - time.monotonic())
                    await self._say(["/bin/sh", "-c", _SLEEP, f"{INPUTS}/{_NAME}", seconds])
                    self._until = wanted
            await anyio.sleep(min(_LOOK_SECONDS, self._absence / 4))


def _seconds(number: float) -> str:
    return str(max(1, math.ceil(number)))
