"""All that can be done with the images of one engine: the front of this folder.

`pull` brings them, `update` moves their pins, `build` makes them, `garbage` removes them; `rules` decides, `trust` asks
cosign and the scanner, `records` remembers, and `engine` speaks to the container engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from belljar.core.labels import LABEL
from belljar.core.settings import ImageSettings, Settings
from belljar.host.engine_address import FLAVOURS, EngineAddress, docker_address, engine_address
from belljar.images import engine, garbage, rules
from belljar.images.build import Builder, Recipe
from belljar.images.build_log import BuildReport
from belljar.images.engine import image_client
from belljar.images.garbage import GarbageReport
from belljar.images.lock import Lock
from belljar.images.progress import Listener, silent
from belljar.images.pull import ImageOutcome, Pulled, Puller
from belljar.images.records import ImageRecords, new_pin
from belljar.images.references import ImageFacts
from belljar.images.rules import PullPolicy, ScanRecord
from belljar.images.update import Updater


class Images:
    """The images of one engine, under one set of settings."""

    def __init__(
        self, settings: Settings, address: EngineAddress | None = None, *, lock_file: Path | None = None
    ) -> None:
        """Remembers where the engine is; nothing is asked yet.

        Args:
            settings: Belljar's settings.
            address: Where the engine listens; without one: the settings' Docker.
            lock_file: Instead of the settings'.
        """
        self.settings: ImageSettings = settings.images
        self.address: EngineAddress = address or docker_address(settings.docker_socket)
        folder = Path(settings.cache_dir or f"{settings.home}/.cache/belljar") / "images"
        self.records: ImageRecords = ImageRecords(folder, lock_file or Path(self.settings.lock_file))
        self._puller = Puller(self.settings, self.address, self.records)
        self._builder = Builder(self._puller, settings.caps)
        self._trust = self._puller.trust

    # --- having ---

    async def pull(self, name: str, *, policy: PullPolicy | None = None, listener: Listener = silent) -> Pulled:
        """Makes sure that an image is here and trusted. Run it by its `id`, which cannot change under your feet.

        Args:
            name: `[registry/]name[:tag][@sha256:…]`.
            policy: When to ask the registry; without one: the settings'.
            listener: Is told of each step.

        Raises:
            ImageRefused: Its digest, signature or scan speaks against it.
            ImageNotFound: It is not here and may not be pulled, or no registry has it.
            PullFailed: It did not arrive whole.
        """
        return await self._puller.pull(name, policy, listener)

    async def prepull(self, names: Sequence[str] = (), *, listener: Listener = silent) -> tuple[ImageOutcome, ...]:
        """Pulls several at once, without names those of `images.prepull`; one that fails does not stop the others."""
        return await self._puller.prepull(names, listener)

    async def present(self, name: str) -> ImageFacts:
        """Returns an image that is on the engine, or raises `ImageNotFound`."""
        return await self._puller.present(name)

    async def list(self, *, ours: bool = False) -> tuple[ImageFacts, ...]:
        """Returns the images of the engine by name; `ours`: only those that Belljar built."""
        async with image_client(self.address) as docker:
            found = await engine.listed(docker, **({"label": [f"{LABEL}=1"]} if ours else {}))
        return tuple(sorted(found, key=lambda image: image.reference))

    # --- trusting ---

    async def lock(self, names: Sequence[str], *, by: str = "") -> Lock:
        """Pins the images as they are on the engine now; without names, those of `images.prepull`."""
        lock = self.records.lock()
        for name in names or self.settings.prepull:
            reference, facts = self._puller.parse(name), await self.present(name)
            lock = lock.moved(reference, new_pin(facts.pin, in_registry=bool(facts.digest), by=by))
        self.records.save_lock(lock)
        return lock

    async def verify(self, name: str) -> ImageFacts:
        """Checks digest, signature and scan of an image that is here, or raises `ImageRefused`.

        Each is checked if policy asks for it; the signature also where a cosign is configured.
        """
        reference, facts = self._puller.parse(name), await self.present(name)
        pin = self.records.lock().pin(reference)
        facts = facts.by(pin.digest) if pin else facts
        rules.check_pin(reference, pin, facts, self.settings)
        if self.settings.cosign or self.settings.require_signature:
            await self._trust.check_signature(reference, facts.digest, again=True)
        await self._trust.check(reference, facts, signed=True)
        return facts

    async def scan(self, name: str, *, again: bool = True) -> ScanRecord:
        """Returns what the scanner says of an image that is here; the record is kept with its id."""
        facts = await self.present(name)
        record = None if again else self.records.scan(facts.id)
        if record is None or rules.is_stale(record, self.settings, time.time()):
            record = await self._trust.scan(facts)
        return record

    # --- keeping ---

    async def update(
        self, names: Sequence[str] = (), *, check: bool = False, listener: Listener = silent
    ) -> tuple[ImageOutcome, ...]:
        """Asks the registry what each pinned name means today, and moves the pin if signature and scan allow it.

        Args:
            names: Which; without any, all that are in the lock.
            check: Only say whether there is something new.
            listener: Is told of each step.

        Raises:
            PolicyDenied: `images.update_policy` is never.
        """
        return await Updater(self._puller).update(names, check, listener)

    async def remove(self, name: str, *, force: bool = False) -> ImageFacts:
        """Removes an image and what is known of it; `force`: also if a container uses it."""
        return await garbage.remove(self._puller, name, force=force)

    async def gc(self, *, older_than: float | None = None, dry_run: bool = False) -> GarbageReport:
        """Removes what we built and nobody uses; everybody else's images stay.

        Args:
            older_than: The least age in seconds; without one: the settings'.
            dry_run: Only say what would go.
        """
        age = self.settings.gc_age if older_than is None else older_than
        return await garbage.collect(self._puller, age, dry_run=dry_run)

    # --- building ---

    async def build(
        self, context_dir: str | Path, tag: str, file: str = "Dockerfile", memory: str | int | None = None,
        cpus: float | None = None, *, network: bool = False, arguments: Mapping[str, str] | None = None,
        listener: Listener = silent,
    ) -> BuildReport:  # fmt: skip
        """Builds a folder. A step that fails is told in the report, and not raised.

        The bases are pulled under the same policy as any other image.

        Args:
            context_dir: The folder.
            tag: What to call the image.
            file: The Dockerfile, relative to the folder.
            memory: The most that a step may use, such as `2G`.
            cpus: The most that a step may use.
            network: Whether the steps may reach the network, if the settings allow that.
            arguments: Values for the Dockerfile's `ARG`s.
            listener: Is told of each step.
        """
        recipe = Recipe(str(context_dir), tag, file, memory, cpus, network, arguments or {})
        return await self._builder.build(recipe, listener)

    async def build_language(
        self, language: str, version: str, *, base: str = "", listener: Listener = silent
    ) -> BuildReport:
        """Builds one of the project's own hardened images, from its own base or another one, passed by its id.

        A base that is not pinned yet is pinned now: the next build starts from the same one, or is refused.
        """
        return await self._builder.build_language(language, version, base, listener)


def of_engines(settings: Settings) -> dict[str, Images]:
    """Returns the images of each kind of container engine, by its name, at the address that the settings give it."""
    return {name: Images(settings, engine_address(name, settings)) for name in FLAVOURS}
