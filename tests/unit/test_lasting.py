"""What is written down of sandboxes that outlive their server, and who takes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from belljar.backends.containers import orphans
from belljar.backends.containers.living.upkeep import Upkeep
from belljar.core.labels import LATEST_LABEL
from belljar.core.plan import Plan
from belljar.core.request import Egress, Limits
from belljar.protocol.living import SandboxRecord
from belljar.protocol.records import Caller
from belljar.service.instances import ServerInstance
from belljar.service.sandboxes.ended import EndedSandboxes

AGAIN = {"absence": 600.0, "mark": "whatever the next server needs"}
ANYBODY = Caller(name="local user", scopes=frozenset({"admin"}))


@pytest.fixture
def first(tmp_path: Path) -> Iterator[ServerInstance]:
    with ServerInstance(tmp_path) as instance:
        yield instance


def record(id: str) -> SandboxRecord:
    return SandboxRecord(id=id, caller="somebody", backend="docker", created=time.time())


def killed(tmp_path: Path, id: str, again: dict[str, object] | None) -> None:
    """A server writes a sandbox down, and is gone without a word."""
    dead = ServerInstance(tmp_path)
    dead.owes = True
    with dead:
        held = EndedSandboxes(tmp_path, dead)
        held.settle()
        anyio.run(held.began, record(id), again)


def test_what_goes_on_is_nobodys_until_one_server_takes_it(tmp_path: Path, first: ServerInstance) -> None:
    killed(tmp_path, "bs-goes-on", AGAIN)
    killed(tmp_path, "bs-ends", None)
    one, two = EndedSandboxes(tmp_path, first), ServerInstance(tmp_path)
    assert one.settle() == 1
    lost = one.find("bs-ends", ANYBODY)
    assert lost is not None and lost.state == "lost"
    assert one.find("bs-goes-on", ANYBODY) is None, "it has not ended"
    first.clear()  # the dead servers are forgotten
    with two:
        other = EndedSandboxes(tmp_path, two)
        assert other.settle() == 0
        assert [(found.id, again) for found, again in other.claim()] == [("bs-goes-on", AGAIN)]
        assert one.claim() == [] and other.claim() == []


def test_what_a_living_server_holds_is_neither_lost_nor_taken(tmp_path: Path, first: ServerInstance) -> None:
    mine = EndedSandboxes(tmp_path, first)
    mine.settle()
    anyio.run(mine.began, record("bs-1"), AGAIN)
    with ServerInstance(tmp_path) as second:
        other = EndedSandboxes(tmp_path, second)
        assert other.settle() == 0 and other.claim() == []


def test_what_nobody_came_for_is_lost_when_it_has_ended_by_itself(tmp_path: Path, first: ServerInstance) -> None:
    killed(tmp_path, "bs-1", AGAIN)
    one = EndedSandboxes(tmp_path, first)
    assert one.settle() == 0
    old = time.time() - 2 * 600 - 120
    os.utime(tmp_path / "sandboxes" / "bs-1.json", (old, old))
    assert one.settle() == 1 and one.claim() == []


def test_what_a_server_left_is_taken_without_a_look_at_who_died(tmp_path: Path, first: ServerInstance) -> None:
    async def leave() -> None:
        with ServerInstance(tmp_path) as leaving:
            await EndedSandboxes(tmp_path, leaving).began(record("bs-1"), AGAIN, left=True)

    one = EndedSandboxes(tmp_path, first)
    one.settle()
    anyio.run(leave)
    assert one.settle() == 0
    assert [found.id for found, _ in one.claim()] == ["bs-1"]


def test_the_walls_of_a_plan_are_one_word_in_every_process() -> None:
    code = (
        "from belljar.core.plan import Plan; from belljar.core.request import Egress;"
        "print(Plan(egress=Egress(mode='listed', hosts=frozenset({'a.test', 'b.test', 'c.test'}))).walls)"
    )
    said = set()
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed}
        said.add(subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True).stdout)
    assert len(said) == 1
    hosts = frozenset({"a.test", "b.test", "c.test"})
    plan = Plan(egress=Egress(mode="listed", hosts=hosts))
    assert said == {f"{plan.walls}\n".encode()}
    other = [
        Plan(egress=Egress(mode="listed", hosts=hosts - {"c.test"})),
        plan.model_copy(update={"limits": Limits(pids=7)}),
        plan.model_copy(update={"image": "another"}),
        plan.model_copy(update={"user": "root"}),
    ]
    assert len({one.walls for one in (plan, *other)}) == 5
    assert plan.model_copy(update={"id": "bs-2", "notes": ("why",)}).walls == plan.walls


@pytest.mark.parametrize(
    ("state", "label", "waits"),
    [
        ("running", "+60", True), ("paused", "+60", True), ("exited", "+60", False), ("running", "-60", False),
        ("running", "", False), ("running", "soon", False),
    ],
)  # fmt: skip
def test_only_what_runs_and_whose_time_is_not_over_waits_for_its_server(state: str, label: str, waits: bool) -> None:
    latest = str(int(time.time()) + int(label)) if label[:1] in "+-" and label else label
    assert orphans._waits_for_owner({"State": state, "Labels": {LATEST_LABEL: latest} if label else None}) is waits


@pytest.mark.anyio
async def test_a_box_lives_on_for_the_absence_at_least_and_no_longer_than_its_time() -> None:
    said: list[int] = []
    life: list[float | None] = [None]

    async def say(argv: list[str]) -> None:
        said.append(int(argv[-1]))

    upkeep = Upkeep(0.4, lambda: life[0], say)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(upkeep.renew)
        with anyio.fail_after(10):
            while len(said) < 3:
                await anyio.sleep(0.01)
        assert set(said) == {1}, "twice the absence, in whole seconds"
        tasks.cancel_scope.cancel()
    said.clear()
    short = Upkeep(600.0, lambda: 30.0, say)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(short.renew)
        with anyio.fail_after(10):
            while not said:
                await anyio.sleep(0.01)
        assert said[0] in (30, 31)
        tasks.cancel_scope.cancel()
