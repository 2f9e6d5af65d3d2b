"""Reaches a living sandbox' own loopback from outside, without a route: sockets are made in its network namespace.

A program of ours stands in that namespace and in no other of the guest's: it makes sockets and hands them to us, and we
connect. It is started when the first one is needed.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, SocketStream

from belljar.core import errors
from belljar.host import process

_CONNECT_SECONDS = 10.0
_START_SECONDS = 10.0
_END_SECONDS = 5.0
_LISTENING = "0A"  # a socket's state in /proc/net/tcp
_LOOPBACK = {  # addresses on which somebody listens for connections to the loopback, as /proc/net/tcp* writes them
    socket.AF_INET: {"00000000", "0100007F"},
    socket.AF_INET6: {"0" * 32, "00000000000000000000000001000000"},
}
_TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_ADDRESSES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_MAKER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as host:
    while order := host.recv(16):
        kind, port = order.split()
        made = socket.socket(socket.AF_INET6 if kind == b"6" else socket.AF_INET)
        try:
            if kind == b"l":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind(("127.0.0.1", int(port)))
                made.listen(128)
            socket.send_fds(host, [b"0"], [made.fileno()])
        except OSError as error:
            host.send(str(error.errno).encode())
        made.close()
"""


class BoxNetwork:
    """The loopback of a living sandbox."""

    def __init__(self, holder: int, spaces: Mapping[str, int]) -> None:
        self._holder = holder
        self._spaces = spaces  # the namespaces to enter, open: a number may be another process' one day
        self._maker: tuple[process.Child, socket.socket] | None = None
        self._one_at_a_time = anyio.Lock()

    @classmethod
    @contextmanager
    def of(cls, holder: int) -> Iterator[BoxNetwork]:
        """The network of the machine with this first process, for as long as the block runs."""
        with ExitStack() as stack:
            spaces = {}
            for kind in ("net",) if os.geteuid() == 0 else ("user", "net"):
                spaces[kind] = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, spaces[kind])
            network = cls(holder, spaces)
            stack.callback(network._close)
            yield network

    def listens(self, port: int) -> bool:
        """Whether something listens on a port of the loopback."""
        return bool(self._families(port))

    def _families(self, port: int) -> list[socket.AddressFamily]:
        return [family for family in _TABLES if self._listens(family, port)]

    def _listens(self, family: socket.AddressFamily, port: int) -> bool:
        with suppress(OSError):
            rows = Path(f"/proc/{self._holder}/net/{_TABLES[family]}").read_text()
            here = os.stat(f"/proc/{self._holder}/ns/net").st_ino == os.fstat(self._spaces["net"]).st_ino
            return here and listening(rows, family, port)
        return False

    async def dial(self, port: int) -> ByteStream:
        """Connects to a port.

        Raises:
            ConnectionRefusedError: nobody listens there.
            TimeoutError: who listens takes no more connections.
        """
        families = await anyio.to_thread.run_sync(self._families, port)
        if not families:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing listens on port {port} of the sandbox")
        made = await self._made("6" if families[0] is socket.AF_INET6 else "4", port)
        try:
            await _connect(made, (_ADDRESSES[families[0]], port))
            return await SocketStream.from_socket(made)
        except BaseException:
            made.close()
            raise

    async def listener(self, port: int) -> socket.socket:
        """Listens on a port of the loopback, for connections of the guest's to us."""
        return await self._made("l", port)

    async def _made(self, kind: str, port: int) -> socket.socket:
        async with self._one_at_a_time:
            return await anyio.to_thread.run_sync(self._make, kind, port)

    def _make(self, kind: str, port: int) -> socket.socket:
        if self._maker is None:
            self._maker = self._start()
        _, line = self._maker
        try:
            line.send(f"{kind} {port}".encode())
            said, fds, _, _ = socket.recv_fds(line, 16, 1)
        except OSError as error:
            self._close()
            raise errors.BackendError(f"no socket could be made in the sandbox: {error}") from None
        if not fds:
            self._close()
            number = int(said or b"0")
            raise OSError(number or errno.EIO, os.strerror(number or errno.EIO))
        made = socket.socket(fileno=fds[0])
        made.setblocking(False)
        return made

    def _start(self) -> tuple[process.Child, socket.socket]:
        near, far = socket.socketpair()
        with far:
            near.settimeout(_START_SECONDS)
            enter = [f"--{kind}=/proc/self/fd/{space}" for kind, space in self._spaces.items()]
            as_user = ["--preserve-credentials"] if "user" in self._spaces else []
            argv = ["nsenter", *as_user, *enter, "--", sys.executable, "-I", "-S", "-c", _MAKER, str(far.fileno())]
            null, fds = subprocess.DEVNULL, (far.fileno(), *self._spaces.values())
            return process.Child(argv, stdin=null, stdout=null, stderr=null, fds=fds), near

    def _close(self) -> None:
        if self._maker:
            child, line = self._maker
            self._maker = None
            line.close()
            child.kill()
            child.reap(_END_SECONDS)


def listening(table: str, family: socket.AddressFamily, port: int) -> bool:
    """Whether the kernel's table of TCP sockets has one that takes connections to a port of the loopback."""
    for line in table.splitlines():
        fields = line.split()
        address, _, number = fields[1].partition(":") if len(fields) > 3 else ("", "", "")
        if fields[3:4] == [_LISTENING] and address in _LOOPBACK[family] and int(number, 16) == port:
            return True
    return False


async def _connect(made: socket.socket, address: tuple[str, int]) -> None:
    with anyio.fail_after(_CONNECT_SECONDS):
        with suppress(BlockingIOError):
            made.connect(address)
        await anyio.wait_writable(made)
    if number := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))
