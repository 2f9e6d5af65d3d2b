"""Saves the figures that a turn showed, so that people at a terminal can look at them."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from belljar.core.display import IMAGES, is_image

_ENDINGS = {"image/png": "png", "image/jpeg": "jpg"}
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MOST_OF_A_SECOND = 1000  # figures


def images(bundle: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yields the images of a displayed value: ending and content. What only claims to be one is left out."""
    for mime in IMAGES:
        if mime in bundle and is_image(mime, bundle[mime]):
            yield _ENDINGS[mime], base64.b64decode(bundle[mime])


def save(folder: Path, ending: str, content: bytes) -> Path:
    """Writes an image under a name that tells when it was made, and returns where it is.

    Raises:
        OSError: it cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, _MOST_OF_A_SECOND):
        path = folder / f"figure-{stamp}-{number}.{ending}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _PRIVATE_FILE)
        except FileExistsError:
            continue
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        return path
    raise FileExistsError(17, "too many figures of this second", str(folder))
