"""The wasm worker's program: answers the requests of the host, one after the other, until the host is gone.

It is started inside the native jail with `wasmtime` and the compiled interpreters in reach, and nothing else.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading

from .frames import requests
from .worker import Worker


def main() -> None:
    """Serves the socket on stdin; the only argument is the worker's `Facts`."""
    worker = Worker(json.loads(sys.argv[1]))
    watch = threading.Thread(target=_leave_with_the_host, args=(worker.private,), daemon=True)
    if worker.plain:
        watch.start()
    worker.rest()
    worker.frames.send(ready=True)
    for received in requests(socket.socket(fileno=0)):
        worker.frames.send(done=received.request["run"], **worker.answer(received))
        worker.rest()
    if worker.plain:
        watch.join()  # it removes our folder


def _leave_with_the_host(private: str) -> None:
    """Ends a worker without a jail, which nobody else would end, when the other end of the socket is gone."""
    import shutil

    hangup = select.poll()
    hangup.register(0, getattr(select, "POLLRDHUP", select.POLLHUP))
    hangup.poll()
    shutil.rmtree(private, ignore_errors=True)
    os._exit(1)
