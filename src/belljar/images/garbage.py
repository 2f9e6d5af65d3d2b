"""Removes images: one by its name, or all that we built and nobody uses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from belljar.core.labels import LABEL
from belljar.core.model import Model
from belljar.host.docker_api import NOT_FOUND, EngineRefusal, refusals
from belljar.images import engine, rules
from belljar.images.engine import image_client
from belljar.images.pull import Puller
from belljar.images.references import ImageFacts

if TYPE_CHECKING:
    from aiodocker import Docker


class GarbageReport(Model):
    """What was removed (or would be), and why the rest was kept."""

    removed: tuple[ImageFacts, ...]
    kept: Mapping[str, str]
    freed: int
    dry_run: bool


async def remove(puller: Puller, name: str, *, force: bool) -> ImageFacts:
    """Removes an image, and what is known of it if no other name is left."""
    facts, reference = await puller.present(name), puller.parse(name)
    async with image_client(puller.address) as docker:
        with engine.deadline(engine.QUICK_SECONDS, f"removing {name}"):
            await docker.images.delete(reference.local, force=force)
        if await engine.inspect(docker, facts.id, reference) is None:
            puller.records.forget(facts.id, *facts.digests)
    return facts


async def collect(puller: Puller, age: float, *, dry_run: bool) -> GarbageReport:
    """Removes the images of ours that are unused, unpinned and older than `age` seconds."""
    records = puller.records
    async with image_client(puller.address) as docker:
        found = rules.collect(
            await engine.listed(docker, label=[f"{LABEL}=1"]), used=await engine.used(docker),
            built=records.built(), lock=records.lock(), older_than=time.time() - age,
        )  # fmt: skip
        kept = {image.reference: why for image, why in found.kept}
        removed = []
        for image in found.remove:
            objection = "" if dry_run else await _remove_one(docker, image)
            if objection:
                kept[image.reference] = objection
                continue
            removed.append(image)
            if not dry_run:
                records.forget(image.id)
    freed = sum(image.size for image in removed)
    return GarbageReport(removed=tuple(removed), kept=kept, freed=freed, dry_run=dry_run)


async def _remove_one(docker: Docker, image: ImageFacts) -> str:
    """Removes an image; returns what the engine says against it, or nothing."""
    try:
        with refusals(), engine.deadline(engine.QUICK_SECONDS, f"removing {image.reference}"):
            # By name where it has one, and never by force: a container that appeared meanwhile keeps its image.
            await docker.images.delete(image.tags[0] if image.tags else image.id)
    except EngineRefusal as refusal:
        return "" if refusal.status == NOT_FOUND else refusal.message or "the engine says no"
    return ""
