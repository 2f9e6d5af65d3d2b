"""The images of this server's container engines: looked up when somebody asks, and kept with the records."""

from __future__ import annotations

from belljar.engine.engine import Engine
from belljar.images.images import of_engines
from belljar.protocol.responses import SeenImage
from belljar.service.store.store import Store


async def images(engine: Engine, store: Store) -> list[SeenImage]:
    """Returns the images of all container engines, the last seen first.

    What was seen of an engine that does not answer now is kept.
    """
    for name, present in of_engines(engine.settings).items():
        if not (await engine.capabilities(name)).available:
            continue
        for image in await present.list():
            facts = image.model_dump(mode="json", include={"id", "size", "created", "tags"})
            await store.add_image(name, image.reference, image.digest, facts)
    return [SeenImage(**row) for row in await store.images()]
