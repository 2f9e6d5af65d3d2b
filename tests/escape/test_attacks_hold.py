"""Every attack, on every backend that works here."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from belljar.core.capabilities import Capabilities, Guarantees, Isolation
from belljar.engine.engine import Engine
from belljar.testing import escape
from engines import FLAVOURS, engines
from leaky import Leaky
from suites import SUITE_SECONDS, attacked

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(SUITE_SECONDS)]

Verdicts = dict[str, escape.AttackVerdict]
NAMES = [one.name for one in escape.ATTACKS]

# What only a control group can stop. Where there is none, `guarantees.weaker` says so, and so do we, loudly.
NEEDS_MEMORY_GROUP = {"inodes", "socket buffers"}
# What gVisor's own kernel (Debian's, of 2022) lets its guest do, and the host never hears of.
IN_A_KERNEL_OF_ITS_OWN = {
    "context files": "its sticky folders let a file be replaced; the next command gets its own again",
}


@pytest.fixture(scope="session")
async def guarantees() -> Guarantees:
    offer = await Engine().capabilities("native")
    assert offer.available, f"native does not work here, so nothing can be shown: {offer.why_not} ({offer.fix})"
    assert offer.guarantees
    return offer.guarantees


@pytest.fixture(scope="session")
async def verdicts(guarantees: Guarantees) -> Verdicts:
    return {verdict.name: verdict for verdict in await escape.attack("native", engine=Engine())}


@pytest.fixture(scope="session")
async def wasm() -> Capabilities:
    offer = await Engine().capabilities("wasm")
    if not offer.available:
        pytest.skip(f"NOT SHOWN: wasm does not work here: {offer.why_not} ({offer.fix})")
    return offer


@pytest.fixture(scope="session")
async def wasm_verdicts(wasm: Capabilities) -> Verdicts:
    return {verdict.name: verdict for verdict in await escape.attack("wasm", engine=Engine())}


@pytest.mark.parametrize("name", NAMES)
async def test_native_holds_against(name: str, verdicts: Verdicts, guarantees: Guarantees) -> None:
    verdict = verdicts[name]
    if verdict.status == "through" and name in NEEDS_MEMORY_GROUP and "cgroup" not in guarantees.limits["memory"]:
        assert guarantees.weaker, "what is weaker here has to be said"
        pytest.xfail(f"NOT HELD on this host, which gives us no memory control group: {verdict.detail}")
    assert verdict.held, f"{name}: {verdict.status}: {verdict.detail}"


@pytest.mark.containers
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", NAMES)
def test_containers_hold_against(name: str, flavour: str) -> None:
    engine = engines().engine(flavour)
    verdict = attacked(engine.settings.backend, engine)[name]
    if flavour == "gvisor" and verdict.status == "through" and (why := IN_A_KERNEL_OF_ITS_OWN.get(name)):
        pytest.xfail(f"NOT HELD on gVisor, whose kernel is not the host's: {why} ({verdict.detail})")
    assert verdict.held, f"{name}: {verdict.status}: {verdict.detail}"


class Braggart(Leaky):
    """No wall at all, and says that its guests have a kernel of their own."""

    async def probe(self) -> Capabilities:
        offer = await super().probe()
        return offer.model_copy(update={"guarantees": Guarantees(isolation=Isolation.KERNEL)})


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT SHOWN: only root gets through these without a wall")
@pytest.mark.parametrize("name", ["priority", "dangerous devices"])
async def test_who_only_says_that_a_guest_has_its_own_kernel_is_found_out_on_the_host(
    name: str, bait: escape.Bait, engine: Engine
) -> None:
    [one] = [one for one in escape.ATTACKS if one.name == name]
    braggart = Braggart(one.control)
    verdict = await escape.carry_out(one, bait, braggart, Engine(engine.settings, extra=(braggart,)))
    assert verdict.status == "through"
    assert verdict.detail.startswith("it worked:")


@pytest.mark.parametrize("name", NAMES)
async def test_wasm_holds_against(name: str, wasm_verdicts: Verdicts) -> None:
    verdict = wasm_verdicts[name]
    assert verdict.held, f"{name}: {verdict.status}: {verdict.detail}"


async def test_what_is_missing_is_a_wall_only_for_a_guest_without_system_calls(
    wasm: Capabilities, bait: escape.Bait, engine: Engine, attack_of: Callable[[str], escape.Attack]
) -> None:
    one = attack_of("os.no_such_call()")
    native, inside = [await escape.carry_out(one, bait, name, engine) for name in ("native", "wasm")]
    assert (native.status, native.detail[:10]) == ("inconclusive", "no verdict")
    assert inside.held
    assert inside.detail.startswith("no such call: module 'os' has no attribute 'no_such_call'")


@pytest.mark.parametrize("payload", ["1/0", "open('nowhere')", "None.x", "no_such_name", "raise SystemExit(3)", ""])
async def test_a_payload_that_breaks_is_no_wall_on_wasm_either(
    payload: str, wasm: Capabilities, bait: escape.Bait, engine: Engine, attack_of: Callable[[str], escape.Attack]
) -> None:
    verdict = await escape.carry_out(attack_of(payload), bait, "wasm", engine)
    assert verdict.status == "inconclusive"
    assert verdict.detail.startswith("no verdict")


async def test_an_attack_that_a_backend_cannot_carry_out_is_asked_for_all_the_same_and_refused(
    wasm_verdicts: Verdicts,
) -> None:
    assert wasm_verdicts["shell in arguments"].detail == "not possible: wasm takes no commands"
    assert wasm_verdicts["launcher's environment"].detail == "not possible: wasm does not speak bash"
