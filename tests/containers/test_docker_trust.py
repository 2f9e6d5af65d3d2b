"""Which images the container backends run: only what the rules for images let through."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.core import errors
from belljar.core.options import request
from belljar.engine.engine import Engine
from belljar.images.images import Images
from engines import IMAGE, engines

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
ABSENT = "127.0.0.1:1/absent:1"  # where nobody listens


async def test_an_image_that_is_not_pinned_does_not_run_where_the_rules_ask_for_a_lock(tmp_path: Path) -> None:
    rules = {"images": {"require_lock": True, "lock_file": str(tmp_path / "lock")}}
    engine = engines().engine("docker", **rules)
    with pytest.raises(errors.BelljarError, match="not in the lock file"):
        await engine.run(request("print('never')", backend="docker"))
    await Images(engine.settings).lock([IMAGE])
    await engine.capabilities("docker", again=True)
    result = await engine.run(request("print('pinned')", backend="docker"))
    assert result.stdout == "pinned\n", result.stderr


async def test_an_absent_image_is_fetched_for_who_asks_by_name_and_auto_does_not_wait_for_it() -> None:
    settings = engines().settings("auto", container={"images": {"execution": ABSENT}})
    told: list[str] = []
    absent = Engine(settings, on_setup=told.append)
    offer = await absent.capabilities("docker")
    assert not offer.available
    assert offer.fix == f"belljar images pull {ABSENT}"
    assert ABSENT in offer.setup
    assert (await absent.run(request("print('elsewhere')"))).stdout == "elsewhere\n"
    assert told == []
    with pytest.raises(errors.BelljarError, match="connection refused"):
        await absent.run(request("print('never')", backend="docker"))
    assert told == [f"pulling {ABSENT}"]
