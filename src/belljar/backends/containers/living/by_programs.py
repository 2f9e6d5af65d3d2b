"""Comes to processes and ports of a container by programs that run in it: where its kernel is none of the host's.

What they say comes from behind the guest's own walls. It is capped and parsed, and nobody but the guest's own user is
told anything by it. Files are come to by the host's own hand, where they lie on folders of the host.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from belljar.backends.containers import inside, spec
from belljar.backends.guest_text import python_program, shell_script
from belljar.control.box_tree import BoxTree
from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.process import BoxProcess
from belljar.core.result import StreamName
from belljar.core.values import MIB
from belljar.host.box_network import listening
from belljar.host.docker_api import ProgramStreams, asking

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer

_TICKS, _PAGE_BYTES = 100, 4096  # of gVisor, whatever the host's are
_MAX_LIST_BYTES = 16 * MIB
_MAX_TABLE_BYTES = 4 * MIB
_MAX_FRAME_BYTES = MIB
_SEND_BYTES = 1 << 16
_ANSWER_SECONDS = 60.0  # for the program beside a port to connect
_MAX_HEAD_BYTES = 16
_SECTION = re.compile(rb"^==> /proc/(\d{1,9})/(\w+) <==\n", re.MULTILINE)
_PROCESSES = shell_script("containers/processes")
_SOCKETS = shell_script("containers/sockets")
_RELAY = python_program("port_relay")


class AccessByPrograms:
    """A `MachineAccess` through programs of the image."""

    def __init__(self, container: DockerContainer, uid: int, tree: BoxTree) -> None:
        self.tree: BoxTree = tree
        self._container = container
        self._uid = uid

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs, as the guest's kernel says."""
        said = await self._told(_PROCESSES, _MAX_LIST_BYTES, "the processes")
        return listed(said, time.time())

    async def listens(self, port: int) -> bool:
        """Whether something listens on a TCP port."""
        table = (await self._told(_SOCKETS, _MAX_TABLE_BYTES, "the ports")).decode("ascii", "replace")
        return any(listening(table, family, port) for family in (socket.AF_INET, socket.AF_INET6))

    async def _told(self, script: str, limit: int, what: str) -> bytes:
        """By our own user, whose programs no guest can touch."""
        argv = ["/bin/sh", "-c", script]
        return await inside.execute(self._container, argv, spec.KEEPER, b"", limit=limit, what=what, strict=False)

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the loopback by a program beside it."""
        argv = ["python3", "-I", "-S", "-c", _RELAY, str(port)]
        stack = AsyncExitStack()
        try:
            async with asking("the port", seconds=_ANSWER_SECONDS):
                call = await self._container.exec(argv, user=f"{self._uid}:{self._uid}", stdin=True, workdir="/")
                streams = await stack.enter_async_context(ProgramStreams.open(call.start(detach=False), "the port"))
                stream = RelayedStream(streams, stack)
                await stream.begin()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await stack.aclose()
            raise
        return stream


class RelayedStream(ByteStream):
    """A connection that a program in the container holds; see `guest/port_relay.py`."""

    def __init__(self, streams: ProgramStreams, open_: AsyncExitStack) -> None:
        self._streams = streams
        self._parts: AsyncIterator[tuple[StreamName, bytes]] = streams.parts()
        self._open = open_
        self._rest = b""  # of what came, not yet looked at
        self._left = 0  # bytes of the frame that is under way
        self._ended = self._closed = False

    async def begin(self) -> None:
        """Returns when the program has connected.

        Raises:
            OSError: it could not connect.
            NotAvailable: the program could not be run.
        """
        said = b""
        while b"\n" not in said and len(said) < _MAX_HEAD_BYTES and (piece := await self._more()):
            said += piece
        head, newline, self._rest = said.partition(b"\n")
        if not newline or not head.isdigit():
            raise errors.NotAvailable(
                "the ports of this sandbox cannot be reached", fix="choose an image that has python3"
            )
        if number := int(head):  # said by the guest, perhaps
            number = number if number in errno.errorcode else errno.EIO
            raise OSError(number, os.strerror(number))

    async def _more(self) -> bytes:
        async for name, data in self._parts:
            if name == "stdout":
                return data
        return b""

    async def _filled(self, count: int) -> bool:
        while len(self._rest) < count:
            piece = await self._more()
            if not piece:
                return False
            self._rest += piece
        return True

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Returns what came next."""
        self._check()
        if not self._left and not self._ended:
            self._ended = not await self._next_frame()
        if self._ended or not await self._filled(1):
            self._ended = True
            raise anyio.EndOfStream
        count = min(self._left, max_bytes)
        found, self._rest = self._rest[:count], self._rest[count:]
        self._left -= len(found)
        return found

    async def _next_frame(self) -> bool:
        if not await self._filled(4):
            return False
        (self._left,) = struct.unpack(">I", self._rest[:4])
        self._rest = self._rest[4:]
        if self._left > _MAX_FRAME_BYTES:
            raise anyio.BrokenResourceError
        return self._left > 0

    async def send(self, item: bytes) -> None:
        """Sends all of it."""
        self._check()
        view = memoryview(item)
        while view:
            piece = bytes(view[:_SEND_BYTES])
            await self._streams.send(struct.pack(">I", len(piece)) + piece)
            view = view[_SEND_BYTES:]
        if not self._streams.connected:
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        """Tells the other side that no more will come."""
        self._check()
        await self._streams.send(struct.pack(">I", 0))

    def _check(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError

    async def aclose(self) -> None:
        """Hangs up: the program ends with its stdin."""
        if not self._closed:
            self._closed = True
            with anyio.CancelScope(shield=True), suppress(Exception):
                await self._open.aclose()


# --- what a list of processes says ---


def listed(said: bytes, now: float) -> tuple[BoxProcess, ...]:
    """Reads what `guest/shell/containers/processes.sh` prints, without what is ours: see `MachineAccess.processes`."""
    head, *rows = _SECTION.split(said)
    sections: dict[int, dict[str, bytes]] = {}
    for pid, kind, content in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        sections.setdefault(int(pid), {}).setdefault(kind.decode(), content)  # a command line may pretend to be more
    found = []
    for number, parts in sections.items():
        with suppress(ValueError, IndexError, KeyError):
            if one := _one(number, parts, now - float(head.split()[0])):
                found.append(one)
    return tuple(sorted(found, key=lambda one: one.pid))


def _one(pid: int, parts: Mapping[str, bytes], boot: float) -> BoxProcess | None:
    name, _, rest = parts["stat"].decode("utf-8", "replace").partition("(")[2].rpartition(")")
    fields = rest.split()
    owner = re.findall(rb"^Uid:\s+(\d{1,10})", parts["status"], re.MULTILINE)[-1]  # the name before it may hold lines
    if fields[0] in "ZX" or fields[1] == "0" or int(owner) == spec.KEEPER:
        return None
    line = parts.get("cmdline", b"").rstrip(b"\n").rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    parent, user, system, started = (int(fields[place]) for place in (1, 11, 12, 19))
    return BoxProcess(
        pid=pid, parent=parent, command=neutralise(line or f"[{name}]"), started=boot + started / _TICKS,
        cpu_ms=(user + system) * 1000 / _TICKS, memory=int(parts["statm"].split()[1]) * _PAGE_BYTES,
    )  # fmt: skip
