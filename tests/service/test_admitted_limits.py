"""What admission reckons for a run is what its plan grants: there is one place that resolves limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.fake import Fake, FakeProcess
from belljar.core import errors
from belljar.core.options import request
from belljar.core.settings import Settings
from belljar.core.values import GIB, MIB
from belljar.engine.engine import Engine
from belljar.protocol.records import SCOPES, Caller
from belljar.service.admission.queue import Ticket
from belljar.service.service import Service

pytestmark = pytest.mark.anyio
ANN = Caller(name="ann", scopes=frozenset(SCOPES))


async def ends(process: FakeProcess) -> None:
    """A program that does nothing."""


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(Settings(data_dir=str(tmp_path)))
    service.engine = Engine(service.settings, extra=[Fake({"print(1)": ends})])
    async with service:
        yield service


@pytest.fixture
def reckoned(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """CPUs and memory of each run that asked for a place."""
    asked: list[tuple[float, int]] = []
    ask = service.admission.ask

    def noting(caller: Caller, *, cpus: float, memory: int, **rest: Any) -> Ticket:
        asked.append((cpus, memory))
        return ask(caller, cpus=cpus, memory=memory, **rest)

    monkeypatch.setattr(service.admission, "ask", noting)
    return asked


@pytest.mark.parametrize(
    "options, memory",
    [
        ({}, 512 * MIB),
        ({"type": "test-runner"}, 2 * GIB),
        ({"type": "test-runner", "memory": "64M"}, 64 * MIB),
    ],
)
async def test_a_run_waits_for_the_memory_that_its_plan_grants(
    service: Service, reckoned: list[tuple[float, int]], options: dict[str, Any], memory: int
) -> None:
    asked = request("print(1)", backend="fake", **options)
    run = await service.submit(asked, ANN)
    assert (await run.result()).status == "success"
    assert reckoned == [(1.0, memory)]


async def test_a_run_over_a_cap_waits_for_nothing_and_is_refused(
    service: Service, reckoned: list[tuple[float, int]]
) -> None:
    run = await service.submit(request("print(1)", backend="fake", memory="1T"), ANN)
    with pytest.raises(errors.PolicyDenied, match="over the cap"):
        await run.result()
    assert reckoned == [(0.0, 0)]
    assert run.record.state == "refused"
