"""What an engine says of the image behind a name. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field

from belljar.core.image_name import Reference, is_digest
from belljar.core.model import Model


class ImageFacts(Model):
    """An image on the engine."""

    reference: str
    id: str
    digest: str = Field("", description="of its manifest in the registry; empty: it was never in one")
    digests: tuple[str, ...] = Field((), description="all that its repository knows it by: one image can have several")
    size: int = 0
    created: float = 0
    labels: Mapping[str, str] = Field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        """What a lock pins: the registry's digest, or the image's own id where no registry knows it."""
        return self.digest or self.id

    @property
    def pinned(self) -> str:
        """Its name, and which one it is."""
        return f"{self.reference.partition('@')[0]}@{self.pin}"

    def by(self, digest: str) -> ImageFacts:
        """The same, known by another of its digests."""
        return self.model_copy(update={"digest": digest}) if digest in self.digests else self

    def is_(self, wanted: str) -> bool:
        """Says whether this is the image of that id or digest."""
        return wanted in (self.id, self.digest, *self.digests)


def digests_of(reference: Reference, repo_digests: Iterable[object]) -> tuple[str, ...]:
    """Returns the digests that an image has in the reference's own repository, from the engine's `RepoDigests`."""
    pairs = [str(entry).partition("@")[::2] for entry in repo_digests]
    good = [(name, digest) for name, digest in pairs if is_digest(digest)]
    exact = {digest for name, digest in good if name == reference.name}
    # Podman and containerd write the hub's names in full, others do not.
    return tuple(sorted(exact or {digest for name, digest in good if name.endswith(f"/{reference.name}")}))
