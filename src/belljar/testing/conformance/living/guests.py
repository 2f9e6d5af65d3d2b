"""Guests that several checks of living sandboxes start, each with its twin."""

from __future__ import annotations

import anyio
from anyio.abc import ByteStream

from belljar.backends.fake import FakeProcess, Program
from belljar.testing.conformance.bench import guest

PORT = 8000


def python(code: str, twin: Program) -> tuple[str, ...]:
    """A guest in Python, as a command; what it prints is not held back."""
    return guest(("python3", "-S", "-u", "-c", code), twin)


async def forever(p: FakeProcess) -> None:
    """Plays what goes on until it is ended."""
    await p.sleep(3600)


async def _cat(p: FakeProcess) -> None:
    while piece := await p.receive():
        await p.out(piece)


LASTING = guest(("sleep", "3600"), forever)
CAT = guest(("cat",), _cat)


async def _play_ready(p: FakeProcess) -> None:
    await p.out("ready\n")
    await forever(p)


READY = guest("echo ready; exec sleep 3601", _play_ready)


async def _play_trap(p: FakeProcess) -> int:
    over = anyio.Event()
    p.on_signal(15, over.set)
    await p.out("ready\n")
    await over.wait()
    await p.out("bye\n")
    return 7


TRAP = python(
    "import signal, sys\n"
    "def leave(*_):\n"
    "    print('bye')\n"
    "    sys.exit(7)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('ready')\n"
    "while True:\n"
    "    signal.pause()",
    _play_trap,
)


async def _play_server(p: FakeProcess) -> None:
    async def answer(stream: ByteStream) -> None:
        while line := await stream.receive():
            await stream.send(p.env.get("NAME", "").encode() + line.upper())

    p.listen(PORT, answer)
    await forever(p)


SERVER = python(
    "import os, socket\n"
    f"listener = socket.create_server(('127.0.0.1', {PORT}))\n"
    "while True:\n"
    "    connection, _ = listener.accept()\n"
    "    with connection, connection.makefile('rb') as lines:\n"
    "        for line in lines:\n"
    "            connection.sendall(os.environ.get('NAME', '').encode() + line.upper())",
    _play_server,
)
