"""What a living sandbox of the native backend is like from inside: a machine that programs feel at home on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import belljar
from belljar.engine.engine import Engine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(engine: Engine) -> AsyncIterator[belljar.AsyncSandbox]:
    async with belljar.AsyncSandbox(engine=engine, backend="native", living=True) as box:
        yield box


async def sh(box: belljar.AsyncSandbox, line: str) -> str:
    """What a line of bash prints; it must succeed."""
    result = await box.exec(["bash", "-c", line])
    assert result.ok, f"{line}: {result.stdout}{result.stderr}"
    return result.stdout.strip()


async def test_the_first_process_of_a_machine_sleeps_while_nothing_is_to_be_done(box: belljar.AsyncSandbox) -> None:
    """One that could not sleep began anew for ever, and took a processor."""
    begun = await sh(box, "for i in {1..50}; do pgrep -fx 'sleep infinity' && exit; sleep 0.1; done; exit 1")
    await sh(box, "(sleep 0.1 &) ; (exit 3 &) ; sleep 0.3")  # what is left behind is reaped
    assert await sh(box, "pgrep -fx 'sleep infinity'") == begun
    assert await sh(box, "ps -e -o stat= | grep -c Z || true") == "0"
