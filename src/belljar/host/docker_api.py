"""The one client of container engines: it connects, asks under a deadline, and translates every failure.

Docker and Podman speak the same API. aiodocker speaks it for us; what it keeps behind an underscore, and we need all
the same, is used in this file and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.core.result import StreamName
from belljar.host.engine_address import EngineAddress

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

ANSWER_SECONDS = 60.0  # for one answer of an engine that is busy with fifty containers
NOT_FOUND = 404
_IN_USE = 409
_IN_STREAM = 0  # aiodocker's own status for an error told in the middle of a stream
_UNREACHABLE = 900  # aiodocker's own status for "no connection"
_CLOSE_SECONDS = 5
_UNKNOWN_VERSION = "auto"  # aiodocker asks the engine, then
_SPOKEN_SECONDS = 60.0  # that an engine is taken for the one that was there, and no other
_SPOKEN: dict[str, tuple[str, float]] = {}  # by address: the version of the API that was spoken, and when
_UPLOAD_BYTES = 1 << 20
_SEND_BYTES = 1 << 18
_NAMES: dict[int, StreamName] = {1: "stdout", 2: "stderr"}
_NO_IMAGE = re.compile(
    r"manifest (?:for \S+ )?(?:unknown|not found)|not found: manifest|no such image|repository does not exist"
    r"|repository name not known|name unknown|pull access denied|does not exist or no pull access",
    re.IGNORECASE,
)
_SLOW = re.compile(r"timeout|deadline exceeded|timed out", re.IGNORECASE)


class EngineRefusal(Exception):
    """An engine answered, and the answer was no.

    Attributes:
        status: The HTTP status; 0 if the engine said so in the middle of a stream.
        message: The engine's own words.
        detail: What else the engine said of an error in a stream, such as an exit code.
    """

    def __init__(self, status: int, message: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message: str = message.strip()
        self.detail: Mapping[str, Any] | dict[str, Any] = detail or {}


# --- connecting and asking ---


@asynccontextmanager
async def connected(address: EngineAddress) -> AsyncIterator[Docker]:
    """Yields a client for as long as it is needed. Nothing is sent yet.

    Raises:
        NotAvailable: The client is not installed, or nobody listens at the address.
    """
    try:
        import aiodocker
    except ImportError:
        raise errors.NotAvailable(
            "the client for container engines is not installed", fix="pip install 'belljar-sandbox[docker]'"
        ) from None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise errors.NotAvailable("container engines are spoken to with asyncio", fix="run under asyncio") from None
    with translated(f"{address.flavour.name}'s address", errors.NotAvailable, address.flavour.start):
        try:
            client = aiodocker.Docker(url=address.url or None, api_version=_version_for(address))
        except AssertionError:  # its way to say that it looked everywhere
            raise errors.NotAvailable(f"no engine listens at {address}", fix=address.flavour.start) from None
        except ValueError as error:
            fix = "give a path, or unix://… or tcp://…"
            raise errors.NotAvailable(f"{address.flavour.name}'s address: {error}", fix=fix) from None
    client.connector._limit = 0  # a program in a living sandbox holds its connection for as long as it runs
    try:
        yield client
    finally:
        if address.url and client.api_version != _UNKNOWN_VERSION:
            _SPOKEN[address.url] = client.api_version, time.monotonic()
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True), suppress(Exception):
            await client.close()


def _version_for(address: EngineAddress) -> str:
    """The version of its API; where nobody has said, the one spoken a moment ago: asking costs Podman 0.3 s."""
    version, at = _SPOKEN.get(address.url, (_UNKNOWN_VERSION, 0.0))
    fresh = time.monotonic() - at < _SPOKEN_SECONDS
    return version if address.version == _UNKNOWN_VERSION and fresh else address.version


@asynccontextmanager
async def asking(
    what: str,
    otherwise: type[errors.BelljarError] = errors.ExecutionFailed,
    *,
    seconds: float = ANSWER_SECONDS,
    fix: str = "",
) -> AsyncIterator[None]:
    """Puts one question to the engine under a deadline, and its errors into our words.

    Args:
        what: What we are about to do, for the error's message.
        otherwise: The error to raise where the engine's words say nothing more exact.
        seconds: The deadline.
        fix: What the reader of the error can do about it.
    """
    with translated(what, otherwise, fix), anyio.fail_after(seconds):
        yield


@contextmanager
def refusals() -> Iterator[None]:
    """Raises an engine's answer of no as `EngineRefusal`, for callers that have to tell one from another."""
    import aiodocker

    try:
        yield
    except aiodocker.DockerError as error:
        if error.status == _UNREACHABLE:
            raise
        raise EngineRefusal(error.status, error.message, getattr(error, "error_detail", None)) from None


