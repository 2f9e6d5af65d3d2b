"""The published suites, run once for each engine and session: test items look up their verdicts here.

One run of a whole suite has several checks or attacks under way at a time, which a run per test item cannot have.
"""

from __future__ import annotations

from functools import cache, partial

import anyio
import pytest

from belljar.engine.engine import Engine
from belljar.testing import conformance, escape

SUITE_SECONDS = 900  # the first test item that asks for a verdict waits for the whole suite


@cache
def checked(backend: str, engine: Engine) -> dict[str, conformance.CheckVerdict]:
    """Runs the conformance suite, the first time it is asked for, and returns its verdicts by name."""
    found = anyio.run(partial(conformance.conform, backend, engine=engine))
    return {verdict.name: verdict for verdict in found}


@cache
def attacked(backend: str, engine: Engine) -> dict[str, escape.AttackVerdict]:
    """Runs the escape suite, the first time it is asked for, and returns its verdicts by name."""
    found = anyio.run(partial(escape.attack, backend, engine=engine))
    return {verdict.name: verdict for verdict in found}


def assert_passed(verdict: conformance.CheckVerdict) -> None:
    """Fails or skips a test as the suite judged its check."""
    if verdict.status == "skipped":
        pytest.skip(verdict.detail)
    assert verdict.status == "passed", verdict.detail
