"""A disk for a box: setting its bytes aside may take long, and keeps nobody else waiting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from belljar.core import errors
from belljar.host import disk_image

pytestmark = pytest.mark.anyio


async def test_bytes_are_set_aside_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places: list[int] = []

    def reserved(folder: Path, size: int) -> int:
        places.append(threading.get_ident())
        raise OSError(28, "no space left")

    monkeypatch.setattr(disk_image, "_reserved", reserved)
    with pytest.raises(errors.StartFailed, match="no space left"):
        await disk_image.mount_in(1, tmp_path, 1 << 20, {"/machine/tmp": 0o1777}, None)
    assert places and places[0] != threading.get_ident()