# --- errors ---


@contextmanager
def translated(
    what: str,
    otherwise: type[errors.BelljarError] = errors.ExecutionFailed,
    fix: str = "",
    *,
    registry: bool = False,
) -> Iterator[None]:
    """Raises whatever goes wrong with the engine as one of our errors, which says what we were about to do.

    Args:
        what: What we are about to do.
        otherwise: The error to raise where the engine's words say nothing more exact.
        fix: What the reader of the error can do about it.
        registry: Whether the engine speaks for a registry of images: see `translate`.
    """
    try:
        yield
    except errors.BelljarError:
        raise
    except TimeoutError:
        raise errors.BackendTimeout(f"{what}: the engine did not answer", fix="look at the engine's log") from None
    except Exception as error:
        raise translate(error, what, otherwise, fix, registry=registry) from None


def translate(
    error: Exception,
    what: str,
    otherwise: type[errors.BelljarError] = errors.ExecutionFailed,
    fix: str = "",
    *,
    registry: bool = False,
) -> errors.BelljarError:
    """Returns the error of ours that a failure of the engine means.

    Args:
        error: aiodocker's error, an `EngineRefusal`, or whatever else came out of the client.
        what: What we were about to do.
        otherwise: The kind of error where the engine's words say nothing more exact.
        fix: What the reader of the error can do about it.
        registry: Whether the engine speaks for a registry of images. Then a message may tell of a slow registry, of a
            pull that broke off, or of an image in use; and an engine that cannot be reached is one that is not there.
    """
    status, message = getattr(error, "status", None), str(getattr(error, "message", "") or error).strip()
    if status == _UNREACHABLE or _is_lost(error):
        absent = registry or issubclass(otherwise, errors.NotAvailable)
        kind = errors.NotAvailable if absent else errors.ExecutionFailed
        return kind(f"{what}: the engine cannot be reached: {message}"[:500], fix=fix or "is it running?")
    if not isinstance(status, int):
        fix = fix or "is it a real engine?"
        return otherwise(f"{what}: the engine's answer makes no sense: {error!r}"[:500], fix=fix)
    if _NO_IMAGE.search(message) or (status == NOT_FOUND and "image" in message.lower()):
        return errors.ImageNotFound(
            message[:500], fix="check the name, or log in to its registry", context={"status": status}
        )
    if registry and (told := _of_registry(status, message[:500])):
        return told
    fix = errors.FULL_DISK if "no space left on device" in message else fix
    return otherwise(f"{what}: {message}"[:1000], fix=fix, context={"status": status})


def _is_lost(error: Exception) -> bool:
    import aiohttp

    return isinstance(error, OSError | aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)


def _of_registry(status: int, message: str) -> errors.BelljarError | None:
    if _SLOW.search(message):
        return errors.BackendTimeout(message, fix="check the registry, and try again")
    if status == _IN_USE:
        return errors.CleanupFailed(message, fix="stop and remove what uses it, or use --force")
    if status == _IN_STREAM:  # the pull had begun
        full = "no space left on device" in message
        again = "try again; if it happens again, the registry's copy is damaged"
        return errors.PullFailed(message, fix=errors.FULL_DISK if full else again)
    return None


# --- questions that aiodocker has no public word for ---


async def version_of(client: Docker) -> dict[str, Any]:
    """Returns what an engine says of its version, and has the client speak that version of the API from then on.

    aiodocker would ask twice, and each time Podman looks for the packages of its programs: 0.3 s of CPU.
    """
    said: dict[str, Any] = await client._query_json("version", versioned_api=False)
    client.api_version = f"v{said['ApiVersion']}"
    return said


async def list_containers(client: Docker, *, label: str = "", running: bool = False) -> list[dict[str, Any]]:
    """Returns the engine's rows of containers.

    Args:
        client: Of the engine.
        label: Only those that have it, as `name=value`; empty: any.
        running: Only those that run.
    """
    filters = {"filters": {"label": [label]}} if label else {}
    found = await client.containers.list(**({} if running else {"all": True}), **filters)
    return [dict(each._container) for each in found]


async def list_volumes(client: Docker, *, label: str) -> list[dict[str, Any]]:
    """Returns the engine's rows of volumes with a label (`name=value`)."""
    found = await client.volumes.list(filters={"label": [label]})  # type: ignore[no-untyped-call]
    return [dict(row) for row in found.get("Volumes") or ()]


