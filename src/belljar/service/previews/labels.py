"""The names under which previews are seen: signed, so that nobody can make one up, and with an end.

A name is one label of a host, and so is the same in a path: `<id>-<port>-<until>-<signature>`.
"""

from __future__ import annotations

import base64
import hmac
import re
import time
from typing import NamedTuple

from belljar.service.sandboxes.links import Links

_LABEL = re.compile(r"(bs-[0-9a-f]{16})-([0-9a-f]{1,4})-([0-9a-f]{1,10})-([a-z2-7]{26})")
_SIGNATURE_BYTES = 16


class Named(NamedTuple):
    """What a label is for."""

    id: str
    port: int
    until: int

    @property
    def over(self) -> bool:
        """Whether its time is over."""
        return self.until <= time.time()


async def make(links: Links, named: Named, owner: str) -> str:
    """Returns a label.

    Args:
        links: sign it.
        named: what it is for.
        owner: whose it is: it counts no longer than their credential.
    """
    said = f"{named.id}-{named.port:x}-{named.until:x}"
    return f"{said}-{await _signature(links, said, owner)}"


def read(label: str) -> Named | None:
    """Returns what a label says that it is for, which nobody has looked at yet; None: it is no label."""
    match = _LABEL.fullmatch(label)
    return Named(match[1], int(match[2], 16), int(match[3], 16)) if match else None


async def is_genuine(links: Links, label: str, owner: str) -> bool:
    """Whether a label was made here, for that owner."""
    said, _, signature = label.rpartition("-")
    return hmac.compare_digest(await _signature(links, said, owner), signature)


async def _signature(links: Links, said: str, owner: str) -> str:
    digest = bytes.fromhex(await links.signature(f"preview\0{said}\0{owner}"))
    return base64.b32encode(digest[:_SIGNATURE_BYTES]).decode().rstrip("=").lower()
