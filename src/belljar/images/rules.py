"""Decides what may be pulled, trusted and removed. No I/O; every refusal is an `ImageRefused`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from belljar.core import errors
from belljar.core.image_name import Reference, parse
from belljar.core.labels import LABEL, TAG_LABEL
from belljar.core.model import Model
from belljar.core.settings import ImageSettings
from belljar.images.lock import Lock, Pin
from belljar.images.references import ImageFacts

PullPolicy = Literal["always", "if-not-present", "never"]
Severity = Literal["negligible", "low", "medium", "high", "critical"]
SEVERITIES: tuple[Severity, ...] = ("negligible", "low", "medium", "high", "critical")


# --- pulling -----------------------------------------------------------------------------------


class PullStep(NamedTuple):
    """What is to be done to have an image: nothing, or a pull of `target`, and why."""

    pull: str
    reason: str


def pull_step(reference: Reference, policy: PullPolicy, present: ImageFacts | None, pin: Pin | None) -> PullStep:
    """Decides whether to pull an image.

    Present means present with the pinned digest; and what is pinned is pulled by digest, so that no tag can move
    between the check and the pull.

    Raises:
        ImageNotFound: It is not here, and policy pulls nothing.
        ImageRefused: Another one is here, and policy pulls nothing.
    """
    wanted = reference.digest or (pin.digest if pin else "")
    here = present is not None and (not wanted or present.is_(wanted))
    if pin is not None and pin.of == "engine":
        if here:
            return PullStep("", "built here and pinned by its id")
        raise _differs(reference, pin.digest, present.pin if present else "nothing") if present else _absent(reference)
    if policy == "never" and not here:
        raise _differs(reference, wanted, present.pin) if present else _absent(reference)
    if policy == "never" or (here and (policy == "if-not-present" or reference.digest)):
        return PullStep("", "it is here")
    return PullStep(reference.at(wanted) if wanted else str(reference), "always" if here else "it is not here")


def _absent(reference: Reference) -> errors.ImageNotFound:
    return errors.ImageNotFound(
        f"{reference} is not on this engine, and policy pulls nothing",
        fix=f"belljar images pull --policy if-not-present {reference}, or build it",
        context={"rule": "pull_policy", "image": str(reference)},
    )


def _differs(reference: Reference, wanted: str, found: str) -> errors.ImageRefused:
    return errors.ImageRefused(
        f"{reference} is {found or 'without a digest'}, and {wanted} is pinned",
        fix="find out who changed it; `belljar images update` moves the pin",
        context={"rule": "digest", "image": str(reference), "pinned": wanted, "found": found},
    )


def check_remote(reference: Reference, pin: Pin | None, remote: str) -> None:
    """Raises `ImageRefused` if the registry says that the name means another image than the pin."""
    if pin is not None and pin.of == "registry" and not reference.digest and remote and remote != pin.digest:
        raise _differs(reference, pin.digest, remote)


def check_pin(reference: Reference, pin: Pin | None, facts: ImageFacts, settings: ImageSettings) -> None:
    """Raises `ImageRefused` if an image is not the one that its name or its pin says, or lacks a pin it must have."""
    wanted = reference.digest or (pin.digest if pin else "")
    if pin is not None and reference.digest and reference.tag and reference.digest != pin.digest:
        raise _differs(reference, pin.digest, reference.digest)
    if wanted and not facts.is_(wanted):
        raise _differs(reference, wanted, facts.pin)
    if settings.require_lock and pin is None:
        raise errors.ImageRefused(
            f"{reference} is not in the lock file {settings.lock_file}, and policy requires it",
            fix=f"belljar images lock {reference}",
            context={"rule": "lock", "image": str(reference)},
        )


# --- signatures --------------------------------------------------------------------------------


def signature_command(reference: Reference, digest: str, settings: ImageSettings) -> list[str]:
    """Returns cosign's command line for the very digest that will be run; a tag could mean another image by then.

    Raises:
        ImageRefused: There is no cosign, no signer is named, or nobody can have signed the image.
    """
    words = settings.cosign_arguments
    anchors = ("--key", "--certificate-identity", "--certificate-identity-regexp")
    problem = fix = ""
    if not settings.cosign:
        problem, fix = "cosign is not configured", "set images.cosign and images.cosign_sha256"
    elif not any(word.partition("=")[0] in anchors for word in words):
        # Without a key or an identity, old versions accept the signature of anybody.
        problem, fix = "images.cosign_arguments name no signer", f"add one of {', '.join(anchors)}"
    elif not digest:
        problem, fix = "it was never in a registry, so nobody can have signed it", "push it, sign it, and pull it"
    if problem:
        raise refused_signature(str(reference), problem, fix)
    return [settings.cosign, "verify", *words, reference.at(digest)]


def refused_signature(image: str, problem: str, fix: str) -> errors.ImageRefused:
    """Returns the refusal of an image for its signature."""
    return errors.ImageRefused(
        f"{image}: policy requires a signature: {problem}", fix=fix, context={"rule": "signature", "image": image}
    )


class SignatureRecord(Model):
    """That cosign accepted an image, kept by its digest; a refusal is never kept."""

    digest: str
    name: str = Field(description="of the repository, registry included")
    at: float
    policy: str = Field(description="of cosign, its words, and the keys that they name")


def still_signed(record: SignatureRecord, reference: Reference, policy: str, now: float, max_age: float) -> bool:
    """Says whether a record counts: not too old, not from the future, for this repository and this very policy."""
    fresh = 0 <= now - record.at <= max_age  # a key may be revoked
    return fresh and (record.name, record.policy) == (reference.name, policy)


# --- scans -------------------------------------------------------------------------------------


class ScanRecord(Model):
    """What a scanner said of an image, kept by the image's id."""

    id: str
    digest: str = ""
    reference: str = ""
    at: float
    scanner: str
    scanner_sha256: str
    counts: Mapping[str, int] = Field(default_factory=dict, description="severity, or unknown -> how many")
    findings: tuple[str, ...] = Field((), description="the worst, for people")

    def worst(self, unknown_as: Severity) -> Severity | None:
        """Returns the worst severity that was found; None if nothing was found."""
        found = [unknown_as if name == "unknown" else name for name, count in self.counts.items() if count > 0]
        ranks = [SEVERITIES.index(name) for name in found if name in SEVERITIES]
        return SEVERITIES[max(ranks)] if ranks else None