@asynccontextmanager
async def _answering(client: Docker, path: str, method: str = "GET", **options: Any) -> AsyncIterator[Any]:
    """Makes a call and yields the response, however much of it is read; aiodocker itself leaves the connection open."""
    async with client._query(path, method, **options) as response:
        try:
            yield response
        finally:
            response.release()


async def status_of(client: Docker, method: str, path: str) -> int:
    """Makes a call for the sake of its HTTP status alone, and returns that, be it yes or no."""
    try:
        with refusals():
            async with _answering(client, path, method) as response:
                return int(response.status)
    except EngineRefusal as refusal:
        return refusal.status


async def container_stats(container: DockerContainer) -> Any:
    """Returns what an engine says now of a container's use of resources; None if that is not JSON."""
    # One shot: otherwise an engine looks twice, with a second in between. Podman does not say that it is JSON.
    path, once = f"containers/{container.id}/stats", {"stream": "0", "one-shot": "1"}
    async with _answering(container.docker, path, params=once) as answer:
        said = await answer.content.readline()
    try:
        return json.loads(said)
    except ValueError:
        return None


async def ask_registry(client: Docker, name: str) -> Any:
    """Returns what the registry says now of an image's `name:tag`, or raises `EngineRefusal`."""
    with refusals():
        return await client._query_json(f"distribution/{name}/json")


@asynccontextmanager
async def building(client: Docker, params: Mapping[str, Any], context: IO[bytes]) -> AsyncIterator[Any]:
    """Starts a build and yields its messages as they come; a failed step is an `EngineRefusal`.

    aiodocker's own `build` cannot be told memory, processor or network.
    """
    import aiohttp
    from aiodocker.jsonstream import json_stream_stream

    async def chunks() -> AsyncIterator[bytes]:
        while chunk := await anyio.to_thread.run_sync(context.read, _UPLOAD_BYTES):
            yield chunk

    query = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in params.items()}
    headers = {"content-type": "application/x-tar"}
    with refusals():
        async with _answering(
            client, "build", "POST", params=query, headers=headers, data=chunks(), timeout=aiohttp.ClientTimeout()
        ) as response:
            yield json_stream_stream(response)


@asynccontextmanager
async def pulling(client: Docker, image: str) -> AsyncIterator[Any]:
    """Starts to pull an image and yields the engine's messages as they come.

    aiodocker's own `pull` leaves the connection open when its messages are not read to the end.

    Args:
        client: Of the engine.
        image: Its name, with a tag or a digest; with neither it is `latest`, where an engine would pull all tags.
    """
    import aiohttp
    from aiodocker.jsonstream import json_stream_stream

    whole = ":" in image.rpartition("/")[2] or "@" in image
    params = {"fromImage": image if whole else f"{image}:latest"}
    async with _answering(client, "images/create", "POST", params=params, timeout=aiohttp.ClientTimeout()) as response:
        yield json_stream_stream(response)


# --- streams ---


class ProgramStreams:
    """The standard streams of a program in a container, over one connection."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @classmethod
    @asynccontextmanager
    async def open(cls, stream: Any, what: str) -> AsyncIterator[ProgramStreams]:
        """Connects now, so that nothing is started before somebody listens; closes in the end.

        Args:
            stream: aiodocker's, of a container that was attached to, or of a program that was started in it.
            what: What the program is for, for the error's message.
        """
        async with AsyncExitStack() as stack:
            async with asking(what, errors.StartFailed):
                await stream.__aenter__()
            stack.push_async_callback(cls._close, stream)
            yield cls(stream)

    @staticmethod
    async def _close(stream: Any) -> None:
        with suppress(Exception):  # the other side may have closed it first
            await stream.close()

    async def send(self, data: bytes) -> None:
        """Sends all of it, or as much as the other side wants to hear."""
        with suppress(Exception):
            view = memoryview(data)
            while view:
                await self._stream.write_in(bytes(view[:_SEND_BYTES]))
                view = view[_SEND_BYTES:]

    async def supply(self, data: bytes) -> None:
        """Sends all that the program's stdin will ever get."""
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

    async def parts(self) -> AsyncIterator[tuple[StreamName, bytes]]:
        """Yields what the program writes, with the name of the stream, until it has ended."""
        while True:
            with translated("the program's output"):
                message = await self._stream.read_out()
            if message is None:
                return
            if message.stream in _NAMES and message.data:
                yield _NAMES[message.stream], message.data
