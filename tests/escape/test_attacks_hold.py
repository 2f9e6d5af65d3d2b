"""Every attack, on every backend that works here."""

from __future__ import annotations

import pytest

from belljar import escape
from belljar.engine import Engine

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture(scope="session")
async def verdicts() -> dict[str, escape.Verdict]:
    engine = Engine()
    offer = await engine.offer("native")
    assert offer.available, f"native does not work here, so nothing can be shown: {offer.why_not} ({offer.fix})"
    return {verdict.name: verdict for verdict in await escape.attack("native", engine=engine)}


@pytest.mark.parametrize("name", [one.name for one in escape.ATTACKS])
async def test_native_holds_against(name: str, verdicts: dict[str, escape.Verdict]) -> None:
    assert verdicts[name].held, f"{name}: {verdicts[name].detail}"
