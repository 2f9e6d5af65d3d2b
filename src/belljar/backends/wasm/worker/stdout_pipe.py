"""The guest's stdout as a named pipe: wasmtime writes into it by itself, and the worker reads it now and then.

A call of ours for each piece that a guest prints (four for `print("line", i)`) costs thirty times what the print does.
The guest's own streams stay unbuffered, so that nothing is lost with a guest that is stopped, and nothing waits in a
guest that prints and then computes: the pipe is read at every tick of the watchdog, before anything else is told, and
when the guest has ended.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PIPE_BYTES = 1 << 20  # that a guest can print before it has to wait for us, where the system allows it
_READ_BYTES = 1 << 17
_MOST_READS = _PIPE_BYTES // _READ_BYTES + 1  # that all of a full pipe takes
_SET_SIZE = 1031  # Linux's F_SETPIPE_SZ


class StdoutPipe:
    """A named pipe in the worker's own folder. It is made once, and empty between two guests."""

    def __init__(self, folder: str, take: Callable[[bytes], None]) -> None:
        """`take`: is called with what was read, in order."""
        self.path: str = f"{folder}/.stdout"
        self._take = take
        self._lock = threading.Lock()  # from a read to the end of its `take`: two readers would swap pieces
        os.mkfifo(self.path, 0o600)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._writer = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # else a read between two guests says "the end"
        _enlarge(self._fd)

    def drain(self) -> None:
        """Reads all that was written before this call."""
        with self._lock:
            for _ in range(_MOST_READS):  # a guest that prints on meanwhile must not keep us here
                if data := self._read():
                    self._take(data)
                if len(data) < _READ_BYTES:
                    return

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return b""


def _enlarge(fd: int) -> None:
    import fcntl

    try:
        fcntl.fcntl(fd, _SET_SIZE, _PIPE_BYTES)
    except OSError:  # not Linux, or this user has many pipes: the usual size does, with more waiting
        return
