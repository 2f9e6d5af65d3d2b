"""The backend `none`, which refuses everything.

A caller that asks for it asks to run code without a sandbox. Belljar cannot do that, and every call says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from belljar.backends.base import Box
from belljar.core import policy
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.plan import Plan


class NoSandbox:
    """The backend `none`."""

    name = policy.NO_SANDBOX

    async def probe(self) -> Capabilities:
        said = policy.no_sandbox()
        return Capabilities(backend=self.name, available=False, why_not=said.message, fix=said.fix)

    async def languages(self) -> tuple[LanguageSupport, ...]:
        raise policy.no_sandbox()

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Box]:
        raise policy.no_sandbox()
        yield

    async def reap(self) -> int:
        raise policy.no_sandbox()
