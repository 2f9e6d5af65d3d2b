"""Which image a container is made of: chosen by type of work and language, brought and trusted by the rules."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from belljar.core import errors, image_name
from belljar.core.labels import TAG_LABEL
from belljar.core.languages import Language, Languages
from belljar.core.settings import EXECUTION, HARDENED_IMAGES, LANGUAGE_IMAGES, ContainerSettings, ImageSettings
from belljar.core.values import WORKSPACE
from belljar.core.version import __version__
from belljar.host.docker_api import asking

if TYPE_CHECKING:
    from aiodocker import Docker

    from belljar.images.images import Images

_TRUSTED_SECONDS = 60.0  # that an image's lock, signature and scan need not be looked at again
_REMEMBERED_SECONDS = 10.0  # that a name is taken to mean the same image, or none
Told = Callable[[str], object]


class _Found(NamedTuple):
    id: str = ""
    volumes: tuple[str, ...] = ()
    built_as: str = ""  # the name that Belljar built it as
    has_workspace: bool = False  # does it have a /workspace of its own, as its working directory?
    path: str = ""  # where its programs are, as PATH says it


class ImagesFor:
    """Chooses images for one engine's containers."""

    def __init__(
        self,
        options: ContainerSettings,
        rules: ImageSettings,
        images: Callable[[], Images],
        languages: Languages | None = None,
        told: Told = lambda step: None,
    ) -> None:
        """Remembers what to choose from; nothing is asked yet.

        Args:
            options: Which image each type of work and each language has.
            rules: When to pull an image, and what it takes to trust one.
            images: Opens the engine's images, on first use.
            languages: Those that Belljar knows; without any: the built-in ones.
            told: Hears how far a pull is.
        """
        self._options = options
        self._rules = rules
        self._images = images
        self.languages: Languages = languages or Languages()
        self._told = told
        self._trusted: dict[str, tuple[float, str]] = {}  # image -> until when it counts, and its id
        self._found: dict[str, tuple[float, _Found]] = {}  # image -> until when it counts, and what it is

    # --- choosing ---

    def image_for(self, language: str | None, kind: str | None = None) -> str:
        """Returns the image that the settings name for a run.

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
        named = language.image or options.images.get(language.name, "")
        return named or options.image_of(options.type_of(language.name)) or LANGUAGE_IMAGES.get(language.name, "")

    def language(self, name: str | None) -> Language | None:
        """Returns the language of that name, if there is one."""
        with suppress(errors.InvalidRequest):
            return self.languages.get(name) if name else None
        return None

    async def choose(self, client: Docker, language: str | None, kind: str | None = None) -> str:
        """Returns the image for a run: one of ours where that was built and nobody named another, else `image_for`.

        Where policy asks for signatures or a lock, ours are used only by name: nobody signed or pinned them.
        """
        named = self.image_for(language, kind)
        if self._rules.require_signature or self._rules.require_lock:
            return named
        for ours in self._hardened(language, kind):
            found = await self._look(client, ours)
            if found.built_as == ours:
                return ours
            self._found[ours] = (time.monotonic() + _REMEMBERED_SECONDS, found)  # also that there is none
        return named

    def _hardened(self, language: str | None, kind: str | None) -> Iterator[str]:
        """The names of our own images that may stand in for the usual one."""
        known = None if kind else self.language(language)
        uses = [kind or (self._options.type_of(known.name) if known else EXECUTION)]
        if known:
            uses.insert(0, known.name)
        if (known and known.image) or not all(map(self._options.usual_image, uses)):
            return
        for use in uses:
            yield from (f"belljar/{name}:{__version__}" for name in HARDENED_IMAGES.get(use, ()))

    # --- asking the engine ---

    async def is_here(self, client: Docker, image: str) -> bool:
        """Says whether the engine has an image now."""
        self.forget()
        return bool(await self._here(client, image))

    def forget(self) -> None:
        """Forgets what the engine said: it is asked anew."""
        self._found.clear()

    @property
    def may_pull(self) -> bool:
        """Whether the rules let a missing image be pulled."""
        return self._rules.image_pull_policy != "never"

    async def ready(self, client: Docker, image: str, told: Told = lambda step: None) -> str:
        """Brings an image by the rules, and returns what to run: its name, or the id of what the rules let through.

        Args:
            client: Of the engine.
            image: Its name.
            told: Hears how far a pull is, like the one of `__init__`.

        Raises:
            ImageNotFound: It is not here and policy pulls nothing, or no registry has it.
            PullFailed: It did not arrive whole.
            ImageRefused: The rules speak against it.
        """
        rules = self._rules
        strict = rules.require_lock or rules.require_signature or rules.require_scan
        if not strict and rules.image_pull_policy != "always":
            return await self._here(client, image) or await self._pull(image, told, missing=True)
        until, known = self._trusted.get(image, (0.0, ""))
        if time.monotonic() > until:
            known = await self._pull(image, told)
            self._trusted[image] = (time.monotonic() + _TRUSTED_SECONDS, known)
        return known

    async def _pull(self, image: str, told: Told, *, missing: bool = False) -> str:
        """Has an image pulled if policy says so, and returns its id."""
        from belljar.images.progress import PullText

        def tell(step: str) -> None:
            for each in dict.fromkeys((self._told, told)):  # who sets a backend up may be the one who made it
                each(step)

        text = PullText(image, tell, begun=missing and self.may_pull)
        try:
            done = await self._images().pull(image, listener=text)
        except (errors.NotAvailable, errors.ExecutionFailed) as error:
            fix = (
                f"check its name and the network, or choose an image that is here; by hand: belljar images pull {image}"
            )
            raise errors.PullFailed(f"{image} could not be pulled: {error.message}", fix=fix) from None
        text.finish()
        self.forget()
        return done.image.id

    async def _here(self, client: Docker, image: str) -> str:
        """The name under which the engine has an image; empty if it has none. The settings' registry goes first."""
        names = [image]
        with suppress(errors.InvalidRequest):
            names.insert(0, image_name.parse(image, self._rules.image_registry).local)
        for name in dict.fromkeys(names):
            if (await self._look(client, name)).id:
                return name
        return ""

    async def volumes_of(self, client: Docker, image: str) -> tuple[str, ...]:
        """Returns the folders that an image declares as volumes: the engine would put those on its disk."""
        return (await self._look(client, image)).volumes

    async def has_workspace(self, client: Docker, image: str) -> bool:
        """Says whether an image has a /workspace of its own, as far as it tells: its working directory is there."""
        return (await self._look(client, image)).has_workspace

    async def path_of(self, client: Docker, image: str) -> str:
        """Returns an image's PATH; empty if it says none."""
        return (await self._look(client, image)).path

    async def id_of(self, client: Docker, image: str) -> str:
        """Returns the id of what the engine has under an image's name; empty if it has nothing."""
        return (await self._look(client, image)).id

    async def _look(self, client: Docker, image: str) -> _Found:
        until, known = self._found.get(image, (0.0, _Found()))
        if time.monotonic() > until:
            known = _Found()
            with suppress(errors.ImageNotFound):
                async with asking("the image", errors.StartFailed):
                    facts = await client.images.inspect(image)
                config = facts.get("Config") or {}
                volumes = tuple(sorted({os.path.normpath(path) for path in config.get("Volumes") or {}}))
                built_as = str((config.get("Labels") or {}).get(TAG_LABEL, ""))
                inside = f"{config.get('WorkingDir') or ''}/".startswith(f"{WORKSPACE}/")
                said = dict(str(each).partition("=")[::2] for each in config.get("Env") or ())
                known = _Found(str(facts.get("Id") or ""), volumes, built_as, inside, said.get("PATH", ""))
                self._found[image] = (time.monotonic() + _REMEMBERED_SECONDS, known)
        return known
