"""The contract of a backend as named checks, for ours and for yours.

>>> verdicts = await conform("native")            # or conform(YourBackend())
>>> [v.name for v in verdicts if v.status == "failed"]
[]

Each check is a sentence about what a user sees, run through the same engine as everything else. A check is
skipped only where `Capabilities` says that the backend does not offer the thing, and names it. Beside every
guest program stands its scripted twin, so `conform(Fake(scripts()))` proves suite and engine without any
sandbox installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import anyio

from belljar.backends.base import Backend
from belljar.backends.fake import Program
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.sandbox import default_engine
from belljar.testing.conformance import (
    endings,
    files,
    inputs,
    limits,
    lives,
    results,
    sandboxes,
    sessions,
    streams,
    walls,
)
from belljar.testing.conformance.bench import CHECKS, SCRIPTS, Bench, Check, CheckFailed, check, guest

__all__ = ["AREAS", "Bench", "Check", "CheckFailed", "Verdict", "check", "checks", "conform", "guest", "scripts"]

AREAS = (streams, inputs, files, sandboxes, endings, limits, lives, results, walls, sessions)
_DEADLINE_SECONDS = 90


class Verdict(NamedTuple):
    """What one check came to; `detail` says why, unless it passed."""

    name: str
    area: str
    status: Literal["passed", "failed", "skipped"]
    detail: str = ""

    def as_dict(self) -> dict[str, str]:
        return self._asdict()


def checks() -> tuple[Check, ...]:
    return tuple(CHECKS.values())


def scripts() -> dict[str, Program]:
    """The twins of all guests, for `Fake`."""
    return dict(SCRIPTS)


async def conform(
    backend: str | Backend = "auto", *, only: Collection[str] | None = None,
    on_verdict: Callable[[Verdict], Any] | None = None, engine: Engine | None = None,
) -> list[Verdict]:  # fmt: skip
    """Runs the checks (or `only` those of these names or areas), one after the other, and tells each verdict.

    Raises `NotAvailable` if the backend does not work here: a suite that was not run has not passed.
    """
    wanted = _wanted(only)
    bench = await _bench(backend, engine)
    verdicts = []
    for item in wanted:
        verdict = await _judge(item, bench)
        verdicts.append(verdict)
        if on_verdict:
            on_verdict(verdict)
    return verdicts


def _wanted(only: Collection[str] | None) -> list[Check]:
    if only is None:
        return list(CHECKS.values())
    known = {name for item in CHECKS.values() for name in (item.name, item.area)}
    if unknown := sorted(set(only) - known):
        raise errors.InvalidRequest(f"only: there is no check or area {unknown[0]!r}")
    return [item for item in CHECKS.values() if item.name in only or item.area in only]


async def _bench(backend: str | Backend, engine: Engine | None) -> Bench:
    base = engine or default_engine()
    if not isinstance(backend, str):
        base = Engine(base.settings, extra=(backend,))
        backend = backend.name
    offers = await base.backends() if backend == "auto" else (await base.capabilities(backend),)
    offer = next((offer for offer in offers if offer.available), None)
    if offer is None:
        why = "; ".join(f"{offer.backend}: {offer.why_not}" for offer in offers)
        raise errors.NotAvailable(f"nothing to check: {why}", fix="; ".join(offer.fix for offer in offers))
    return Bench(base, offer.backend, offer, await base.languages_of(offer.backend))


async def _judge(item: Check, bench: Bench) -> Verdict:
    for need in item.needs:
        if lack := bench.lacks(need):
            return Verdict(item.name, item.area, "skipped", lack)
    try:
        with anyio.fail_after(_DEADLINE_SECONDS):
            await item.body(bench)
    except CheckFailed as error:
        return Verdict(item.name, item.area, "failed", str(error))
    except TimeoutError:
        return Verdict(item.name, item.area, "failed", f"no end after {_DEADLINE_SECONDS} s")
    except Exception as error:  # a backend that raises where it should answer has failed, and the next check goes on
        return Verdict(item.name, item.area, "failed", _told(error))
    return Verdict(item.name, item.area, "passed")


def _told(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):  # from a task group of the check: its first cause is what matters
        error = error.exceptions[0]
    return str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
