"""Ports for servers that are started, killed and started again on the same one."""

from __future__ import annotations

import os
import socket
from itertools import count

# Below those that the kernel hands out, and apart for each process of the tests: nobody else takes one in between.
_FIRST, _EACH = 20_000, 3_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUMBERS = count(os.getpid() % 1000)


def free_port() -> int:
    """A port of loopback on which nobody listens, and which no other call returns soon."""
    while True:
        port = _FIRST + _WORKER * _EACH + next(_NUMBERS) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
