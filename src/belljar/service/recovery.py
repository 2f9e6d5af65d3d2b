"""What a server that was killed left: its runs get a final state, and its sandboxes are removed."""

from __future__ import annotations

import logging

import anyio

from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.service.instances import ServerInstance
from belljar.service.store.store import Store

_REAP_SECONDS = 10.0  # for each backend
_log = logging.getLogger("belljar")


async def settle_lost_runs(store: Store, engine: Engine, instance: ServerInstance) -> bool:
    """Ends runs of dead servers in the records. Returns whether there were dead servers, so that `reap` is due."""
    lost = await store.lose(instance.is_dead)
    if lost:
        _log.warning("%d runs were under way when another Belljar died: %s", len(lost), ", ".join(lost[:20]))
    for id in lost:
        await engine.record("lost", run=id, message="the service died while it was under way")
    return instance.clear() > 0


async def reap(engine: Engine) -> None:
    """Removes sandboxes that nobody owns any more.

    It runs beside the first requests: a container engine that does not answer keeps nobody waiting.
    """
    for name in engine.known:
        with anyio.move_on_after(_REAP_SECONDS):
            try:
                await engine.backend(name).reap()
            except (errors.BelljarError, OSError) as error:
                _log.info("%s could not be asked for what was left: %s", name, error)
