"""An engine's own words about images, through aiodocker, with every wait under a deadline and every failure typed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.core.model import Model
from belljar.images.rules import ImageFacts, Reference, digests_of, is_digest

if TYPE_CHECKING:
    from aiodocker import Docker

QUICK = 30.0  # seconds for what an engine answers from its own memory
_ABSENT = re.compile(
    r"manifest (?:for \S+ )?(?:unknown|not found)|not found: manifest|no such image|repository does not exist"
    r"|repository name not known|name unknown|pull access denied|does not exist or no pull access",
    re.IGNORECASE,
)
_SLOW = re.compile(r"timeout|deadline exceeded|timed out", re.IGNORECASE)


class Progress(Model):
    """One word of a pull or a build that is under way."""

    image: str
    step: str
    layer: str = ""
    current: int = 0
    total: int = 0


Listener = Callable[[Progress], object]


def silent(progress: Progress) -> None:
    pass


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Docker]:
    """A client of the engine. What goes wrong inside is told in our words; the connection is closed in any case, and
    with it what the engine was still doing for us."""
    try:
        import aiodocker
        import aiohttp
    except ImportError:
        raise errors.NotAvailable("aiodocker is not installed", fix="pip install 'belljar[docker]'") from None
    try:
        docker = aiodocker.Docker(url=(url if "://" in url else f"unix://{url}") if url else None)
    except AssertionError:  # its way to say that it looked everywhere
        raise errors.NotAvailable("no engine listens at the usual places", fix="start one, or name it") from None
    except ValueError as error:
        raise errors.InvalidRequest(f"docker_socket: {error}", fix="give a path, or unix://… or tcp://…") from None
    try:
        yield docker
    except errors.BelljarError:
        raise
    except aiodocker.DockerError as error:
        raise translated(error.status, error.message) from error
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        raise errors.NotAvailable(f"the engine at {url} is gone: {error}", fix="start it again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.ExecutionFailed(f"the engine at {url} answered what makes no sense: {error}") from error
    finally:
        with anyio.move_on_after(5, shield=True):
            await docker.close()


def translated(status: int, message: str) -> errors.BelljarError:
    text = message.strip()[:500]
    if status == 900:
        return errors.NotAvailable(text, fix="start the engine, or set DOCKER_SOCKET_PATH")
    if _ABSENT.search(text) or (status == 404 and "image" in text.lower()):
        return errors.ImageNotFound(text, fix="check the name, or log in to its registry")
    if _SLOW.search(text):
        return errors.BackendTimeout(text, fix="check the registry, and try again")
    if status == 409:
        return errors.CleanupFailed(text, fix="stop and remove what uses it, or use --force")
    if status == 0 and "no space left on device" in text:
        return errors.PullFailed(text, fix=errors.FULL_DISK)
    if status == 0:  # told in the middle of a stream: the pull had begun
        return errors.PullFailed(text, fix="try again; if it happens again, the registry's copy is damaged")
    return errors.ExecutionFailed(f"the engine said: {text}", context={"status": status})


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise errors.BackendTimeout(
            f"{what}: no end after {seconds:g} s", fix="check the engine and the registry, or allow more time"
        ) from None


# --- one question, one answer ------------------------------------------------------------------


async def inspect(docker: Docker, name: str, reference: Reference, built: Collection[str] = ()) -> ImageFacts | None:
    """An image by any of its names; None if the engine does not have it. `built`: ids of those that were made here."""
    import aiodocker

    try:
        with deadline(QUICK, f"inspecting {name}"):
            found = await docker.images.inspect(name)
    except aiodocker.DockerError as error:
        if error.status == 404:
            return None
        raise
    if not is_digest(found["Id"]):
        raise errors.ExecutionFailed(f"the engine calls {name} {str(found['Id'])[:80]!r}, which is not an id")
    digests = digests_of(reference, found.get("RepoDigests") or ())
    if digests and found["Id"] in built and await _is_podman(docker):
        digests = ()  # Podman gives a digest to every image, also to one that no registry ever saw
    facts = ImageFacts(
        reference=str(reference),
        id=found["Id"],
        digest=digests[0] if digests else "",
        digests=digests,
        size=int(found.get("Size") or 0),
        created=_moment(found.get("Created")),
        labels=_labels((found.get("Config") or {}).get("Labels")),
        tags=_tags(found.get("RepoTags")),
    )
    return facts.by(reference.digest)


class Traits(NamedTuple):
    """What an engine is, and what it can hold a build to."""

    podman: bool
    limits: bool  # of memory and processors


async def traits(docker: Docker) -> Traits:
    with deadline(QUICK, "asking what the engine can do"):
        said: dict[str, Any] = dict(await docker.system.info())
    rootless = said.get("Rootless") or "rootless" in str(said.get("SecurityOptions"))
    # Without root, control groups version 1 let nobody set a limit; Podman says that it could.
    limits = bool(said.get("MemoryLimit") and said.get("CpuCfsQuota"))
    limits = limits and not (rootless and str(said.get("CgroupVersion", "1")) == "1")
    return Traits(await _is_podman(docker), limits)


async def _is_podman(docker: Docker) -> bool:
    with deadline(QUICK, "asking for the version"):
        said = await docker.version()
    return any("podman" in str(part.get("Name", "")).lower() for part in said.get("Components") or ())


def network_of(build: Traits, allowed: bool) -> dict[str, Any]:
    """The network of a build's steps. Podman takes "none" for a word it does not know, and its default is the host's
    own network: it wants these words, and a namespace."""
    if not build.podman:
        return {"networkmode": "default" if allowed else "none"}
    own = [{"Name": "network", "Host": False, "Path": ""}]
    return {"networkmode": "NetworkDefault" if allowed else "NetworkDisabled", "nsoptions": own}


async def listed(docker: Docker, **filters: list[str]) -> tuple[ImageFacts, ...]:
    with deadline(QUICK, "listing images"):
        rows = await docker.images.list(filters=filters or None)
    return tuple(
        ImageFacts(
            reference=(_tags(row.get("RepoTags")) or (row["Id"],))[0],
            id=row["Id"],
            digest=_any_digest(row.get("RepoDigests") or ()),
            size=int(row.get("Size") or 0),
            created=float(row.get("Created") or 0),
            labels=_labels(row.get("Labels")),
            tags=_tags(row.get("RepoTags")),
        )
        for row in rows
    )


def _any_digest(entries: Iterable[object]) -> str:
    return next((digest for entry in entries if is_digest(digest := str(entry).partition("@")[2])), "")


async def used(docker: Docker) -> frozenset[str]:
    """The images of all containers, also of those that do not run."""
    with deadline(QUICK, "listing containers"):
        containers = await docker.containers.list(all=True)
    return frozenset(str(container["ImageID"]) for container in containers)


async def remote_digest(docker: Docker, reference: Reference, seconds: float) -> str:
    """What the registry says the name means now; empty where an engine cannot ask (Podman), or gets no answer."""
    import aiodocker

    try:
        with deadline(seconds, f"asking the registry for {reference}"):
            # aiodocker has no word for this one.
            answer = await docker._query_json(f"distribution/{reference.name}:{reference.tag}/json")
    except aiodocker.DockerError as error:
        if error.status == 900:
            raise
        return ""
    digest = str(answer["Descriptor"]["digest"])
    return digest if is_digest(digest) else ""


def _moment(value: object) -> float:
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _labels(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def _tags(value: object) -> tuple[str, ...]:
    return tuple(str(tag) for tag in value if tag != "<none>:<none>") if isinstance(value, list) else ()


# --- streams -----------------------------------------------------------------------------------


async def pull(docker: Docker, target: str, *, seconds: float, stall: float, listener: Listener) -> None:
    """To its end, or an error: a stream that ends early looks like one that ends well, so the caller must look."""
    with deadline(seconds, f"pulling {target}"):
        async for message in patient(docker.images.pull(target, stream=True), stall, f"pulling {target}"):
            detail = message.get("progressDetail") or {}
            listener(
                Progress(
                    image=target, step=str(message.get("status", ""))[:200], layer=str(message.get("id", ""))[:80],
                    current=int(detail.get("current") or 0), total=int(detail.get("total") or 0),
                )
            )  # fmt: skip


async def patient(stream: AsyncIterator[dict[str, Any]], stall: float, what: str) -> AsyncIterator[dict[str, Any]]:
    """The same stream, for as long as something comes."""
    while True:
        with deadline(stall, f"{what}, without any progress"):
            try:
                message = await anext(stream)
            except StopAsyncIteration:
                return
        yield message


@asynccontextmanager
async def building(docker: Docker, params: Mapping[str, Any], context: IO[bytes]) -> AsyncIterator[Any]:
    """A build's words as they come. aiodocker's own `build` cannot be told memory, processor or network."""
    import aiohttp
    from aiodocker.jsonstream import json_stream_stream

    async def chunks() -> AsyncIterator[bytes]:
        while chunk := await anyio.to_thread.run_sync(context.read, 1 << 20):
            yield chunk

    query = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in params.items()}
    headers = {"content-type": "application/x-tar"}
    async with docker._query(
        "build", "POST", params=query, headers=headers, data=chunks(), timeout=aiohttp.ClientTimeout()
    ) as response:
        yield json_stream_stream(response)
