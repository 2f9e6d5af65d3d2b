"""Whether this server can do its work: found out by a real run, not by asking itself how it feels."""

from __future__ import annotations

import time
from typing import Any

import anyio

from belljar import errors
from belljar.models import Limits, RunRequest
from belljar.service.core import Service

_FRESH = 5.0  # seconds that a look counts
_DEADLINE = 20.0


class Health:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = anyio.Lock()
        self._told: dict[str, Any] = {}
        self._at = 0.0

    async def look(self) -> dict[str, Any]:
        """At most one look at a time, and none while the last is fresh."""
        async with self._lock:
            if not self._told or time.monotonic() - self._at > _FRESH:
                self._told = await self._look()
                self._at = time.monotonic()
        service = self._service
        problem = "it is going away" if service.draining.is_set() else self._told["problem"] or service.store.status
        parts = {"store": service.store.status, "logs": service.lines.status, "events": service.events.status}
        return {
            "ready": not problem, "problem": problem, "backend": self._told["backend"],
            "run_ms": self._told["run_ms"], "parts": {name: status or "ok" for name, status in parts.items()},
            "running": service.admission.running, "waiting": service.admission.waiting,
        }  # fmt: skip

    async def _look(self) -> dict[str, Any]:
        start = time.perf_counter()
        problem, backend = "", ""
        try:
            with anyio.fail_after(_DEADLINE):
                result = await self._service.engine.run(RunRequest(code="print(6 * 7)", limits=Limits(timeout=10)))
            backend = result.backend
            if result.stdout.strip() != "42":
                problem = f"a tiny run came to {result.status}"
        except errors.BelljarError as error:
            problem = error.message
        except TimeoutError:
            problem = f"a tiny run did not end within {_DEADLINE:g} s"
        return {"problem": problem, "backend": backend, "run_ms": round((time.perf_counter() - start) * 1000, 1)}
