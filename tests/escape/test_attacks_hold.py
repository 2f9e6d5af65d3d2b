"""Every attack, on every backend that works here."""

from __future__ import annotations

import pytest

from belljar import escape
from belljar.engine import Engine
from belljar.models import Guarantees

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


# What only a control group can stop. Where there is none, `guarantees.weaker` says so, and so do we, loudly.
NEEDS_MEMORY_GROUP = {"inodes", "socket buffers"}


@pytest.fixture(scope="session")
async def guarantees() -> Guarantees:
    offer = await Engine().offer("native")
    assert offer.available, f"native does not work here, so nothing can be shown: {offer.why_not} ({offer.fix})"
    assert offer.guarantees
    return offer.guarantees


@pytest.fixture(scope="session")
async def verdicts(guarantees: Guarantees) -> dict[str, escape.Verdict]:
    return {verdict.name: verdict for verdict in await escape.attack("native", engine=Engine())}


@pytest.mark.parametrize("name", [one.name for one in escape.ATTACKS])
async def test_native_holds_against(name: str, verdicts: dict[str, escape.Verdict], guarantees: Guarantees) -> None:
    verdict = verdicts[name]
    if not verdict.held and name in NEEDS_MEMORY_GROUP and "cgroup" not in guarantees.limits["memory"]:
        assert guarantees.weaker, "what is weaker here has to be said"
        pytest.xfail(f"NOT HELD on this host, which gives us no memory control group: {verdict.detail}")
    assert verdict.held, f"{name}: {verdict.detail}"
