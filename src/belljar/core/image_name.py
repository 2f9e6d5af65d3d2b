"""Image names, checked: what may be asked of a container engine or a registry."""

from __future__ import annotations

import re
from typing import NamedTuple

from belljar.core import errors

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]{{2,45}}\])(?::[0-9]{{1,5}})?")
_PATH = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 255


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

    @property
    def local(self) -> str:
        """What to ask an engine for: by the digest, if there is one."""
        return self.at(self.digest) if self.digest else str(self)

    def at(self, digest: str) -> str:
        """The same repository's image with another digest."""
        return f"{self.name}@{digest}"


def parse(text: str, registry: str = "") -> Reference:
    """Checks an image's name, or raises `InvalidRequest`.

    Args:
        text: `[registry/]name[:tag][@sha256:…]`; without tag and digest the tag is `latest`.
        registry: Is put before a name that has none.
    """
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
    """Says whether something is a whole sha256 digest, as registries and engines write it."""
    return isinstance(text, str) and bool(_DIGEST.fullmatch(text))
