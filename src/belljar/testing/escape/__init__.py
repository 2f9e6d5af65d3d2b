"""The escape suite: attacks as data, to be run on any backend, and a runner that says which of them held.

>>> import anyio, belljar.testing.escape
>>> verdicts = anyio.run(belljar.testing.escape.attack, "native")
>>> [verdict.name for verdict in verdicts if not verdict.held]
[]

Every attack is harmless where it succeeds. Only a clear refusal is a wall: an attack of which neither that nor its
success was seen is tried once more, alone, and then is "inconclusive".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import anyio
import anyio.to_thread

from belljar.backends.base import Backend
from belljar.control.callbacks import Cancel
from belljar.core import errors
from belljar.core.result import Result, Status
from belljar.core.routing import LACKS
from belljar.engine.engine import Engine
from belljar.sandbox import arun, default_engine
from belljar.testing.escape.attacks import PRELUDE, Attack, AttackStatus, AttackVerdict, Control
from belljar.testing.escape.bait import Bait, lay
from belljar.testing.escape.in_living import in_living_sandboxes
from belljar.testing.escape.on_files import FILES, SURROUNDINGS
from belljar.testing.escape.on_kept_boxes import KEPT_BOXES
from belljar.testing.escape.on_kernel import KERNEL, MOUNTS, NAMESPACES, PRIVILEGES
from belljar.testing.escape.on_living import LIVING
from belljar.testing.escape.on_neighbours import NEIGHBOURS
from belljar.testing.escape.on_network import NETWORK, SIGNALS
from belljar.testing.escape.on_outputs import NAMES, OUTPUTS, TERMINAL
from belljar.testing.escape.on_repository import REPOSITORY
from belljar.testing.escape.on_resources import RESOURCES
from belljar.testing.escape.on_snapshots import SNAPSHOTS
from belljar.testing.escape.on_wasm import WASM
from belljar.testing.escape.scenarios import Range

__all__ = [
    "ATTACKS", "Attack", "AttackStatus", "AttackVerdict", "Bait", "Control", "attack", "carry_out",
    "in_living_sandboxes", "lay",
]  # fmt: skip

ATTACKS: tuple[Attack, ...] = (
    *FILES, *SURROUNDINGS, *MOUNTS, *PRIVILEGES, *NAMESPACES, *KERNEL, *NETWORK, *SIGNALS, *RESOURCES, *KEPT_BOXES,
    *REPOSITORY, *OUTPUTS, *NAMES, *NEIGHBOURS, *TERMINAL, *WASM, *LIVING, *SNAPSHOTS,
)  # fmt: skip

_AT_ONCE = 4  # attacks measure time and memory: a crowd would blur the verdicts
_DEADLINE_SECONDS = 60.0


async def attack(
    backend: str | Backend = "auto",
    *,
    only: Iterable[str] | None = None,
    on_verdict: Callable[[AttackVerdict], Any] | None = None,
    engine: Engine | None = None,
    attacks: Iterable[Attack] = ATTACKS,
) -> list[AttackVerdict]:
    """Puts a backend before the attacks and returns a verdict for each, in their order.

    Several are under way at a time. One that stays without a verdict may have starved among the others: it is tried
    once more, alone, before it is called inconclusive.

    Args:
        backend: its name, or a backend of your own.
        only: names and categories of attacks; None: all of them.
        on_verdict: is called with each verdict as it falls.
        engine: that runs them; None: the default one.
        attacks: to choose from.

    Returns:
        The verdicts, in the order of the attacks.

    Raises:
        InvalidRequest: `only` names what does not exist.
        BelljarError: the backend cannot run anything: that is never a list of walls that held.
    """
    engine = engine or default_engine()
    chosen = _choose(tuple(attacks), only)
    await _check_that_anything_runs(backend, engine)
    verdicts: dict[str, AttackVerdict] = {}
    turns = anyio.CapacityLimiter(_AT_ONCE)

    async def work(one: Attack, bait: Bait) -> None:
        async with turns:
            verdict = verdicts[one.name] = await carry_out(one, bait, backend, engine)
        if on_verdict and verdict.status != "inconclusive":
            on_verdict(verdict)

    with lay() as bait:
        async with anyio.create_task_group() as tasks:
            for one in chosen:
                tasks.start_soon(work, one, bait)
        for one in chosen:
            if (first := verdicts[one.name]).status == "inconclusive":
                verdict = verdicts[one.name] = _noted(await carry_out(one, bait, backend, engine), first)
                if on_verdict:
                    on_verdict(verdict)
    return [verdicts[one.name] for one in chosen]


def _noted(second: AttackVerdict, first: AttackVerdict) -> AttackVerdict:
    """The verdict of a second try, which says what came of the first."""
    before = "" if second.detail == first.detail else f": {first.detail}"
    return second.model_copy(update={"detail": f"{second.detail} (its second try{before})"})


async def carry_out(one: Attack, bait: Bait, backend: str | Backend, engine: Engine) -> AttackVerdict:
    """Carries out one attack, once, and returns what became of it."""

    def verdict(status: AttackStatus, detail: str) -> AttackVerdict:
        return AttackVerdict(name=one.name, category=one.category, status=status, detail=detail)

    bait = bait.apart()
    lack = await _lack(one, backend, engine)
    try:
        with anyio.fail_after(_DEADLINE_SECONDS):
            result = await _run(one, bait, backend, engine)
            if lack:
                return verdict("through", f"not refused, though {lack}")
            through = await anyio.to_thread.run_sync(one.after, result, bait) if one.after else ""
    except TimeoutError:
        return verdict("inconclusive", f"no answer within {_DEADLINE_SECONDS:g} s")
    except (errors.PolicyDenied, errors.NotAvailable) as error:
        if lack:
            return verdict("held", f"not possible: {lack}")
        return verdict("inconclusive", f"it was refused: {error.message}")
    except errors.BackendError as error:
        return verdict("inconclusive", f"the backend failed: {type(error).__name__}: {error}"[:300])
    except Exception as error:  # whatever an attack does to us, the others still get their verdict
        return verdict("through", f"it broke Belljar: {type(error).__name__}: {error}"[:300])
    return verdict("through", through) if through else verdict(*judge(one, result, bait))


def judge(one: Attack, result: Result, bait: Bait) -> tuple[AttackStatus, str]:
    """Held only if the payload says so, or a limit that was meant to strike did, and no secret came back."""
    notes = (result.reasons, result.denied, result.left_out, result.warnings)
    told = (result.stdout, result.stderr, repr(notes), repr(result.error), repr(result.results))
    if any(bait.secret in text for text in told) or any(bait.secret.encode() in file.content for file in result.files):
        return "through", "the host's secret came back"
    lines = result.stdout.splitlines()
    words: tuple[tuple[str, AttackStatus], ...] = (("ESCAPED", "through"), ("HELD", "held"))
    for word, status in words:
        for line in lines:
            if line == word or line.startswith(f"{word} "):
                return status, line.removeprefix(word).strip() or word.lower()
    if result.status in one.ends:
        return "held", f"ended: {result.status.value}"
    said = (result.stderr.strip().splitlines() or lines or ["nothing"])[-1]
    return "inconclusive", f"no verdict ({result.status.value}, exit code {result.exit_code}), it said: {said[:160]}"


async def _lack(one: Attack, backend: str | Backend, engine: Engine) -> str:
    """What the attack needs and the backend says it does not have; empty if nothing, or if `auto` may choose."""
    name = backend if isinstance(backend, str) else backend.name
    if name == "auto":
        return ""
    offer = await (engine.capabilities(name) if isinstance(backend, str) else backend.probe())
    if one.living and offer.living is None:
        return f"{name} has no living sandboxes"
    if one.feature and one.feature not in (offer.living or ()):
        return f"{name} {LACKS[one.feature]}"
    if "command" in one.options:
        return "" if offer.commands else f"{name} takes no commands"
    if "net" in one.options and ("open" if "*" in one.options["net"] else "listed") not in offer.egress:
        return f"{name} lets nobody out to {'any host' if '*' in one.options['net'] else 'listed hosts'}"
    if one.needs_workspace and not offer.workspace:
        return f"{name} is granted no folders"
    spoken = offer.languages is None or one.language in offer.languages
    return "" if spoken else f"{name} does not speak {one.language}"


async def _run(one: Attack, bait: Bait, backend: str | Backend, engine: Engine) -> Result:
    code = _ready(one.payload, one.language, bait)
    options: dict[str, Any] = {"timeout": 25, **_filled(one.options, bait)}
    range_ = Range(backend, engine, bait, code, options, one.living)
    if one.scenario:
        return await one.scenario(range_)
    if "command" in options:
        return await range_.run(**options)
    if one.neighbour:
        return await _beside(one, range_)
    return await range_.run(code, language=one.language, **options)


async def _beside(one: Attack, range_: Range) -> Result:
    """Runs the payload while the neighbour is there with its mark; if it could leave none, that is the verdict."""
    ready, cancel = anyio.Event(), Cancel()
    heard: list[str] = []
    answers: list[Result] = []

    def hear(text: str) -> None:
        heard.append(text)
        if "READY" in "".join(heard):
            ready.set()

    async def stay() -> None:
        left = _ready(one.neighbour, one.language, range_.bait)
        answers.append(await range_.run(left, on_stdout=hear, cancel=cancel, timeout=25))
        ready.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stay)
        await ready.wait()
        if answers:
            return answers[0]
        result = await range_.run(range_.payload, **range_.options)
        cancel.cancel()
    if answers[0].status is not Status.ABORTED:
        return answers[0].model_copy(update={"stdout": "", "stderr": "the neighbour was gone before it was looked for"})
    return result


def _ready(payload: str, language: str, bait: Bait) -> str:
    return bait.fill(PRELUDE + payload if language == "python" else payload)


def _filled(value: Any, bait: Bait) -> Any:
    match value:
        case str():
            return bait.fill(value)
        case Mapping():
            return {bait.fill(key): _filled(inner, bait) for key, inner in value.items()}
        case tuple():
            return tuple(_filled(inner, bait) for inner in value)
        case _:
            return value


def _choose(attacks: tuple[Attack, ...], only: Iterable[str] | None) -> tuple[Attack, ...]:
    if only is None:
        return attacks
    wanted = set(only)
    known = {one.name for one in attacks} | {one.category for one in attacks}
    if unknown := sorted(wanted - known):
        raise errors.InvalidRequest(f"only: no attack or category is named {', '.join(map(repr, unknown))}")
    return tuple(one for one in attacks if one.name in wanted or one.category in wanted)


async def _check_that_anything_runs(backend: str | Backend, engine: Engine) -> None:
    result = await arun("print(6 * 7)", backend=backend, engine=engine)
    if result.stdout.strip() != "42":
        raise errors.ExecutionFailed(f"not even a harmless snippet runs here: {result.stderr.strip()[:200]}")
