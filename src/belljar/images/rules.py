"""What is decided about images: names, pins, pulls, scans, garbage. No I/O; every refusal is an `ImageRefused`."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from belljar.core import errors
from belljar.core.model import Model
from belljar.core.settings import ImageSettings
from belljar.core.values import MIB

LABEL = "belljar"  # "1" on every image we build
TAG_LABEL = "belljar.tag"  # what it was built as: an image made FROM ours inherits both, but not our name
BASES_LABEL = "belljar.bases"  # the images it was built from, each as name@digest, or name@id where no registry has it
PullPolicy = Literal["always", "if-not-present", "never"]
Severity = Literal["negligible", "low", "medium", "high", "critical"]
SEVERITIES: tuple[Severity, ...] = ("negligible", "low", "medium", "high", "critical")
MAX_LOCK = 4 * MIB

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]{{2,45}}\])(?::[0-9]{{1,5}})?")
_PATH = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 255


# --- names -------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """An image's name, checked: nothing in it can be mistaken for an option of a program."""

    name: str  # with the registry, if it has one
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def key(self) -> str:
        """What a lock file knows it by."""
        return f"{self.name}:{self.tag or 'latest'}"

    def at(self, digest: str) -> str:
        return f"{self.name}@{digest}"


def parse(text: str, registry: str = "") -> Reference:
    """`[registry/]name[:tag][@sha256:…]`; without tag and digest the tag is `latest`."""
    rest, at, digest = text.partition("@")
    slash = rest.rfind("/")
    colon = rest.find(":", slash + 1)
    name, tag = (rest[:colon], rest[colon + 1 :]) if colon >= 0 else (rest, "")
    host, _, path = name.partition("/")
    if path and _is_host(host):
        good = bool(_HOST.fullmatch(host) and _PATH.fullmatch(path))
    else:
        good = bool(_PATH.fullmatch(name))
        if registry and good:
            return parse(f"{registry.rstrip('/')}/{text}")
    good = good and len(name) <= _LONGEST
    good = good and (bool(_TAG.fullmatch(tag)) if colon >= 0 else True)
    good = good and (bool(_DIGEST.fullmatch(digest)) if at else True)
    if not good:
        raise errors.InvalidRequest(
            f"image: {text[:120]!r} is not an image's name",
            fix="write [registry/]name[:tag][@sha256:digest], the name in lower case",
            context={"field": "image"},
        )
    return Reference(name, tag or ("" if digest else "latest"), digest)


def _is_host(part: str) -> bool:
    return "." in part or ":" in part or part == "localhost"


def is_digest(text: object) -> bool:
    return isinstance(text, str) and bool(_DIGEST.fullmatch(text))


# --- what the engine has -----------------------------------------------------------------------


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
        return wanted in (self.id, self.digest, *self.digests)


def digests_of(reference: Reference, repo_digests: Iterable[object]) -> tuple[str, ...]:
    """The digests under which the reference's own repository knows an image, from the engine's `RepoDigests`."""
    pairs = [str(entry).partition("@")[::2] for entry in repo_digests]
    good = [(name, digest) for name, digest in pairs if is_digest(digest)]
    exact = {digest for name, digest in good if name == reference.name}
    # Podman and containerd write the hub's names in full, others do not.
    return tuple(sorted(exact or {digest for name, digest in good if name.endswith(f"/{reference.name}")}))


# --- the lock ----------------------------------------------------------------------------------


class Pin(Model):
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    of: Literal["registry", "engine"] = Field("registry", description="a manifest's digest, or a local image's id")
    at: str = ""
    by: str = ""


class Lock(Model):
    version: Literal[1] = 1
    images: Mapping[str, Pin] = Field(default_factory=dict, max_length=10_000)

    def pin(self, reference: Reference) -> Pin | None:
        return self.images.get(reference.key)

    def moved(self, reference: Reference, pin: Pin) -> Lock:
        return self.model_copy(update={"images": {**self.images, reference.key: pin}})


def read_lock(text: str, source: str) -> Lock:
    """A lock that cannot be read refuses everything: it would be a strange lock that opens when damaged."""
    try:
        lock = Lock.model_validate(json.loads(text))
        for key in lock.images:
            if parse(key).key != key:
                raise ValueError(f"{key!r} is not name:tag")
    except ValidationError as error:
        problem = errors.from_validation(error, "lock").message
    except (ValueError, RecursionError) as error:  # JSON's errors, and InvalidRequest, are ValueErrors
        problem = str(error)
    else:
        return lock
    raise errors.ImageRefused(
        f"{source}: the lock cannot be read: {problem[:300]}",
        fix="restore the file, or remove it and run `belljar images lock`",
        context={"rule": "lock"},
    )


def write_lock(lock: Lock) -> str:
    images = {key: lock.images[key].model_dump() for key in sorted(lock.images)}
    return json.dumps({"version": lock.version, "images": images}, indent=2) + "\n"


# --- pulling -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """What is to be done to have an image: nothing, or a pull of `target`, and why."""

    pull: str
    reason: str


