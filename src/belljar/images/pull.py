"""Pulls images by policy: compared with the lock, vouched for, and only then given their names.

An image gets its name last. It is looked up in the registry, compared with the lock, its signature checked, fetched by
digest, scanned, and only then tagged: what was refused on the way never had a name that somebody could run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from belljar.core import errors, image_name
from belljar.core.image_name import Reference
from belljar.core.model import Model
from belljar.core.settings import ImageSettings
from belljar.host.engine_address import EngineAddress
from belljar.images import engine, rules
from belljar.images.engine import image_client
from belljar.images.lock import Pin
from belljar.images.progress import Listener
from belljar.images.records import ImageRecords, new_pin
from belljar.images.references import ImageFacts
from belljar.images.rules import PullPolicy
from belljar.images.trust import Trust

if TYPE_CHECKING:
    from aiodocker import Docker

_PREPULLS = 3  # at once


class Pulled(Model):
    """An image that is here and trusted, and whether it had to be fetched."""

    image: ImageFacts
    pulled: bool
    reason: str


class ImageOutcome(Model):
    """What became of one image of several."""

    reference: str
    ok: bool
    text: str
    digest: str = ""
    error: Mapping[str, Any] | None = None

    @classmethod
    def failed(cls, reference: str, error: errors.BelljarError) -> ImageOutcome:
        """Returns the outcome of an image that could not be had."""
        return cls(reference=reference, ok=False, text=error.message, error=error.as_dict())


class Puller:
    """Brings images to one engine, under one set of rules."""

    def __init__(self, settings: ImageSettings, address: EngineAddress, records: ImageRecords) -> None:
        self.settings = settings
        self.address = address
        self.records = records
        self.trust: Trust = Trust(settings, records, address.url)

    def parse(self, name: str) -> Reference:
        """Checks a name; one without a registry gets the one of the settings."""
        return image_name.parse(name, self.settings.image_registry)

    async def look(self, docker: Docker, reference: Reference) -> ImageFacts | None:
        """Returns what the engine has under a name, or None."""
        return await engine.inspect(docker, reference.local, reference, self.records.built())

    async def present(self, name: str) -> ImageFacts:
        """Returns an image that is on the engine, or raises `ImageNotFound`."""
        reference = self.parse(name)
        async with image_client(self.address) as docker:
            facts = await self.look(docker, reference)
        if facts is None:
            raise errors.ImageNotFound(
                f"{reference} is not on this engine", fix=f"belljar images pull {reference}",
                context={"image": str(reference)},
            )  # fmt: skip
        return facts

    async def pull(self, name: str, policy: PullPolicy | None, listener: Listener) -> Pulled:
        """See `Images.pull`."""
        reference = self.parse(name)
        pin = self.records.lock().pin(reference)
        async with image_client(self.address) as docker:
            present = await self.look(docker, reference)
            present = present.by(pin.digest) if present and pin else present
            step = rules.pull_step(reference, policy or self.settings.image_pull_policy, present, pin)
            if not step.pull:
                assert present is not None
                rules.check_pin(reference, pin, present, self.settings)
                await self.trust.check(reference, present)
                return Pulled(image=present, pulled=False, reason=step.reason)
            facts = await self.fetch(docker, reference, present, listener)
        return Pulled(image=facts, pulled=True, reason=step.reason)

    async def fetch(
        self,
        docker: Docker,
        reference: Reference,
        present: ImageFacts | None,
        listener: Listener,
        *,
        moving: bool = False,
    ) -> ImageFacts:
        """Pulls an image, checks it, and names it; one that is refused is removed again.

        Args:
            docker: A client of the engine.
            reference: The image.
            present: What the engine has under that name so far.
            listener: Is told of each step.
            moving: The pin is about to be changed, so it does not count.
        """
        pin = None if moving else self.records.lock().pin(reference)
        digest = await self._digest(docker, reference, pin)
        if digest and self.settings.require_signature:
            await self.trust.check_signature(reference, digest)
        target = reference.at(digest) if digest else str(reference)
        limits = {"seconds": self.settings.pull_timeout, "stall": self.settings.stall_timeout}
        await engine.pull(docker, target, listener=listener, **limits)
        facts = await engine.inspect(docker, target, reference)
        if facts is None:
            raise errors.PullFailed(f"the engine pulled {target}, and does not have it", fix="try again")
        facts = facts.by(digest)
        try:
            rules.check_pin(reference, pin, facts, _unlocked(self.settings) if moving else self.settings)
            await self.trust.check(reference, facts, signed=bool(digest))
        except BaseException:
            await _discard(docker, reference, target, present)
            raise
        if digest and reference.tag:
            await docker.images.tag(target, reference.name, tag=reference.tag)
        self.records.note_fetched(facts.id)
        return facts

    async def _digest(self, docker: Docker, reference: Reference, pin: Pin | None) -> str:
        """Which manifest to fetch: the one that was named, the pinned one, or what the registry says now."""
        if reference.digest:
            return reference.digest
        remote = await engine.remote_digest(docker, reference, self.settings.stall_timeout)
        rules.check_remote(reference, pin, remote)
        return pin.digest if pin else remote

    async def prepull(self, names: Sequence[str], listener: Listener) -> tuple[ImageOutcome, ...]:
        """See `Images.prepull`."""
        names = tuple(dict.fromkeys(names or self.settings.prepull))
        found: dict[str, ImageOutcome] = {}
        places = anyio.CapacityLimiter(_PREPULLS)

        async def one(name: str) -> None:
            async with places:
                try:
                    done = await self.pull(name, None, listener)
                except errors.BelljarError as error:
                    found[name] = ImageOutcome.failed(name, error)
                else:
                    text = "pulled" if done.pulled else done.reason
                    found[name] = ImageOutcome(reference=name, ok=True, text=text, digest=done.image.pin)

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(one, name)
        return tuple(found[name] for name in names)

    def pin(self, reference: Reference, facts: ImageFacts) -> None:
        """Writes into the lock file that the name means this image."""
        pin = new_pin(facts.pin, in_registry=bool(facts.digest))
        self.records.save_lock(self.records.lock().moved(reference, pin))


def _unlocked(settings: ImageSettings) -> ImageSettings:
    return settings.model_copy(update={"require_lock": False})


async def _discard(docker: Docker, reference: Reference, target: str, present: ImageFacts | None) -> None:
    """Takes back what was fetched and then refused: the name means again what it meant before, or nothing."""
    with anyio.move_on_after(engine.QUICK_SECONDS, shield=True), suppress(Exception):
        if present is None or target != reference.at(present.digest):
            await docker.images.delete(target)
        if present is not None and target == str(reference):
            await docker.images.tag(present.id, reference.name, tag=reference.tag)
