"""The images of this server's container engines: looked up when somebody asks, and kept with the records."""

from __future__ import annotations

from belljar.engine.engine import Engine
from belljar.host.engine_address import FLAVOURS, engine_address
from belljar.images.images import Images
from belljar.protocol.responses import SeenImage
from belljar.service.store.store import Store


async def images(engine: Engine, store: Store) -> list[SeenImage]:
    """The last seen first. An engine that does not answer now keeps what was seen of it."""
    settings = engine.settings
    for name in FLAVOURS:
        if not (await engine.capabilities(name)).available:
            continue
        for image in await Images(settings, engine_address(name, settings)).list():
            facts = image.model_dump(mode="json", include={"id", "size", "created", "tags"})
            await store.add_image(name, image.reference, image.digest, facts)
    return [SeenImage(**row) for row in await store.images()]
