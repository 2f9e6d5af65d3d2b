"""Living sandboxes that serve several conformance checks: emptied in between, and never the reason of a failure."""

from __future__ import annotations

import pytest

from belljar.backends.fake import Fake
from belljar.engine.engine import Engine
from belljar.settings import load
from belljar.testing import conformance
from belljar.testing.conformance import Bench, Check
from belljar.testing.conformance.bench import equal, expect
from belljar.testing.conformance.living.guests import LASTING
from belljar.testing.conformance.machines import UsedMachines

pytestmark = pytest.mark.anyio


@pytest.fixture
def fake() -> Fake:
    return Fake(conformance.scripts())


@pytest.fixture
async def bench(fake: Fake) -> Bench:
    engine = Engine(load(), extra=(fake,))
    return Bench(engine, fake.name, await fake.probe(), await fake.languages())


async def leave_much(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.start(LASTING)
        for name in ("deep/er/file", "~/file", "/tmp/file", "/var/tmp/file"):
            await box.files.write(name, "x")


async def find_nothing(bench: Bench) -> None:
    async with bench.machine() as box:
        equal(await box.processes(), (), "what runs")
        for place in ("/workspace", "~", "/tmp", "/var/tmp"):
            equal(await box.files.list(place), (), place)


async def test_what_one_check_left_is_not_there_for_the_next_which_has_the_same_sandbox(
    bench: Bench, fake: Fake
) -> None:
    machines = UsedMachines()
    sharing = bench.sharing(machines)
    await leave_much(sharing)
    assert (fake.open_boxes, sharing.had_used) == (1, False)
    await find_nothing(sharing)
    assert (fake.open_boxes, sharing.had_used) == (1, True)
    await machines.close()
    assert fake.open_boxes == 0


async def test_a_sandbox_that_cannot_be_emptied_or_in_which_a_check_failed_is_closed(bench: Bench, fake: Fake) -> None:
    sharing = bench.sharing(UsedMachines())
    async with sharing.machine() as box:
        await box.pause()
    assert fake.open_boxes == 0
    with pytest.raises(ZeroDivisionError):
        async with sharing.machine():
            raise ZeroDivisionError
    assert fake.open_boxes == 0


async def test_one_that_was_asked_for_with_options_is_new_and_is_not_kept(bench: Bench, fake: Fake) -> None:
    machines = UsedMachines()
    sharing = bench.sharing(machines)
    await leave_much(sharing)
    async with sharing.machine(home="/home/ada") as box:
        assert (box.home, fake.open_boxes) == ("/home/ada", 2)
    assert (fake.open_boxes, sharing.had_used) == (1, False)
    await machines.close()


@pytest.mark.parametrize(("shared", "verdict", "tries"), [(True, "passed", 2), (False, "failed", 1)])
async def test_a_check_that_fails_in_a_used_sandbox_is_judged_again_in_a_new_one(
    bench: Bench, shared: bool, verdict: str, tries: int
) -> None:
    seen: list[bool] = []
    machines = UsedMachines()
    await leave_much(bench.sharing(machines))

    async def picky(bench: Bench) -> None:
        async with bench.machine():
            seen.append(bench.had_used)
            expect(not shared or not bench.had_used, "it is not new")
            expect(shared, "it never holds")

    found = await conformance._judge(Check("life", "picky", picky, shared=shared), bench, machines)
    assert (found.status, len(seen), seen[-1]) == (verdict, tries, False)
    await machines.close()


async def test_a_check_that_fails_in_a_new_sandbox_has_failed(bench: Bench) -> None:
    seen: list[bool] = []

    async def wrong(bench: Bench) -> None:
        async with bench.machine():
            seen.append(bench.had_used)
            expect(False, "it never holds")

    found = await conformance._judge(Check("life", "wrong", wrong, shared=True), bench, UsedMachines())
    assert (found.status, seen) == ("failed", [False])


def test_no_check_of_how_a_sandbox_begins_or_ends_shares_one() -> None:
    sharing = {check.area for check in conformance.checks() if check.shared}
    assert sharing.isdisjoint({"life", "living limits", "snapshots"})
    assert len(sharing) == 8