def scan_command(facts: ImageFacts, settings: ImageSettings, socket: str) -> list[str]:
    """Returns the scanner's command line for an image, or raises `ImageRefused` if no scanner is configured."""
    words = settings.scanner
    if not words or not any(place in word for word in words[1:] for place in ("{reference}", "{id}")):
        raise refused_scan(
            facts.reference, "no scanner is configured", "set images.scanner, with {reference} in it, and its sha256"
        )
    reference = parse(facts.reference)
    values = {"{reference}": reference.at(facts.digest) if facts.digest else str(reference), "{id}": facts.id}
    values["{socket}"] = socket
    return [words[0], *(_filled(word, values) for word in words[1:])]


def _filled(word: str, values: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], word)


def is_stale(record: ScanRecord, settings: ImageSettings, now: float) -> bool:
    """Says whether a record is too old, from the future, or by another scanner than the one that is trusted now."""
    age = now - record.at
    return not 0 <= age <= settings.scan_max_age or record.scanner_sha256 != settings.scanner_sha256


def check_scan(record: ScanRecord, settings: ImageSettings) -> None:
    """Raises `ImageRefused` if a scan found something as severe as policy forbids."""
    worst = record.worst(settings.scan_unknown_as)
    if worst is not None and SEVERITIES.index(worst) >= SEVERITIES.index(settings.scan_threshold):
        told = "; ".join(record.findings[:5])
        raise refused_scan(
            record.reference or record.id,
            f"the scan found {worst} vulnerabilities, and policy allows none from {settings.scan_threshold} on: {told}",
            "update the image, or have the administrator raise images.scan_threshold",
            counts=dict(record.counts),
        )


def refused_scan(image: str, problem: str, fix: str, **context: Any) -> errors.ImageRefused:
    """Returns the refusal of an image for its scan."""
    return errors.ImageRefused(f"{image}: {problem}", fix=fix, context={"rule": "scan", "image": image, **context})


# --- garbage -----------------------------------------------------------------------------------


class Garbage(NamedTuple):
    """The images to remove, and why each of the others is kept."""

    remove: tuple[ImageFacts, ...]
    kept: tuple[tuple[ImageFacts, str], ...]


def collect(
    images: Sequence[ImageFacts], *, used: Collection[str], built: Collection[str], lock: Lock, older_than: float
) -> Garbage:
    """Chooses the images with our label that are ours, unused, unpinned and older than a moment in time."""
    remove: list[ImageFacts] = []
    kept: list[tuple[ImageFacts, str]] = []
    pins = {pin.digest for pin in lock.images.values()}
    for image in images:
        if image.labels.get(LABEL) != "1":
            continue
        if why := _keep(image, used, built, pins, older_than):
            kept.append((image, why))
        else:
            remove.append(image)
    return Garbage(tuple(remove), tuple(kept))


def _keep(image: ImageFacts, used: Collection[str], built: Collection[str], pins: set[str], older_than: float) -> str:
    own = image.labels.get(TAG_LABEL, "")
    # Podman writes a registry before every name, so there only our own record tells.
    same = all(tag == own or (image.id in built and tag.endswith(f"/{own}")) for tag in image.tags)
    if not (same if image.tags else image.id in built):
        return "it was made from one of ours, by somebody else"
    if image.id in used:
        return "a container uses it"
    if image.id in pins or image.digest in pins:
        return "it is pinned"
    return "" if image.created < older_than else "it is not old enough"
