"""The terminal that a person sits at, lent to a program in a sandbox: raw keys in, raw output out, then as it was.

What a program prints acts on this terminal, as that of a machine one has logged in to does. Nothing of it is trusted:
settings and modes are put back at the end, whatever the program did to them.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import anyio
import anyio.lowlevel

from belljar.core import errors
from belljar.core.process import PtySize

_READ_BYTES = 64 * 1024
# Normal screen, cursor shown, keys and pastes as usual, no mouse, no colours, the usual characters.
_AS_USUAL = b"\x1b[?47l\x1b[?25h\x1b[?1l\x1b>\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[0m\x1b(B\x0f"
_OURS = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC


class RawTerminal:
    """Our own terminal. It is opened once more, so that no other program's reads and writes are changed by ours."""

    def __init__(self, fd: int) -> None:
        """`fd`: the terminal, opened without blocking."""
        self._fd = fd

    @property
    def size(self) -> PtySize:
        """How large it is now."""
        columns, rows = os.get_terminal_size(self._fd)
        return PtySize(columns=min(max(columns, 1), 4096), rows=min(max(rows, 1), 4096))

    async def keys(self) -> AsyncIterator[bytes]:
        """Gives what is typed, until the terminal is hung up."""
        while True:
            await anyio.wait_readable(self._fd)
            try:
                typed = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not typed:
                return
            yield typed

    async def show(self, output: bytes) -> None:
        """Writes what a program printed, as it is; waits while the terminal is held."""
        left = memoryview(output)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._fd)
        await anyio.lowlevel.checkpoint()

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Passes all keys on while the block runs, Ctrl-C too; puts the terminal back however the block ends."""
        before = termios.tcgetattr(self._fd)
        try:
            tty.setraw(self._fd, termios.TCSANOW)
            yield
        finally:
            with suppress(OSError, termios.error):  # it may be gone
                os.write(self._fd, _AS_USUAL)
            stopped = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as we may be in the background by now
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, before)
            signal.signal(signal.SIGTTOU, stopped)


@contextmanager
def own_terminal() -> Iterator[RawTerminal | None]:
    """Opens the terminal that standard input and output are; None if they are not one."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        yield None
        return
    fd = _open(sys.stdin.fileno())
    try:
        yield RawTerminal(fd)
    finally:
        os.close(fd)


def _open(terminal: int) -> int:
    """Opens the terminal behind a descriptor once more; by its other name where it is somebody else's, as after su."""
    for name in (os.ttyname, lambda fd: "/dev/tty"):
        with suppress(OSError):
            return os.open(name(terminal), _OURS)
    raise errors.NotAvailable("this terminal cannot be opened by its name", fix="belljar exec -- COMMAND")
