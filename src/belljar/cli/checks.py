"""`belljar conformance` and `belljar attack`: a backend is put to the test, here."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from belljar.cli import process, terminal
from belljar.cli.options import Backend, Json
from belljar.sandbox import default_engine

Living = Annotated[
    bool, typer.Option("--living", help="Have each attack made by a command of a living sandbox, where it can be.")
]
_MARKS = {"held": "held", "through": "THROUGH", "inconclusive": "inconclusive"}


def conformance(backend: Backend = "auto", as_json: Json = False) -> None:
    """Check a backend against the contract, one named check after the other."""
    from belljar.testing.conformance import checks, conform

    async def work() -> Any:
        name = await _working(backend)
        with terminal.progress(f"conformance of {name}", len(checks())) as step:
            return name, await conform(name, on_verdict=lambda verdict: step(verdict.name))

    backend, found = process.run_async(work)
    failed = sum(verdict.status == "failed" for verdict in found)
    if as_json:
        rows = [{"name": v.name, "area": v.area, "status": v.status, "detail": v.detail} for v in found]
        terminal.print_json({"backend": backend, "checks": rows})
    else:
        terminal.verdicts(f"conformance of {backend}", ((v.status, v.area, v.name, v.detail) for v in found))
        terminal.say(f"{len(found) - failed} of {len(found)} checks passed or do not apply, {failed} failed")
    raise typer.Exit(1 if failed else 0)


def attack(backend: Backend = "auto", living: Living = False, as_json: Json = False) -> None:
    """Attack a sandbox in every way we know; exits non-zero unless all of it held."""
    from belljar.testing.escape import ATTACKS, in_living_sandboxes
    from belljar.testing.escape import attack as run_attacks

    attacks = in_living_sandboxes(ATTACKS) if living else ATTACKS

    async def work() -> Any:
        name = await _working(backend)
        with terminal.progress(f"attacks on {name}", len(attacks)) as step:
            return name, await run_attacks(name, on_verdict=lambda verdict: step(verdict.name), attacks=attacks)

    backend, found = process.run_async(work)
    if as_json:
        terminal.print_json({"backend": backend, "attacks": [verdict.as_dict() for verdict in found]})
    else:
        table = ((_MARKS[v.status], v.category, v.name, v.detail) for v in found)
        terminal.verdicts(f"attacks on {backend}", table)
        counts = Counter(verdict.status for verdict in found)
        unknown = f", {counts['inconclusive']} inconclusive" if counts["inconclusive"] else ""
        terminal.say(f"{counts['held']} of {len(found)} attacks held, {counts['through']} got through{unknown}")
    raise typer.Exit(0 if all(verdict.held for verdict in found) else 1)


async def _working(backend: str) -> str:
    """Returns the backend to test: the one that was named, or the first that works here."""
    found = await default_engine().backends()
    return next((one.backend for one in found if backend in ("auto", one.backend) and one.available), backend)
