"""TCP ports of a living sandbox: waited for, dialled, its own."""

from __future__ import annotations

from contextlib import suppress

import anyio
from anyio.abc import ByteStream

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest
from belljar.sandbox import AsyncSandbox
from belljar.testing.conformance.bench import Bench, check, equal, printed, refused
from belljar.testing.conformance.living.guests import PORT, SERVER, python
from belljar.testing.conformance.living.waiting import SECONDS

_AREA = "ports"
_DIAL = ("living", "dial")


async def _asked(box: AsyncSandbox, words: bytes) -> bytes:
    """What the server of a sandbox answers."""
    async with await box.dial(PORT) as stream:
        await stream.send(words)
        answer = b""
        with anyio.move_on_after(SECONDS), suppress(anyio.EndOfStream):
            while not answer.endswith(b"\n"):
                answer += await stream.receive()
        return answer


@check(_AREA, "a port is waited for until something listens on it", "living", shared=True)
async def _waited(bench: Bench) -> None:
    async with bench.machine() as box:
        await refused(TimeoutError, box.wait_for_port(PORT, timeout=0.3))
        server = await box.start(SERVER)
        await box.wait_for_port(PORT, timeout=SECONDS)
        await refused(TimeoutError, box.wait_for_port(PORT + 1, timeout=0.3))
        await server.kill()
        await refused(TimeoutError, box.wait_for_port(PORT, timeout=0.3))


@check(_AREA, "a dialled port is a stream in both directions", *_DIAL, shared=True)
async def _dialled(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.start(SERVER, env={"NAME": "echo: "})
        await box.wait_for_port(PORT, timeout=SECONDS)
        for words in (b"one\n", b"two\n"):
            equal(await _asked(box, words), b"echo: " + words.upper(), "the answer")


@check(_AREA, "dialling a port that nobody listens on is refused, as a program would see it", *_DIAL, shared=True)
async def _refused(bench: Bench) -> None:
    async with bench.machine() as box:
        await refused(ConnectionRefusedError, box.dial(PORT))
        server = await box.start(SERVER)
        await box.wait_for_port(PORT, timeout=SECONDS)
        await server.kill()
        await refused(ConnectionRefusedError, box.dial(PORT))


async def _play_client(p: FakeProcess) -> None:
    async with await p.connect(PORT) as stream:
        await stream.send(b"hello\n")
        await p.out(await stream.receive())


_CLIENT = python(
    "import socket\n"
    f"with socket.create_connection(('localhost', {PORT})) as plug:\n"
    "    plug.sendall(b'hello\\n')\n"
    "    print(plug.makefile().readline(), end='')",
    _play_client,
)


@check(_AREA, "commands of one sandbox reach each other's ports", "living", shared=True)
async def _inside(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.start(SERVER, env={"NAME": "served: "})
        await box.wait_for_port(PORT, timeout=SECONDS)
        printed(await (await box.start(_CLIENT)).wait(SECONDS), "served: HELLO\n")


@check(_AREA, "sandboxes have the same port side by side, each its own", *_DIAL, shared=True)
async def _apart(bench: Bench) -> None:
    async with bench.machine() as one, bench.machine() as other, bench.machine() as third:
        for box, name in ((one, "one "), (other, "other ")):
            await box.start(SERVER, env={"NAME": name})
            await box.wait_for_port(PORT, timeout=SECONDS)
        equal((await _asked(one, b"x\n"), await _asked(other, b"x\n")), (b"one X\n", b"other X\n"), "the answers")
        await refused(ConnectionRefusedError, third.dial(PORT))
        await refused(TimeoutError, third.wait_for_port(PORT, timeout=0.3))


async def _play_digest(p: FakeProcess) -> None:
    async def answer(stream: ByteStream) -> None:
        count = 0
        with suppress(anyio.EndOfStream):
            while True:
                count += len(await stream.receive())
        await stream.send(f"{count}\n".encode())

    p.listen(PORT, answer)
    await p.sleep(3600)


_COUNTING = python(
    "import socket\n"
    f"listener = socket.create_server(('0.0.0.0', {PORT}))\n"
    "while True:\n"
    "    connection, _ = listener.accept()\n"
    "    with connection:\n"
    "        count = 0\n"
    "        while data := connection.recv(65536):\n"
    "            count += len(data)\n"
    "        connection.sendall(b'%d\\n' % count)",
    _play_digest,
)


@check(_AREA, "a megabyte goes through a dialled port, and the end of what is sent is told", *_DIAL, shared=True)
async def _much(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.start(_COUNTING)
        await box.wait_for_port(PORT, timeout=SECONDS)
        async with await box.dial(PORT) as stream:
            with anyio.fail_after(SECONDS):
                for _ in range(16):
                    await stream.send(b"x" * 65536)
                await stream.send_eof()
                equal(await stream.receive(), b"1048576\n", "bytes that arrived")


@check(_AREA, "what is no TCP port is refused", "living", shared=True)
async def _no_port(bench: Bench) -> None:
    async with bench.machine() as box:
        for port in (0, -1, 65536, True):
            await refused(InvalidRequest, box.wait_for_port(port))
            await refused(InvalidRequest, box.dial(port))
