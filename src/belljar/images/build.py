"""Builds images from folders that nobody has read, within limits, on bases that came in under the same policy."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import anyio.to_thread

from belljar.core import errors
from belljar.core.image_name import Reference, parse
from belljar.core.labels import BASES_LABEL, LABEL, TAG_LABEL
from belljar.core.settings import Caps
from belljar.core.values import GIB, MIB, format_size, parse_size
from belljar.host.docker_api import EngineRefusal, building, translate
from belljar.images import context, dockerfile, engine
from belljar.images.build_log import BuildLog, BuildReport
from belljar.images.engine import image_client
from belljar.images.progress import Listener, Progress
from belljar.images.pull import Puller
from belljar.images.references import ImageFacts

LANGUAGES = ("python", "node", "bash", "go", "rust")
_CPU_PERIOD = 100_000
_USUAL_MEMORY_BYTES, _USUAL_CPUS = 2 * GIB, 2.0
_LEAST_MEMORY_BYTES = 4 * MIB


class Recipe(NamedTuple):
    """All that a build is asked for."""

    folder: str
    tag: str
    file: str = "Dockerfile"
    memory: str | int | None = None
    cpus: float | None = None
    network: bool = False
    arguments: Mapping[str, str] = {}
    given: Sequence[ImageFacts] = ()  # bases that came in already; the Dockerfile knows them by their ids


class Builder:
    """Builds images on one engine, under one set of rules."""

    def __init__(self, puller: Puller, caps: Caps) -> None:
        self._puller = puller
        self._settings = puller.settings
        self._address = puller.address
        self._caps = caps

    async def build(self, recipe: Recipe, listener: Listener) -> BuildReport:
        """See `Images.build`."""
        reference = parse(recipe.tag)
        if reference.digest:
            raise errors.InvalidRequest("tag: a build cannot be told its digest", fix="give name:tag")
        if recipe.network and self._settings.build_network == "never":
            raise errors.PolicyDenied("images.build_network: builds have no network here", fix="build without it")
        params, weaker = await self._walls(recipe)
        params |= {
            "t": str(reference), "dockerfile": dockerfile.build_file(recipe.file), "rm": True, "forcerm": True,
            "buildargs": dict(recipe.arguments),
        }  # fmt: skip
        with tempfile.TemporaryFile(prefix="belljar-context-") as archive:
            packed = await anyio.to_thread.run_sync(self._pack, recipe.folder, params["dockerfile"], archive)
            bases = await self._bases(recipe, packed.dockerfile, listener)
            params["labels"] = {LABEL: "1", TAG_LABEL: str(reference), BASES_LABEL: " ".join(bases)}
            archive.seek(0)
            report = await self._run(reference, params, archive, listener)
        return report.model_copy(update={"left_out": packed.left_out, "bases": bases, "weaker": weaker})

    async def _bases(self, recipe: Recipe, text: str, listener: Listener) -> tuple[str, ...]:
        """Brings in all images that the Dockerfile starts from, and returns which they are."""
        if not recipe.network:
            dockerfile.check_sources(text)
        known = {facts.id: facts for facts in recipe.given}
        names = dockerfile.bases(text, recipe.arguments)
        used = [known.get(name) or await self._bring(name, listener) for name in names]
        return tuple(facts.pinned for facts in used)

    async def _bring(self, base: str, listener: Listener) -> ImageFacts:
        """A base, under the very name that the Dockerfile has for it: the engine must not look for it elsewhere."""
        done, plain = await self._puller.pull(base, None, listener), parse(base)
        if str(plain) == done.image.reference:
            return done.image
        if plain.digest:
            raise errors.InvalidRequest(f"Dockerfile: {base} has no registry", fix=f"write {done.image.reference}")
        async with image_client(self._address) as docker:
            await docker.images.tag(done.image.id, plain.name, tag=plain.tag)
        return done.image

    def _pack(self, folder: str, file: str, archive: IO[bytes]) -> context.Packed:
        return context.pack(folder, file, archive, limit=self._settings.build_context)

    async def _walls(self, recipe: Recipe) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Limits and network of the steps, and the limits that this engine cannot hold.

        Those that were asked for are then refused; of the others the report tells.
        """
        limits = self._limits(recipe.memory, recipe.cpus)
        async with image_client(self._address) as docker:
            traits = await engine.traits(docker)
        walls = engine.network_of(traits, recipe.network)
        if traits.limits:
            return walls | limits, ()
        if recipe.memory is not None or recipe.cpus is not None:
            raise errors.NotAvailable(
                "this engine cannot limit a build: it has no root, and no control groups of its own",
                fix="leave out memory and cpus, or use control groups version 2, or an engine with root",
            )
        return walls, ("memory is not limited", "cpus is not limited")

    def _limits(self, memory: str | int | None, cpus: float | None) -> dict[str, Any]:
        caps = self._caps
        try:
            size = min(_USUAL_MEMORY_BYTES, caps.memory) if memory is None else int(str(parse_size(memory)))
        except ValueError as error:
            raise errors.InvalidRequest(f"memory: {error}") from None
        share = min(_USUAL_CPUS, caps.cpus) if cpus is None else cpus
        if size < _LEAST_MEMORY_BYTES or not share > 0:
            raise errors.InvalidRequest("memory and cpus: give at least 4M, and more than nothing")
        if size > caps.memory or share > caps.cpus:
            raise errors.PolicyDenied(
                f"build: {format_size(size)}, {share:g} cpus: the caps are {format_size(caps.memory)}, {caps.cpus:g}",
                fix="ask for less, or have the administrator raise the caps",
                context={"field": "memory" if size > caps.memory else "cpus"},
            )
        return {"memory": size, "memswap": size, "cpuperiod": _CPU_PERIOD, "cpuquota": int(share * _CPU_PERIOD)}

    async def _run(
        self, reference: Reference, params: Mapping[str, Any], archive: IO[bytes], listener: Listener
    ) -> BuildReport:
        log, began, failed = BuildLog(), time.monotonic(), dict[str, Any]()
        async with image_client(self._address) as docker:
            try:
                with engine.deadline(self._settings.build_timeout, f"building {reference}"):
                    async with building(docker, params, archive) as messages:
                        async for message in messages:
                            for line in log.feed(message):
                                listener(Progress(image=str(reference), step=line, current=log.number, total=log.total))
            except EngineRefusal as refusal:
                failed = _build_failure(refusal)
            facts = None if failed else await engine.inspect(docker, str(reference), reference)
            stages = () if failed else [await engine.inspect(docker, name, reference) for name in log.stages]
        spent = round((time.monotonic() - began) * 1000, 1)
        if failed:
            return BuildReport(
                ok=False, tag=str(reference), step=log.step, last_lines=log.last_lines, duration_ms=spent, **failed
            )
        if facts is None or not log.id:
            raise errors.ExecutionFailed(f"the engine's word on {reference} ended early", fix="build it again")
        for image in (facts, *(stage for stage in stages if stage)):
            self._puller.records.note_built(image.id)
        return BuildReport(ok=True, tag=str(reference), id=facts.id, step=log.step, duration_ms=spent)

    async def build_language(self, language: str, version: str, base: str, listener: Listener) -> BuildReport:
        """See `Images.build_language`."""
        file = f"{language}/Dockerfile"
        if language not in LANGUAGES or not (recipes() / file).is_file():
            raise errors.InvalidRequest(f"{language!r} has no image of ours", fix=f"one of {', '.join(LANGUAGES)}")
        (usual,) = dockerfile.bases((recipes() / file).read_text())
        reference = self._puller.parse(base or usual)
        found = (await self._puller.pull(base or usual, None, listener)).image
        if not reference.digest and self._puller.records.lock().pin(reference) is None:
            self._puller.pin(reference, found)
        arguments = {"BASE_IMAGE": found.id}
        recipe = Recipe(str(recipes()), f"belljar/{language}:{version}", file, arguments=arguments, given=(found,))
        return await self.build(recipe, listener)


def recipes() -> Path:
    """Returns the folder of our Dockerfiles: in the package when it is installed, beside the sources when it is not."""
    installed = Path(__file__).parents[1] / "dockerfiles"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "images"


def _build_failure(refusal: EngineRefusal) -> dict[str, Any]:
    """What the Dockerfile did wrong; what the engine did wrong is raised."""
    told = translate(refusal, "the build", registry=True)
    if isinstance(told, errors.NotAvailable | errors.ImageNotFound) or refusal.status >= 500:
        raise told from None
    code = refusal.detail.get("code")
    if not isinstance(code, int):  # Podman says it in words only
        words = re.search(r"exit status (\d{1,3})$", refusal.message)
        code = int(words[1]) if words else None
    return {"problem": refusal.message[:1000], "exit_code": code}
