"""Says where. `choose` weighs a plan against what each backend can do here; it does no I/O.

It never falls back to something weaker than asked, and never to no sandbox at all. What a backend cannot do is an
objection and final; what the code may need and the backend lacks is only a doubt, because it is read from the code's
text: another backend is preferred then, but this one is taken if there is no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees
from belljar.core.plan import Plan
from belljar.core.values import format_size

_MODULES_SHOWN = 5


class Choice(NamedTuple):
    backend: str
    reasons: tuple[str, ...]


def choose(plan: Plan, offers: Sequence[Capabilities]) -> Choice:
    """The first offer, in order of preference, that can do all the plan asks and its code seems to need."""
    if plan.backend != "auto":
        return _named(plan, offers)
    passed_over: list[str] = []
    doubtful: list[tuple[str, str]] = []
    for offer in offers:
        if objection := _objection(plan, offer):
            passed_over.append(f"{offer.backend} passed over: {objection}")
        elif doubt := _doubt(plan, offer):
            passed_over.append(f"{offer.backend} passed over: {doubt}")
            doubtful.append((offer.backend, doubt))
        else:
            return Choice(offer.backend, (*passed_over, f"{offer.backend} chosen: first that can do what was asked"))
    if doubtful:
        backend, doubt = doubtful[0]
        return Choice(backend, (*passed_over, f"{backend} chosen for want of another, though {doubt}"))
    fixes = [f"{offer.backend}: {offer.fix}" for offer in offers if offer.fix and not offer.available]
    refused = any(offer.available for offer in offers)  # there is a sandbox, but none as strict or as able as asked
    raise (errors.PolicyDenied if refused else errors.NotAvailable)(
        "no sandbox here can run this: " + ("; ".join(passed_over) or "no backend is configured"),
        fix="; ".join(fixes) or "ask for less, or run `belljar doctor`",
        context={"reasons": passed_over},
    )


def suits(plan: Plan, offer: Capabilities) -> bool:
    """Whether `choose` would look no further than this offer, so that nobody needs to probe the rest."""
    return not _objection(plan, offer) and not _doubt(plan, offer)


def promise(plan: Plan, offer: Capabilities) -> Guarantees | None:
    """What holds for this plan here: of the runtime it names, else of the first that is strict enough."""
    if plan.runtime:
        return offer.runtimes.get(plan.runtime)
    known = (offer.guarantees, *offer.runtimes.values())
    return next((held for held in known if held and held.isolation.rank >= plan.isolation.rank), offer.guarantees)


def _named(plan: Plan, offers: Sequence[Capabilities]) -> Choice:
    offer = next((offer for offer in offers if offer.backend == plan.backend), None)
    if offer is None:
        known = ", ".join(offer.backend for offer in offers) or "none"
        raise errors.InvalidRequest(f"backend: there is no backend {plan.backend!r}", fix=f"choose from: auto, {known}")
    if objection := _objection(plan, offer):
        kind = errors.PolicyDenied if offer.available else errors.NotAvailable
        fix = offer.fix or "ask for less, or for backend=auto"
        raise kind(f"{offer.backend}: {objection}", fix=fix, context={"backend": offer.backend})
    return Choice(offer.backend, (f"{offer.backend} chosen: asked for by name",))


def _objection(plan: Plan, offer: Capabilities) -> str:
    """Why this backend cannot take the plan; empty if it can."""
    if not offer.available:
        return offer.why_not or "not available here"
    if offer.guarantees is None:
        return "it proved no guarantee"
    if plan.runtime and plan.runtime not in offer.runtimes:
        return f"it has no runtime {plan.runtime!r}, only: {', '.join(sorted(offer.runtimes)) or 'none to choose from'}"
    if (held := promise(plan, offer)) is None or held.isolation.rank < plan.isolation.rank:
        return f"isolation {offer.guarantees.isolation} is weaker than {plan.isolation}"
    return next(_lacks(plan, offer), "")


def _lacks(plan: Plan, offer: Capabilities) -> Iterator[str]:
    """What the plan asks for by name, and this backend has not."""
    assert offer.guarantees is not None
    if plan.image and not offer.images:
        yield "it runs in no image that could be chosen"
    if plan.egress.mode not in offer.egress:
        what = "the hosts " + ", ".join(sorted(plan.egress.hosts)) if plan.egress.hosts else "an open network"
        yield f"it has no network to offer, so {what} cannot be reached"
    if plan.command and not offer.commands:
        yield "it runs code, not commands"
    if plan.language and offer.languages is not None and plan.language not in offer.languages:
        yield f"it does not speak {plan.language}"
    throttled, held = plan.limits.io_bps or plan.limits.io_iops, promise(plan, offer) or offer.guarantees
    if throttled and held.limits.get("io", "not limited") == "not limited":
        yield "it cannot limit block I/O here"
    if plan.seccomp_profile and not offer.runtimes:
        yield f"it cannot take the seccomp profile that {plan.language} must have here"
    if plan.workspace and not offer.workspace:
        yield "it cannot be granted a folder of the host"
    if (plan.deterministic or plan.limits.fuel is not None) and not offer.fuel:
        yield "it cannot count fuel or fix clock and chance"
    if plan.limits.memory < offer.least_memory:
        yield f"its interpreter alone takes {format_size(offer.least_memory)} of memory"
    if plan.profile and plan.profile not in offer.profiles:
        yield f"it has no profile {plan.profile!r}, only: {', '.join(sorted(offer.profiles)) or 'none'}"
    if plan.packages and not offer.packages:
        yield "it cannot be granted a Python environment of the host"


def _doubt(plan: Plan, offer: Capabilities) -> str:
    """Why the code may fail here, though the backend can take it; empty if nothing speaks against it."""
    return "; ".join(_doubts(plan, offer))


def _doubts(plan: Plan, offer: Capabilities) -> Iterator[str]:
    nothing_known = plan.language is None and not plan.command
    if nothing_known and not (offer.commands and offer.processes and offer.languages is None):
        yield "nothing is known yet of what will be run, and it cannot run everything"
    if plan.language and plan.language in offer.partly:
        yield f"its {plan.language} is {offer.partly[plan.language]}"
    if offer.modules is not None and (missing := sorted(plan.needs.modules - offer.modules)):
        more = f" and {len(missing) - _MODULES_SHOWN} more" if len(missing) > _MODULES_SHOWN else ""
        yield f"the code imports {', '.join(missing[:_MODULES_SHOWN])}{more}, which {offer.backend} lacks"
    if not offer.processes and plan.needs.system:
        yield f"the code {', '.join(plan.needs.system)}, and {offer.backend} is no operating system"
    if offer.memory is not None and plan.limits.memory > offer.memory:
        yield f"its guests never have more than {format_size(offer.memory)} of memory"
