"""Figures of a single run on wasm: what is shown, and what is open at its end, are results."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

import belljar
from belljar.engine.engine import Engine

pytestmark = pytest.mark.anyio

PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\n"


@pytest.fixture(autouse=True)
async def wasm(engine: Engine) -> None:
    found = await engine.capabilities("wasm")
    if not found.available:
        pytest.skip(f"wasm is missing here ({found.why_not}): {found.fix}")


def pictures(result: belljar.Result) -> list[bytes]:
    return [base64.b64decode(bundle["image/png"]) for bundle in result.results]


async def test_what_is_shown_and_what_is_left_open_comes_back(engine: Engine) -> None:
    result = await belljar.arun(f"{PLOT}plt.show()\nplt.plot([2, 1])\nprint('drawn')", engine=engine, timeout=60)
    assert (result.backend, result.stdout, result.stderr) == ("wasm", "drawn\n", "")
    one, two = pictures(result)
    assert one.startswith(b"\x89PNG\r\n\x1a\n") and two.startswith(b"\x89PNG\r\n\x1a\n") and one != two


async def test_a_closed_figure_is_none_and_a_failure_takes_none_away(engine: Engine) -> None:
    closed = await belljar.arun(f"{PLOT}plt.savefig('a.png')\nplt.close()", engine=engine, timeout=60, collect=["**"])
    assert closed.results == () and [file.path for file in closed.files] == ["a.png"]
    failed = await belljar.arun(f"{PLOT}raise ValueError('late')", engine=engine, timeout=60)
    assert failed.status == "error" and len(pictures(failed)) == 1
    assert "figures" not in failed.stderr, "the guest's frames only"


async def test_a_granted_folder_stays_clean(engine: Engine, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    result = await belljar.arun(PLOT, engine=engine, backend="wasm", timeout=60, workspace=str(tmp_path), write=True)
    assert len(pictures(result)) == 1, result.stderr
    assert list(tmp_path.iterdir()) == []


async def test_what_is_no_picture_is_not_believed(engine: Engine) -> None:
    forged = (
        "import matplotlib, os\nos.makedirs('/tmp/.belljar-figures')\n"
        "open('/tmp/.belljar-figures/001.png', 'w').write('<script>')\n"
        "os.symlink('/workspace/main.py', '/tmp/.belljar-figures/002.png')\n"
    )
    result = await belljar.arun(forged, engine=engine, backend="wasm", timeout=60)
    assert result.results == (), result.stderr
