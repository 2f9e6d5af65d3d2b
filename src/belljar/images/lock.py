"""The lock file: which digest each image name is pinned to. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from belljar.core import errors
from belljar.core.image_name import Reference, parse
from belljar.core.model import Model
from belljar.core.values import MIB

MAX_LOCK_BYTES = 4 * MIB


class Pin(Model):
    """Which image a name means, and who said so when."""

    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    of: Literal["registry", "engine"] = Field("registry", description="a manifest's digest, or a local image's id")
    at: str = ""
    by: str = ""


class Lock(Model):
    """All pins, by `name:tag`."""

    version: Literal[1] = 1
    images: Mapping[str, Pin] = Field(default_factory=dict, max_length=10_000)

    def pin(self, reference: Reference) -> Pin | None:
        """Returns a name's pin, if it has one."""
        return self.images.get(reference.key)

    def moved(self, reference: Reference, pin: Pin) -> Lock:
        """Returns the same lock with another pin for a name."""
        return self.model_copy(update={"images": {**self.images, reference.key: pin}})


def read_lock(text: str, source: str) -> Lock:
    """Reads a lock file, or raises `ImageRefused`: a damaged lock must not let everything through."""
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
    """Returns a lock as the text of its file."""
    images = {key: lock.images[key].model_dump() for key in sorted(lock.images)}
    return json.dumps({"version": lock.version, "images": images}, indent=2) + "\n"
