"""Callers that flood a service until they are killed: `flooder.py URL KIND KEY...`, one caller for each key.

The kinds: `output` (runs that print 250 MB to both streams), `bodies` (five half-sent ones of 60 MB each), `sessions`
(opened, made to print, closed), `files` (16 MB written into a session and read back), `queue` (runs that only wait).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx2

_PAUSE_SECONDS = 0.05  # after a refusal: a caller that is told "later" and hardly listens
_PRINT = """import os
for _ in range({blocks}):
    for stream in (1, 2):
        rest = memoryview((b"x" * 99 + b"\\n") * 10_000)
        while rest:
            rest = rest[os.write(stream, rest):]
"""
_LIMIT = 16 * 1024 * 1024


def flood_output(http: httpx2.Client, key: str) -> None:
    """250 MB to both streams, of which as much is kept as one may ask for."""
    body = {"code": _PRINT.format(blocks=250), "backend": "native", "limits": {"output": _LIMIT}}
    _refused(http.post("/api/sandbox/execute", json=body))


def flood_bodies(http: httpx2.Client, key: str) -> None:
    """Five bodies that never end, for a while."""
    part = b'{"code": "' + b"x" * 60_000_000
    with ExitStack() as stack:
        for _ in range(5):
            line = stack.enter_context(socket.create_connection((http.base_url.host, http.base_url.port), timeout=10))
            head = f"POST /api/sandbox/execute HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(part) + 100}\r\n\r\n"
            with suppress(OSError):
                line.sendall(head.encode() + part)
        time.sleep(1)


def flood_sessions(http: httpx2.Client, key: str) -> None:
    """A session that prints ten megabytes and is closed."""
    opened = http.post("/api/sandbox/sessions", json={"kind": "session", "backend": "native"})
    if _refused(opened):
        return
    path = f"/api/sandbox/sessions/{opened.json()['id']}"
    http.post(f"{path}/run", json={"code": "for _ in range(100_000): print('x' * 99)"})
    http.delete(path)


def flood_files(http: httpx2.Client, key: str) -> None:
    """Sixteen megabytes into a session, and out of it."""
    opened = http.post("/api/sandbox/sessions", json={"kind": "sandbox", "backend": "native"})
    if _refused(opened):
        return
    id = opened.json()["id"]
    for number in range(4):
        _refused(http.put(f"/api/sandbox/{id}/files/{number}", content=b"x" * _LIMIT))
        _refused(http.get(f"/api/sandbox/{id}/files/{number}"))
    http.delete(f"/api/sandbox/sessions/{id}")


def flood_queue(http: httpx2.Client, key: str) -> None:
    """Runs that nobody waits for, one after the other."""
    body = {"code": "import time; time.sleep(1)", "backend": "native", "wait": False}
    _refused(http.post("/api/sandbox/execute", json=body))


KINDS: dict[str, Callable[[httpx2.Client, str], None]] = {
    "output": flood_output, "bodies": flood_bodies, "sessions": flood_sessions, "files": flood_files,
    "queue": flood_queue,
}  # fmt: skip


def _refused(answer: httpx2.Response) -> bool:
    if answer.is_success:
        return False
    time.sleep(_PAUSE_SECONDS)
    return True


def flood(url: str, kind: str, key: str) -> None:
    """One caller, for ever."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=120) as http:
        while True:
            try:
                KINDS[kind](http, key)
            except httpx2.HTTPError:
                time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    address, wanted, *keys = sys.argv[1:]
    os.nice(19)  # its CPU would be another machine's
    assert urlsplit(address).hostname and wanted in KINDS, __doc__
    for one in keys:
        threading.Thread(target=flood, args=(address, wanted, one), daemon=True).start()
    threading.Event().wait()
