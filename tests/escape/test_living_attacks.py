"""The attacks that are made of one command, made by commands of living sandboxes, too."""

from __future__ import annotations

import pytest

from belljar.core.capabilities import Capabilities
from belljar.engine.engine import Engine
from belljar.testing import escape
from leaky import Leaky
from suites import SUITE_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(SUITE_SECONDS)]

TWINS = escape.in_living_sandboxes(escape.ATTACKS)
SLOW = {"resources", "outputs", "names"}  # which fill, flood and collect: seconds each


async def _all_hold(attacks: list[escape.Attack], engine: Engine) -> None:
    verdicts = await escape.attack("native", engine=engine, attacks=attacks)
    assert [(one.name, one.status, one.detail) for one in verdicts if not one.held] == []


async def test_what_holds_in_a_sandbox_for_one_command_holds_in_a_living_one(engine: Engine) -> None:
    attacks = [one for one in TWINS if one.category not in SLOW]
    assert len(attacks) > 90
    await _all_hold(attacks, engine)


@pytest.mark.exhaustive("fills, floods and collects in 36 living sandboxes")
async def test_what_holds_against_floods_and_hostile_files_holds_in_a_living_one(engine: Engine) -> None:
    await _all_hold([one for one in TWINS if one.category in SLOW], engine)


async def test_an_attack_in_a_living_sandbox_that_gets_through_is_told(engine: Engine, bait: escape.Bait) -> None:
    [one] = [one for one in TWINS if one.name == "host file, living"]
    leaky = Leaky("bare")
    verdict = await escape.carry_out(one, bait, leaky, Engine(engine.settings, extra=(leaky,)))
    assert (verdict.status, verdict.detail) == ("through", "the host's secret came back")


async def test_a_backend_without_living_sandboxes_is_asked_for_one_all_the_same(
    engine: Engine, bait: escape.Bait
) -> None:
    class Dead(Leaky):
        async def probe(self) -> Capabilities:
            return (await super().probe()).model_copy(update={"living": None})

    dead = Dead("bare")
    verdict = await escape.carry_out(TWINS[0], bait, dead, Engine(engine.settings, extra=(dead,)))
    assert verdict.detail == "not possible: leaky has no living sandboxes"