def pull_step(reference: Reference, policy: PullPolicy, present: ImageFacts | None, pin: Pin | None) -> Step:
    """Present means present with the pinned digest; and what is pinned is pulled by digest, so that no tag can move
    between the check and the pull."""
    wanted = reference.digest or (pin.digest if pin else "")
    here = present is not None and (not wanted or present.is_(wanted))
    if pin is not None and pin.of == "engine":
        if here:
            return Step("", "built here and pinned by its id")
        raise _differs(reference, pin.digest, present.pin if present else "nothing") if present else _absent(reference)
    if policy == "never" and not here:
        raise _differs(reference, wanted, present.pin) if present else _absent(reference)
    if policy == "never" or (here and (policy == "if-not-present" or reference.digest)):
        return Step("", "it is here")
    return Step(reference.at(wanted) if wanted else str(reference), "always" if here else "it is not here")


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
    """What the registry says the name means today, against the pin."""
    if pin is not None and pin.of == "registry" and not reference.digest and remote and remote != pin.digest:
        raise _differs(reference, pin.digest, remote)


def check_pin(reference: Reference, pin: Pin | None, facts: ImageFacts, settings: ImageSettings) -> None:
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
    """cosign's command line for the very digest that will be run; a tag could mean another image by then."""
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
    """Whether a verdict counts: not too old, not from the future, for this repository, and under this very policy."""
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
        found = [unknown_as if name == "unknown" else name for name, count in self.counts.items() if count > 0]
        ranks = [SEVERITIES.index(name) for name in found if name in SEVERITIES]
        return SEVERITIES[max(ranks)] if ranks else None


def scan_command(facts: ImageFacts, settings: ImageSettings, socket: str) -> list[str]:
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
    """Too old, from the future, or by another scanner than the one that is trusted now."""
    age = now - record.at
    return not 0 <= age <= settings.scan_max_age or record.scanner_sha256 != settings.scanner_sha256


def check_scan(record: ScanRecord, settings: ImageSettings) -> None:
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
    return errors.ImageRefused(f"{image}: {problem}", fix=fix, context={"rule": "scan", "image": image, **context})


# --- garbage -----------------------------------------------------------------------------------


class Garbage(NamedTuple):
    remove: tuple[ImageFacts, ...]
    kept: tuple[tuple[ImageFacts, str], ...]


def collect(
    images: Sequence[ImageFacts], *, used: Collection[str], built: Collection[str], lock: Lock, older_than: float
) -> Garbage:
    """Of the images with our label those that are ours, unused, unpinned and older than a moment in time."""
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


# --- Dockerfiles -------------------------------------------------------------------------------

_CONTINUED = re.compile(r"\\[ \t]*\r?\n")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_REMOTE = re.compile(r"\w+://|\bgit@|\$", re.IGNORECASE)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Word and rest of each instruction, as engines read them: without comments and empty lines, which do not end a
    continued one."""
    text = dockerfile.lstrip("\ufeff")
    if re.match(r"(?:[ \t]*#[^\n]*\n)*?[ \t]*#[ \t]*escape[ \t]*=[ \t]*`", text, re.IGNORECASE):
        raise errors.InvalidRequest("Dockerfile: another escape character is not supported", fix="use the backslash")
    kept = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in _CONTINUED.sub(" ", "\n".join(kept) + "\n").split("\n"):
        word, rest = (*line.split(None, 1), "", "")[:2]
        if word.upper() == "ONBUILD":
            word, rest = (*rest.split(None, 1), "", "")[:2]
        if word:
            found.append((word.upper(), rest))
    return found


def bases(dockerfile: str, arguments: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The images that a Dockerfile starts from or copies from, to be checked before the engine fetches them itself.

    What cannot be told from the text is refused: a variable without a default, another platform than the engine's.
    """
    values: dict[str, str] = {}
    stages: set[str] = {"scratch"}
    found: list[str] = []
    started = False
    for word, rest in instructions(dockerfile):
        words = rest.split()
        if word == "ARG" and not started and rest:
            name, _, value = rest.strip().partition("=")
            values[name] = (arguments or {}).get(name, value.strip("\"'"))
        elif word == "FROM":
            started = True
            if any(part.startswith("--") for part in words):
                raise errors.InvalidRequest("Dockerfile: FROM takes no options here", fix="leave out --platform")
            image, *others = words or [""]
            _note(found, stages, image, values)
            stages |= {others[1].lower()} if len(others) == 2 else set()
        elif word in ("COPY", "ADD"):
            for part in words:
                if part.startswith("--from=") and not part[7:].isdecimal():
                    _note(found, stages, part[7:], values)
    return tuple(dict.fromkeys(found))


def check_sources(dockerfile: str) -> None:
    """The engine fetches what ADD names with its own network, whatever network the steps have."""
    for word, rest in instructions(dockerfile):
        if word == "ADD" and _REMOTE.search(rest):
            raise errors.PolicyDenied(
                f"Dockerfile: ADD {rest[:80]} may fetch something, and the build has no network",
                fix="allow the network, or use COPY",
                context={"field": "network"},
            )


def _note(found: list[str], stages: set[str], image: str, values: Mapping[str, str]) -> None:
    filled = _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), image)
    if "$" in filled or not filled:
        raise errors.InvalidRequest(
            f"Dockerfile: cannot tell which image {image[:80]!r} is", fix="name it, or give its ARG a default"
        )
    if filled.lower() not in stages:
        found.append(filled)


def build_file(text: str) -> str:
    """The Dockerfile's place in its context: relative, plain, never climbing out."""
    path = posixpath.normpath(text)
    if posixpath.isabs(path) or path.split("/")[0] == ".." or "\0" in path or path == ".":
        raise errors.InvalidRequest(f"file: {text[:120]!r} is not in the context", fix="give a path relative to it")
    return path
