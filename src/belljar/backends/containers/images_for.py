"""Which image a container is made of: chosen by type of work and language, trusted by the rules for images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from belljar.core import errors
from belljar.core.languages import Language, Languages
from belljar.core.settings import EXECUTION, ContainerSettings, ImageSettings
from belljar.host.docker_api import NOT_FOUND, EngineRefusal, asking, refusals

if TYPE_CHECKING:
    from aiodocker import Docker

    from belljar.images.images import Images

_TRUSTED_SECONDS = 60.0  # that an image's lock, signature and scan need not be looked at again
_REMEMBERED_SECONDS = 10.0  # that a name is taken to mean the same image


class _Found(NamedTuple):
    id: str = ""
    volumes: tuple[str, ...] = ()


class ImagesFor:
    """Chooses images for one engine's containers."""

    def __init__(
        self,
        options: ContainerSettings,
        rules: ImageSettings,
        images: Callable[[], Images],
        languages: Languages | None = None,
    ) -> None:
        """Remembers what to choose from; nothing is asked yet.

        Args:
            options: Which image each type of work and each language has.
            rules: When to pull an image, and what it takes to trust one.
            images: Opens the engine's images, on first use.
            languages: Those that Belljar knows; without any: the built-in ones.
        """
        self._options = options
        self._rules = rules
        self._images = images
        self.languages: Languages = languages or Languages()
        self._trusted: dict[str, tuple[float, str]] = {}  # image -> until when it counts, and its id
        self._found: dict[str, tuple[float, _Found]] = {}  # image -> until when it counts, and what it is

    # --- choosing ---

    def image_for(self, language: str | None, kind: str | None = None) -> str:
        """Returns the image for a run.

        Args:
            language: What the code is written in; None: a command.
            kind: The type of work that was named. Without one it is the language's own image, or that of snippets.

        Raises:
            InvalidRequest: The type of work runs in the project's image, and nobody said which that is.
        """
        known = None if kind else self.language(language)
        image = (self.image_of(known) if known else "") or self._options.image_of(kind or EXECUTION)
        if image:
            return image
        raise errors.InvalidRequest(
            f"the container type {kind or EXECUTION} runs in the project's image, and nobody said which that is",
            fix=f'give image=…, "image" in the block `sandbox` of the project\'s JSON, '
            f"or container.images.{kind or EXECUTION} in the settings",
        )

    def image_of(self, language: Language) -> str:
        """Returns a language's image; empty if it has none."""
        options = self._options
        return (
            language.image or options.images.get(language.name, "") or options.image_of(options.type_of(language.name))
        )

    def language(self, name: str | None) -> Language | None:
        """Returns the language of that name, if there is one."""
        with suppress(errors.InvalidRequest):
            return self.languages.get(name) if name else None
        return None

    # --- asking the engine ---

    async def is_here(self, client: Docker, image: str) -> bool:
        """Says whether the engine has an image."""
        async with asking(f"the image {image}", errors.NotAvailable):
            try:
                with refusals():
                    await client.images.inspect(image)
            except EngineRefusal as refusal:
                if refusal.status != NOT_FOUND:
                    raise
                return False
        return True

    @property
    def may_pull(self) -> bool:
        """Whether the rules let a missing image be pulled."""
        return self._rules.image_pull_policy != "never"

    async def pull(self, image: str) -> None:
        """Pulls an image, by the rules for images."""
        await self._images().pull(image)

    async def trusted(self, image: str) -> str:
        """Returns what to run: the image's name; where the rules ask for more, the id of what they let through."""
        rules = self._rules
        asked = rules.require_lock or rules.require_signature or rules.require_scan
        if not asked and rules.image_pull_policy != "always":
            return image
        until, known = self._trusted.get(image, (0.0, ""))
        if time.monotonic() > until:
            known = (await self._images().pull(image)).image.id
            self._trusted[image] = (time.monotonic() + _TRUSTED_SECONDS, known)
        return known

    async def volumes_of(self, client: Docker, image: str) -> tuple[str, ...]:
        """Returns the folders that an image declares as volumes: the engine would put those on its disk."""
        return (await self._look(client, image)).volumes

    async def id_of(self, client: Docker, image: str) -> str:
        """Returns the id of what the engine has under an image's name; empty if it has nothing."""
        return (await self._look(client, image)).id

    async def _look(self, client: Docker, image: str) -> _Found:
        until, known = self._found.get(image, (0.0, _Found()))
        if time.monotonic() > until:
            known = _Found()
            with suppress(errors.ImageNotFound):  # which its container's creation says with a remedy
                async with asking("the image", errors.StartFailed):
                    facts = await client.images.inspect(image)
                volumes = (facts.get("Config") or {}).get("Volumes") or {}
                known = _Found(str(facts.get("Id") or ""), tuple(sorted({os.path.normpath(path) for path in volumes})))
                self._found[image] = (time.monotonic() + _REMEMBERED_SECONDS, known)
        return known
