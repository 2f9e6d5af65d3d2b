"""The same attacks where the wall is missing: each has to get through, or holding against it would mean nothing."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from belljar import settings
from belljar.backends.native import jail
from belljar.core import display
from belljar.engine.engine import Engine
from belljar.testing import escape
from leaky import Leaky

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

SHOWN = [one for one in escape.ATTACKS if one.control != "none"]
CAP_SYS_RESOURCE = 24
NEEDS_SYS_RESOURCE = {"OOM immunity", "raise rlimits"}
BREAKS = {"deep tree"}
_AT_ONCE = 4
# What a kernel or a host says that has no such door at all, walls or not.
ABSENT = (
    "ENOSYS", "Function not implemented", "Address family not supported", "Protocol not supported",
    "Network is unreachable", "nothing to try", "ended with -11",
)  # fmt: skip


@pytest.fixture(scope="session")
async def verdicts() -> dict[str, escape.AttackVerdict]:
    """Of all of them, several at a time: most of what they take is waiting."""
    found: dict[str, escape.AttackVerdict] = {}
    turns = anyio.CapacityLimiter(_AT_ONCE)

    async def show(one: escape.Attack, bait: escape.Bait) -> None:
        leaky = Leaky(one.control)
        async with turns:
            found[one.name] = await escape.carry_out(one, bait, leaky, Engine(extra=(leaky,)))

    with escape.lay() as bait:
        async with anyio.create_task_group() as tasks:
            for one in SHOWN:
                if not _not_shown(one):
                    tasks.start_soon(show, one, bait)
    return found


def _not_shown(one: escape.Attack) -> str:
    """Why an attack cannot be shown to get through here; empty if it can."""
    if one.control == "root" and os.geteuid() != 0:
        return "this control needs root (in namespaces of its own); run the tests as root, too"
    if one.name in NEEDS_SYS_RESOURCE and not _has(CAP_SYS_RESOURCE):
        return "this root lacks CAP_SYS_RESOURCE, so the kernel refuses it even without walls"
    return ""


@pytest.mark.parametrize("one", SHOWN, ids=lambda one: one.name)
async def test_without_its_wall_gets_through(one: escape.Attack, verdicts: dict[str, escape.AttackVerdict]) -> None:
    if why := _not_shown(one):
        pytest.skip(f"NOT SHOWN: {why}")
    verdict = verdicts[one.name]
    if verdict.held and any(sign in verdict.detail for sign in ABSENT):
        pytest.skip(f"NOT SHOWN: this host has no such door even without walls: {verdict.detail}")
    assert verdict.status == "through", f"{verdict.status} without any wall, so it shows nothing: {verdict.detail}"
    # A control that merely breaks shows nothing; except where breaking the collector is what the attack is after.
    assert one.name in BREAKS or not verdict.detail.startswith("it broke"), verdict.detail


async def test_a_reader_of_settings_that_takes_caps_from_a_project_lets_the_settings_file_through(
    bait: escape.Bait, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_PROJECT_KEYS", {"backend", "defaults", "caps"})
    verdict = await escape.carry_out(_named("settings file"), bait, "native", engine)
    assert verdict.status == "through"
    assert "caps" in verdict.detail


async def test_an_engine_that_takes_a_grant_by_its_name_lets_a_granted_folder_become_a_link(
    bait: escape.Bait, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.engine.engine._resolved", lambda request: request)
    leaky = Leaky("bare")
    verdict = await escape.carry_out(
        _named("granted folder becomes a link"), bait, leaky, Engine(engine.settings, extra=(leaky,))
    )
    assert verdict.status == "through"
    assert "the host's /etc is the workspace" in verdict.detail


async def test_a_command_line_that_shows_output_as_it_is_lets_escape_sequences_through(
    bait: escape.Bait, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "neutralise", lambda text: text)
    verdict = await escape.carry_out(_named("escape sequences"), bait, "native", engine)
    assert verdict.status == "through"
    assert "0x1b" in verdict.detail


async def test_a_jail_without_its_mask_lets_the_memory_of_its_init_through(
    bait: escape.Bait, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail, "_INIT_MASKS", ())
    verdict = await escape.carry_out(_named("sandbox's init"), bait, "native", engine)
    assert not verdict.held
    assert "/proc/1/mem gave" in verdict.detail


def _has(capability: int) -> bool:
    effective = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    return bool(int(effective, 16) >> capability & 1)


def _named(name: str) -> escape.Attack:
    return next(one for one in escape.ATTACKS if one.name == name)
