"""The conversation with a container engine: where it listens, what its errors mean, and bytes in both directions.

Docker and Podman speak the same API. What differs between them is one row of data each.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from belljar.core import errors
from belljar.core.result import Stream

if TYPE_CHECKING:
    from aiodocker import Docker

DEFAULT_SOCKET = "/var/run/docker.sock"
PATIENCE = 60.0  # seconds for one answer of an engine that is busy with fifty containers
_UNREACHABLE = 900  # aiodocker's own status for "no connection"
_NAMES: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class Flavour(NamedTuple):
    """What differs from one engine to the other."""

    name: str
    start: str  # how to get it running
    init: str = ""  # how to get the init that reaps zombies, where it is a package of its own
    profile_by_path: bool = False  # does it want the seccomp profile's path, instead of its text?
    one_runtime: bool = False  # does its API ignore which runtime a container asks for?
    ulimits: tuple[tuple[str, int], ...] = ()
    folders: tuple[tuple[str, str], ...] = ()


DOCKER = Flavour("docker", "start it (systemctl start docker), or set DOCKER_SOCKET_PATH or DOCKER_HOST")
PODMAN = Flavour(
    "podman",
    "start it (podman system service --time=0), or set CONTAINER_HOST",
    init="apt install catatonit",
    profile_by_path=True,
    one_runtime=True,
    # Its own default is over what an ordinary host lets it set. Our limit on processes is the control group's.
    ulimits=(("nproc", 16_384),),
    # Under a read-only root it would make these writable, each of any size.
    folders=(("/run", "ro,size=64k"), ("/var/tmp", "ro,size=64k")),
)


class EngineAddress(NamedTuple):
    """Where an engine listens; the version of its API is known once it has answered."""

    flavour: Flavour
    url: str = ""  # empty: aiodocker looks for the current context, then for the usual sockets
    version: str = "auto"
    outside: bool = False  # is it outside of the container that we are in? Known once it has answered, too

    @property
    def local(self) -> bool:
        """Whether the engine sees the folders and processes that we see."""
        return not self.outside and (not self.url or self.url.startswith("unix://"))

    def __str__(self) -> str:
        return self.url or f"{DEFAULT_SOCKET} or the current context"


def docker_address(place: str) -> EngineAddress:
    """What the settings say; their default leaves room for a context."""
    if place == DEFAULT_SOCKET:
        return EngineAddress(DOCKER, f"unix://{place}" if Path(place).exists() else "")
    return EngineAddress(DOCKER, _url(place))


def podman_address(place: str) -> EngineAddress:
    mine = f"/run/user/{os.geteuid()}/podman/podman.sock" if os.geteuid() else "/run/podman/podman.sock"
    return EngineAddress(PODMAN, _url(place or mine))


def _url(place: str) -> str:
    return f"unix://{place}" if place.startswith("/") else place


def is_outside(url: str) -> bool:
    """Whether who listens at a socket is in no pid namespace of ours: then the kernel gives its pid as 0."""
    if not url.startswith("unix://") or not hasattr(socket, "SO_PEERCRED"):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(5)
        line.connect(url.removeprefix("unix://"))
        return int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder) == 0
    return False


@asynccontextmanager
async def connected(address: EngineAddress) -> AsyncIterator[Docker]:
    """A client for as long as it is needed; nothing is said yet."""
    try:
        import aiodocker
    except ImportError:
        raise errors.NotAvailable(
            "the client for container engines is not installed", fix="pip install 'belljar[docker]'"
        ) from None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise errors.NotAvailable("container engines are spoken to with asyncio", fix="run under asyncio") from None
    with translated(f"{address.flavour.name}'s address", errors.NotAvailable, address.flavour.start):
        try:
            client = aiodocker.Docker(url=address.url or None, api_version=address.version)
        except AssertionError:  # its way to say that it looked everywhere
            raise errors.NotAvailable(f"no engine listens at {address}", fix=address.flavour.start) from None
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True), suppress(Exception):
            await client.close()


@contextmanager
def translated(
    what: str, otherwise: type[errors.BelljarError] = errors.ExecutionFailed, fix: str = ""
) -> Iterator[None]:
    """Whatever goes wrong with the engine, as one of our errors that says what we were about to do."""
    try:
        yield
    except errors.BelljarError:
        raise
    except TimeoutError:
        raise errors.BackendTimeout(f"{what}: the engine did not answer", fix="look at the engine's log") from None
    except Exception as error:
        raise _told(what, error, otherwise, fix) from None


def _told(what: str, error: Exception, otherwise: type[errors.BelljarError], fix: str) -> errors.BelljarError:
    status, message = getattr(error, "status", None), str(getattr(error, "message", "") or error).strip()
    if status == 404 and re.search(r"no such image|image not known|image.* not found", message, re.IGNORECASE):
        return errors.ImageNotFound(message, context={"status": status})
    if "no space left on device" in message:
        fix = errors.FULL_DISK
    if status == _UNREACHABLE or isinstance(error, OSError):
        kind = otherwise if issubclass(otherwise, errors.NotAvailable) else errors.ExecutionFailed
        return kind(f"{what}: the engine cannot be reached: {message}"[:500], fix=fix or "is it running?")
    if isinstance(status, int) and status >= 400:
        return otherwise(f"{what}: {message}"[:1000], fix=fix, context={"status": status})
    return otherwise(f"{what}: the engine's answer makes no sense: {error!r}"[:500], fix=fix or "is it a real engine?")


@asynccontextmanager
async def asking(
    what: str,
    otherwise: type[errors.BelljarError] = errors.ExecutionFailed,
    *,
    seconds: float = PATIENCE,
    fix: str = "",
) -> AsyncIterator[None]:
    """Around one question to the engine: a deadline, and its errors as ours."""
    with translated(what, otherwise, fix), anyio.fail_after(seconds):
        yield


class ProgramStreams:
    """The standard streams of a program inside, over one connection."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @classmethod
    @asynccontextmanager
    async def open(cls, stream: Any, what: str) -> AsyncIterator[ProgramStreams]:
        async with AsyncExitStack() as stack:
            async with asking(what, errors.StartFailed):
                await stream._init()  # connects now: nothing may be started before somebody listens
            stack.push_async_callback(cls._close, stream)
            yield cls(stream)

    @staticmethod
    async def _close(stream: Any) -> None:
        with suppress(Exception):  # the other side may have closed it first
            await stream.close()

    async def send(self, data: bytes) -> None:
        """All of it, or as much as the other side wants to hear."""
        with suppress(Exception):
            view = memoryview(data)
            while view:
                await self._stream.write_in(bytes(view[: 1 << 18]))
                view = view[1 << 18 :]

    async def supply(self, data: bytes) -> None:
        """All that the program's stdin will ever get."""
        await self.send(data)
        self.end()

    @property
    def connected(self) -> bool:
        """Whether nobody has hung up. An engine may hold the line though its program has ended."""
        transport = getattr(getattr(self._stream._resp, "connection", None), "transport", None)
        return transport is not None and not transport.is_closing() and not self._stream._queue.is_eof()

    def end(self) -> None:
        """Ends the program's stdin, and only that: aiodocker itself can only close both directions."""
        with suppress(Exception):
            self._stream._resp.connection.transport.write_eof()

    async def parts(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while True:
            with translated("the program's output"):
                message = await self._stream.read_out()
            if message is None:
                return
            if message.stream in _NAMES and message.data:
                yield _NAMES[message.stream], message.data
