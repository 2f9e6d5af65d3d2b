"""The backend `none`, which refuses everything.

A caller that asks for it asks to run code without a sandbox. Belljar cannot do that, and every call says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from belljar.backends.base import Box
from belljar.core import errors
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.plan import Plan

WHY = "no sandbox was asked for"
FIX = "choose a backend (`belljar doctor` shows which work here): there is no execution without a sandbox"


class NoSandbox:
    """The backend `none`."""

    name = "none"

    async def probe(self) -> Capabilities:
        return Capabilities(backend=self.name, available=False, why_not=WHY, fix=FIX)

    async def languages(self) -> tuple[LanguageSupport, ...]:
        raise _refusal()

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Box]:
        raise _refusal()
        yield

    async def reap(self) -> int:
        raise _refusal()


def _refusal() -> errors.NotAvailable:
    return errors.NotAvailable(f"none: {WHY}", fix=FIX)
