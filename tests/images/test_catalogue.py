"""The images that a server lists are those of its engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.engine.engine import Engine
from belljar.service import image_list
from belljar.service.store.store import Store
from engines import IMAGE, engines

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]


async def test_images_are_listed_as_the_engine_has_them_and_kept_when_it_is_gone(tmp_path: Path) -> None:
    found = engines()
    if "docker" not in found.sockets:
        pytest.skip(f"NOTHING of the images was checked: {found.missing.get('docker')}")
    settings = found.settings("docker", container={"images": {"execution": IMAGE}})
    async with Store(f"sqlite:///{tmp_path}/records.db") as store:
        told = await image_list.images(Engine(settings), store)
        image = next(each for each in told if each.engine == "docker" and IMAGE in each.facts["tags"])
        assert image.facts["size"] > 0
        gone = settings.model_copy(
            update={"docker_socket": str(tmp_path / "no"), "podman_socket": str(tmp_path / "no")}
        )
        kept = await image_list.images(Engine(gone), store)
        assert {each.reference for each in kept} == {each.reference for each in told}
