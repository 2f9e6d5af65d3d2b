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

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

import anyio

from belljar.backends.base import Backend
from belljar.backends.fake import Program
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.sandbox import default_engine
from belljar.testing.conformance import (
    box_files,
    endings,
    files,
    inputs,
    limits,
    lives,
    living,
    results,
    sandboxes,
    sessions,
    streams,
    walls,
)
from belljar.testing.conformance.bench import CHECKS, SCRIPTS, Bench, Check, CheckFailed, check, guest
from belljar.testing.conformance.machines import UsedMachines

__all__ = ["AREAS", "Bench", "Check", "CheckFailed", "CheckVerdict", "check", "checks", "conform", "guest", "scripts"]

AREAS = (streams, inputs, files, sandboxes, box_files, endings, limits, lives, results, walls, sessions, *living.AREAS)
AT_ONCE = 6
_DEADLINE_SECONDS = 90


class CheckVerdict(NamedTuple):
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
    backend: str | Backend = "auto",
    *,
    only: Collection[str] | None = None,
    on_verdict: Callable[[CheckVerdict], Any] | None = None,
    engine: Engine | None = None,
    at_once: int = AT_ONCE,
) -> list[CheckVerdict]:
    """Runs the checks on a backend and returns a verdict for each, in the order of `checks()`.

    Args:
        backend: its name, or a backend of your own; "auto" takes the first that works here.
        only: names of checks or areas; all checks if it is not given.
        on_verdict: called with each verdict as soon as it is known.
        engine: the engine to run on; the default engine if it is not given.
        at_once: how many checks run at the same time. Those that share living sandboxes come after the others, and
            those that measure time run alone, last.

    Returns:
        The verdicts, one for each check.

    Raises:
        NotAvailable: the backend does not work here; a suite that was not run has not passed.
        InvalidRequest: `only` names a check or an area that does not exist.
    """
    wanted = _wanted(only)
    bench = await _bench(backend, engine)
    verdicts: dict[str, CheckVerdict] = {}
    turns = anyio.CapacityLimiter(at_once)
    machines = UsedMachines()

    async def work(item: Check) -> None:
        async with turns:
            verdict = verdicts[item.name] = await _judge(item, bench, machines)
        if on_verdict:
            on_verdict(verdict)

    async def work_on(items: Iterable[Check]) -> None:
        async with anyio.create_task_group() as tasks:
            for item in items:
                tasks.start_soon(work, item)

    at_a_time = [item for item in wanted if not item.alone]
    await work_on(item for item in at_a_time if not item.shared)
    try:  # afterwards, since sandboxes that are kept open take places which others need
        await work_on(item for item in at_a_time if item.shared)
    finally:
        await machines.close()
    for item in wanted:
        if item.alone:
            await work(item)
    return [verdicts[item.name] for item in wanted]


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


async def _judge(item: Check, bench: Bench, machines: UsedMachines) -> CheckVerdict:
    """Judges it, and once more in new sandboxes if it failed in one where another check had been."""
    for need in item.needs:
        if lack := bench.lacks(need):
            return CheckVerdict(item.name, item.area, "skipped", lack)
    if item.alone or not item.shared:
        return await _tried(item, bench)
    sharing = bench.sharing(machines)
    verdict = await _tried(item, sharing)
    return await _tried(item, bench) if verdict.status == "failed" and sharing.had_used else verdict


async def _tried(item: Check, bench: Bench) -> CheckVerdict:
    try:
        with anyio.fail_after(_DEADLINE_SECONDS):
            await item.body(bench)
    except CheckFailed as error:
        return CheckVerdict(item.name, item.area, "failed", str(error))
    except TimeoutError:
        return CheckVerdict(item.name, item.area, "failed", f"no end after {_DEADLINE_SECONDS} s")
    except Exception as error:  # a backend that raises where it should answer has failed, and the next check goes on
        return CheckVerdict(item.name, item.area, "failed", _told(error))
    return CheckVerdict(item.name, item.area, "passed")


def _told(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):  # from a task group of the check: its first cause is what matters
        error = error.exceptions[0]
    return str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
