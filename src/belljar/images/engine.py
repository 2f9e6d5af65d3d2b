"""Questions about images to an engine: each under a deadline, each answer read into our own types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from belljar.core import errors
from belljar.core.image_name import Reference, is_digest
from belljar.host.docker_api import (
    NOT_FOUND,
    EngineRefusal,
    ask_registry,
    connected,
    list_containers,
    pulling,
    refusals,
    translated,
    version_of,
)
from belljar.host.engine_address import EngineAddress
from belljar.images.progress import Listener, Progress
from belljar.images.references import ImageFacts, digests_of

if TYPE_CHECKING:
    from aiodocker import Docker

QUICK_SECONDS = 30.0  # for what an engine answers from its own memory


@asynccontextmanager
async def image_client(address: EngineAddress) -> AsyncIterator[Docker]:
    """Yields a client of the engine, and raises what goes wrong in between as one of our errors.

    The connection is closed in any case, and with it what the engine was still doing for us.
    """
    async with connected(address) as docker:
        with translated(f"{address.flavour.name} said", fix=address.flavour.start, registry=True):
            yield docker


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raises `BackendTimeout`, which says what took so long, if what is inside has not ended in time."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise errors.BackendTimeout(
            f"{what}: no end after {seconds:g} s", fix="check the engine and the registry, or allow more time"
        ) from None


# --- one question, one answer ------------------------------------------------------------------


async def inspect(docker: Docker, name: str, reference: Reference, built: Collection[str] = ()) -> ImageFacts | None:
    """Returns what the engine says of an image, or None if the engine does not have it.

    Args:
        docker: A client of the engine.
        name: Any of the image's names, or its id.
        reference: The name that the caller knows it by.
        built: Ids of the images that were built here.
    """
    try:
        with refusals(), deadline(QUICK_SECONDS, f"inspecting {name}"):
            found = await docker.images.inspect(name)
    except EngineRefusal as refusal:
        if refusal.status == NOT_FOUND:
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


class EngineTraits(NamedTuple):
    """What kind of engine it is, and whether it can limit a build."""

    podman: bool
    limits: bool  # of memory and processors


async def traits(docker: Docker) -> EngineTraits:
    """Asks the engine what it can do for a build."""
    with deadline(QUICK_SECONDS, "asking what the engine can do"):
        said: dict[str, Any] = dict(await docker.system.info())
    rootless = said.get("Rootless") or "rootless" in str(said.get("SecurityOptions"))
    # Without root, control groups version 1 let nobody set a limit; Podman says that it could.
    limits = bool(said.get("MemoryLimit") and said.get("CpuCfsQuota"))
    limits = limits and not (rootless and str(said.get("CgroupVersion", "1")) == "1")
    return EngineTraits(await _is_podman(docker), limits)


async def _is_podman(docker: Docker) -> bool:
    with deadline(QUICK_SECONDS, "asking for the version"):
        said = await version_of(docker)
    return any("podman" in str(part.get("Name", "")).lower() for part in said.get("Components") or ())


def network_of(build: EngineTraits, allowed: bool) -> dict[str, Any]:
    """Returns the parameters that give a build's steps their network, or none.

    Podman does not know the word "none", and its default is the host's own network: it wants these words, and a
    namespace.
    """
    if not build.podman:
        return {"networkmode": "default" if allowed else "none"}
    own = [{"Name": "network", "Host": False, "Path": ""}]
    return {"networkmode": "NetworkDefault" if allowed else "NetworkDisabled", "nsoptions": own}


async def listed(docker: Docker, **filters: list[str]) -> tuple[ImageFacts, ...]:
    """Returns all images of the engine that pass the engine's own filters."""
    with deadline(QUICK_SECONDS, "listing images"):
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
    """Returns the ids of the images of all containers, also of those that do not run."""
    with deadline(QUICK_SECONDS, "listing containers"):
        containers = await list_containers(docker)
    return frozenset(str(container["ImageID"]) for container in containers)


async def remote_digest(docker: Docker, reference: Reference, seconds: float) -> str:
    """Returns the digest that the name has in its registry now; empty where an engine cannot ask or gets no answer."""
    try:
        with deadline(seconds, f"asking the registry for {reference}"):
            answer = await ask_registry(docker, f"{reference.name}:{reference.tag}")
    except EngineRefusal:
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
    """Pulls an image to the end. A stream that breaks off looks like one that ends well, so the caller must look."""
    what = f"pulling {target}"
    with deadline(seconds, what):
        async with pulling(docker, target) as messages:
            async for message in patient(messages, stall, what):
                detail = message.get("progressDetail") or {}
                listener(
                    Progress(
                        image=target, step=str(message.get("status", ""))[:200], layer=str(message.get("id", ""))[:80],
                        current=int(detail.get("current") or 0), total=int(detail.get("total") or 0),
                    )
                )  # fmt: skip


async def patient(stream: AsyncIterator[dict[str, Any]], stall: float, what: str) -> AsyncIterator[dict[str, Any]]:
    """Yields the same messages, and raises `BackendTimeout` when none has come for `stall` seconds."""
    while True:
        with deadline(stall, f"{what}, without any progress"):
            try:
                message = await anext(stream)
            except StopAsyncIteration:
                return
        yield message
