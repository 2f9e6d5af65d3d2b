"""Whether this server can do its work: found out by a real run, not by asking itself how it feels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import anyio

from belljar.core import errors
from belljar.core.request import Limits, RunRequest
from belljar.engine import audit
from belljar.protocol.responses import Readiness
from belljar.service.service import Service

_FRESH = 5.0  # seconds that a look counts
_UNWELL = 1.0  # and one that found something wrong
_DEADLINE = 20.0
_STORE_SECONDS = 5.0  # that the store has to take a note


class Health:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = anyio.Lock()
        self._told: dict[str, Any] = {"problem": "", "store": "", "backend": "", "run_ms": None}
        self._at = -math.inf

    async def look(self) -> Readiness:
        """At most one look at a time, and none while the last is fresh."""
        async with self._lock:
            fresh = _UNWELL if self._told["problem"] or self._told["store"] else _FRESH
            if time.monotonic() - self._at > fresh and not self._service.drain.draining.is_set():
                said = list[str]()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._ask_store, said.append)
                    told = await self._look()
                self._told = {**told, "store": "".join(said)}
                self._at = time.monotonic()
        service = self._service
        store = service.store.status or self._told["store"]
        problem = "it is going away" if service.drain.draining.is_set() else self._told["problem"] or store
        parts = {"store": store, "logs": service.publisher.lines.status, "events": service.publisher.events.status}
        return Readiness(
            ready=not problem, problem=problem, backend=self._told["backend"], run_ms=self._told["run_ms"],
            parts={name: status or "ok" for name, status in parts.items()},
            running=service.admission.running, waiting=service.admission.waiting,
        )  # fmt: skip

    async def _ask_store(self, tell: Callable[[str], None]) -> None:
        """Has the store take a note: one that nobody writes to may have gone unnoticed, and one may be read-only."""
        try:
            with anyio.fail_after(_STORE_SECONDS):
                await self._service.store.check(_STORE_SECONDS)
        except errors.BelljarError as error:
            tell(error.message)
        except TimeoutError:
            tell(f"it did not answer within {_STORE_SECONDS:g} s")

    async def _look(self) -> dict[str, Any]:
        if self._full():  # its sandboxes are the proof, and one more would wait for a place
            return {**self._told, "problem": ""}
        start = time.perf_counter()
        audit.caller.set("/readyz")
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
            problem = "" if self._full() else f"a tiny run did not end within {_DEADLINE:g} s"
        return {"problem": problem, "backend": backend, "run_ms": round((time.perf_counter() - start) * 1000, 1)}

    def _full(self) -> bool:
        service = self._service
        return service.engine.full or service.admission.running >= service.settings.max_containers
