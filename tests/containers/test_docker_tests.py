"""Test runs in containers: the same reports as on native, in an image of the project's language."""

from __future__ import annotations

from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from engines import PODMAN_AGAIN, engines, nothing_left
from small_projects import HANGS, LEAVES, SUMS, project

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]


@pytest.fixture(params=["docker", PODMAN_AGAIN])
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


async def test_a_project_is_tested_in_the_image_of_its_language_and_nothing_is_left(
    engine: Engine, tmp_path: Path
) -> None:
    name = engine.settings.backend
    folder = project(tmp_path / "p")
    report = await belljar.atest(folder, engine=engine, backend=name, keep=True)
    assert (report.status, report.framework, report.backend) == ("failed", "unittest", name), report
    assert (report.passed, report.failed, report.skipped) == (1, 1, 1)
    assert (report.failures[0].file, report.failures[0].line) == ("test_it.py", 6)
    async with belljar.AsyncSandbox(engine=engine, backend=name, snapshot=report.kept) as box:
        assert await box.files.read_text("test_it.py") == SUMS
        (again,) = (await box.test(only=[report.failures[0].id])).tests
        assert again.id == "test_it.Sums.test_bad"
    await belljar.aremove_snapshot(report.kept, engine=engine)
    assert [one.name for one in folder.iterdir()] == ["test_it.py"]
    assert await nothing_left(engine)


async def test_what_crashed_or_hung_in_a_container_has_its_own_status(engine: Engine, tmp_path: Path) -> None:
    name = engine.settings.backend
    crashed = await belljar.atest(project(tmp_path / "leaves", LEAVES), engine=engine, backend=name)
    assert (crashed.status, crashed.failed) == ("crashed", 0), crashed
    late = await belljar.atest(project(tmp_path / "hangs", HANGS), engine=engine, backend=name, timeout=3)
    assert late.status == "timeout" and late.error is not None
    with pytest.raises(errors.BelljarError):
        await belljar.atest(tmp_path / "leaves", engine=engine, backend=name, packages=["apple"])
    assert await nothing_left(engine)
