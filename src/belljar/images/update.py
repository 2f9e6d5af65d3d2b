"""Moves the pins of the lock file to what the registries have today."""

from __future__ import annotations

from collections.abc import Sequence

from belljar.core import errors
from belljar.images import engine
from belljar.images.engine import image_client
from belljar.images.progress import Listener
from belljar.images.pull import ImageOutcome, Puller


class Updater:
    """Moves pins to what the registry has today."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._settings = puller.settings

    async def update(self, names: Sequence[str], check: bool, listener: Listener) -> tuple[ImageOutcome, ...]:
        """See `Images.update`."""
        if self._settings.update_policy == "never":
            raise errors.PolicyDenied(
                "images.update_policy is never: pins are moved by hand", fix="belljar images lock",
                context={"rule": "update_policy"},
            )  # fmt: skip
        look_only = check or self._settings.update_policy == "check"
        outcomes = []
        for name in names or tuple(self._puller.records.lock().images):
            try:
                outcomes.append(await self._update(name, look_only, listener))
            except errors.BelljarError as error:
                outcomes.append(ImageOutcome.failed(name, error))
        return tuple(outcomes)

    async def _update(self, name: str, look_only: bool, listener: Listener) -> ImageOutcome:
        reference = self._puller.parse(name)
        pin = self._puller.records.lock().pin(reference)
        if pin is not None and pin.of == "engine":
            return _fine(name, "built here: build it again to update it", pin.digest)
        async with image_client(self._puller.address) as docker:
            remote = await engine.remote_digest(docker, reference, self._settings.stall_timeout)
            if not remote and look_only:
                raise errors.ImageNotFound(
                    f"no registry says what {reference} is now",
                    fix="check its name and registry; Podman cannot ask without pulling: update without --check",
                )
            if pin is not None and remote == pin.digest:
                return _fine(name, "up to date", remote)
            if look_only:
                return _fine(name, f"an update is there: {remote}", remote)
            present = await self._puller.look(docker, reference)
            facts = await self._puller.fetch(docker, reference, present, listener, moving=True)
        if pin is not None and facts.is_(pin.digest):
            return _fine(name, "up to date", pin.digest)
        self._puller.pin(reference, facts)
        return _fine(name, "updated", facts.pin)


def _fine(name: str, text: str, digest: str) -> ImageOutcome:
    return ImageOutcome(reference=name, ok=True, text=text, digest=digest)
