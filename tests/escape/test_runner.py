"""The suite as a whole, and the judge: what is neither clearly held nor clearly through is inconclusive."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.plan import Plan
from belljar.engine.engine import Engine
from belljar.testing import escape
from leaky import Leaky, LeakyBox

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

CATEGORIES = {
    "files", "environment", "proc", "sys", "devices", "mounts", "privileges", "namespaces", "kernel", "network",
    "processes", "resources", "outputs", "names", "neighbours", "terminal", "wasm", "living",
}  # fmt: skip


def _attack(payload: str, name: str = "made up") -> escape.Attack:
    return escape.Attack(name=name, category="files", tries="-", payload=payload, held="-")


def test_there_are_at_least_sixty_attacks_each_with_a_name_of_its_own() -> None:
    names = [one.name for one in escape.ATTACKS]
    assert len(names) >= 60
    assert len(set(names)) == len(names)


def test_the_attacks_cover_every_category() -> None:
    assert {one.category for one in escape.ATTACKS} == CATEGORIES


def test_at_least_35_attacks_are_shown_to_get_through_and_the_others_say_why_not() -> None:
    assert sum(one.control != "none" for one in escape.ATTACKS) >= 35
    for one in escape.ATTACKS:
        assert bool(one.uncontrolled) == (one.control == "none"), one.name


def test_every_attack_says_what_it_tries_and_what_holds() -> None:
    for one in escape.ATTACKS:
        assert one.tries and one.held, one.name
        assert one.payload or one.options.get("command"), one.name


def test_no_word_of_the_bait_is_left_unfilled(bait: escape.Bait) -> None:
    for one in escape.ATTACKS:
        text = bait.fill(f"{one.payload} {one.neighbour} {one.options}")
        assert not any(f"@{word}@" in text for word in bait.words), one.name
        assert "@" not in text, one.name


async def test_a_payload_that_says_escaped_got_through(bait: escape.Bait, engine: Engine) -> None:
    verdict = await escape.carry_out(_attack("escaped('it was easy')"), bait, "native", engine)
    assert (verdict.status, verdict.detail) == ("through", "it was easy")


async def test_a_payload_that_says_both_got_through(bait: escape.Bait, engine: Engine) -> None:
    verdict = await escape.carry_out(_attack("print('HELD x'); print('ESCAPED y')"), bait, "native", engine)
    assert verdict.status == "through"


@pytest.mark.parametrize("payload", ["raise ValueError('broken')", "os.kill(os.getpid(), 9)", "", "print('HELDX')"])
async def test_a_payload_without_a_verdict_is_inconclusive(payload: str, bait: escape.Bait, engine: Engine) -> None:
    verdict = await escape.carry_out(_attack(payload), bait, "native", engine)
    assert (verdict.status, verdict.held) == ("inconclusive", False)
    assert verdict.detail.startswith("no verdict")


async def test_a_backend_that_does_what_it_says_it_cannot_got_no_wall_for_it(bait: escape.Bait) -> None:
    class Liar(Leaky):
        asked = 0

        async def probe(self) -> Capabilities:
            self.asked += 1  # the judge is told one thing, and whoever would refuse it another
            spoken = frozenset({"bash"}) if self.asked == 1 else None
            return (await super().probe()).model_copy(update={"languages": spoken})

    liar = Liar("bare")
    verdict = await escape.carry_out(_attack("held('x')"), bait, liar, Engine(extra=(liar,)))
    assert (verdict.status, verdict.detail) == ("through", "not refused, though leaky does not speak python")


async def test_a_secret_in_the_output_got_through_whatever_the_payload_says(bait: escape.Bait, engine: Engine) -> None:
    verdict = await escape.carry_out(_attack(f"print({bait.secret!r}); held('x')"), bait, "native", engine)
    assert (verdict.status, verdict.detail) == ("through", "the host's secret came back")


async def test_a_secret_in_a_collected_file_got_through(bait: escape.Bait, engine: Engine) -> None:
    one = escape.Attack(
        name="x", category="outputs", tries="-", held="-", options={"collect": ("*",)},
        payload=f"open('out.bin', 'w').write({bait.secret!r}); held('x')",
    )  # fmt: skip
    assert (await escape.carry_out(one, bait, "native", engine)).status == "through"


async def test_verdicts_come_in_the_order_of_the_attacks_and_are_told_as_they_fall(engine: Engine) -> None:
    told: list[str] = []
    made_up = [_attack("held('a')", "one"), _attack("escaped('b')", "two"), _attack("1/0", "three")]
    verdicts = await escape.attack(
        "native", engine=engine, attacks=made_up, on_verdict=lambda verdict: told.append(verdict.name)
    )
    statuses = {verdict.name: verdict.status for verdict in verdicts}
    assert list(statuses.items()) == [("one", "held"), ("two", "through"), ("three", "inconclusive")]
    assert sorted(told) == ["one", "three", "two"]
    assert set(verdicts[0].as_dict()) == {"name", "category", "status", "detail"}


class Starving(Leaky):
    """A backend that fails each attack while another one is under way, as one that is too busy does."""

    def __init__(self) -> None:
        super().__init__("bare")
        self.opened = self.under_way = 0

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[LeakyBox]:
        self.opened += 1
        self.under_way += 1
        number, crowded = self.opened, self.under_way > 1
        try:
            await anyio.sleep(0.1)
            if crowded or self.opened > number:
                raise errors.BackendTimeout("too much at once")
            async with super().open(plan) as box:
                yield box
        finally:
            self.under_way -= 1


async def test_an_attack_without_a_verdict_is_tried_once_more_and_alone() -> None:
    starving = Starving()
    attacks = [_attack("held('a')", "one"), _attack("escaped('b')", "two")]
    verdicts = await escape.attack(starving, engine=Engine(extra=(starving,)), attacks=attacks)
    first = "(its second try: the backend failed: BackendTimeout: too much at once)"
    assert [(one.status, one.detail) for one in verdicts] == [("held", f"a {first}"), ("through", f"b {first}")]


async def test_what_says_nothing_twice_is_inconclusive_and_what_got_through_has_no_second_try() -> None:
    leaky = Leaky("bare")
    attacks = [_attack("1/0", "nothing"), _attack("escaped('x')", "through")]
    nothing, through = await escape.attack(leaky, engine=Engine(extra=(leaky,)), attacks=attacks)
    assert (nothing.status, nothing.held) == ("inconclusive", False)
    assert nothing.detail.endswith("ZeroDivisionError: division by zero (its second try)")
    assert (through.status, through.detail) == ("through", "x")


async def test_only_takes_names_and_categories_and_refuses_what_it_does_not_know(engine: Engine) -> None:
    verdicts = await escape.attack("native", engine=engine, only=["chroot", "terminal"])
    assert {verdict.name for verdict in verdicts} > {"chroot", "controlling terminal"}
    with pytest.raises(errors.InvalidRequest, match="no attack or category"):
        await escape.attack("native", engine=engine, only=["nonsense"])


async def test_a_backend_that_is_not_there_is_an_error_and_not_a_row_of_walls(engine: Engine) -> None:
    with pytest.raises(errors.BelljarError):
        await escape.attack("no-such-backend", engine=engine)


def test_the_bait_is_gone_afterwards() -> None:
    with escape.lay() as bait:
        victim = int(bait.words["victim"])
        assert bait.running(bait.marker) == [victim]
        assert Path(bait.words["canary"]).read_text() == bait.secret == os.environ["BELLJAR_BAIT"]
    assert not bait.running(bait.marker)
    assert not bait.folder.exists()
    assert not Path(bait.words["shm_file"]).exists()
    assert "BELLJAR_BAIT" not in os.environ
