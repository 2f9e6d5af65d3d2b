"""Requests that are refused: each is counted, and written to the audit log, whoever refuses it."""

from __future__ import annotations

from typing import Any

from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.service.telemetry.metrics import Metrics


class Refusals:
    """Counts and records refusals."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def count(self, refusal: errors.PolicyDenied) -> None:
        """Counts a refusal that somebody else has recorded, or that nobody may: strangers could fill any log."""
        self._metrics.refused(refusal.kind)

    async def record(self, refusal: errors.PolicyDenied, **facts: Any) -> None:
        """Counts a refusal and writes it to the audit log, with `facts` about the request."""
        self.count(refusal)
        await self._engine.record("refused", error=refusal.kind, message=refusal.message, **facts)
