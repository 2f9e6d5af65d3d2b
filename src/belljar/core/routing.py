"""Chooses the backend for a Plan by what each can do here, and says why. Pure: no I/O.

It never falls back to something weaker than asked, and never to no sandbox at all. What a backend cannot do is an
objection and final; what the code may need and the backend lacks is only a doubt, because it is read from the code's
text: another backend is preferred then, but this one is taken if there is no other. The smallest doubt, a recursion
that may be deep, gives way to a package that this backend has and that others would have to be given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees
from belljar.core.package_names import lacking
from belljar.core.plan import Plan
from belljar.core.values import few, format_size

_MODULES_SHOWN = 5
LACKS = {  # feature of living sandboxes -> what is said of a backend that lacks it
    "dial": "have ports that cannot be reached from outside", "pause": "cannot be paused", "pty": "have no terminals",
    "root": "have no root inside", "snapshot": "cannot be copied", "watch": "do not tell changes of files",
}  # fmt: skip
_LESS = "ask for less, or for backend=auto"
_NO_IMAGES = (
    "ask for backend=docker, podman or macos-container, or leave out the image that the request or project names"
)
_NATIVE_PACKAGES = "ask for backend=native, which can have them, or leave them out"
_NO_PACKAGES = "ask for backend=native, which can have them, or for an image that has them"


class Choice(NamedTuple):
    """The backend that takes a plan, and why it and not another."""

    backend: str
    reasons: tuple[str, ...]


def choose(plan: Plan, candidates: Sequence[Capabilities]) -> Choice:
    """Chooses the first candidate that can do all the plan asks for and its code seems to need.

    Args:
        plan: what is to be run.
        candidates: what each backend can do here, in the order of preference.

    Raises:
        PolicyDenied: a backend works here, but none is as strict or as able as asked.
        NotAvailable: no backend works here.
        InvalidRequest: the plan names a backend that does not exist.
    """
    if plan.backend != "auto":
        return _named(plan, candidates)
    passed_over: list[str] = []
    doubtful: list[tuple[str, str]] = []
    for candidate in candidates:
        if objection := _objection(plan, candidate):
            passed_over.append(f"{candidate.backend} passed over: {objection}")
        elif doubt := _doubt(plan, candidate):
            passed_over.append(f"{candidate.backend} passed over: {doubt}")
            doubtful.append((candidate.backend, doubt))
        else:
            return Choice(candidate.backend, (*passed_over, f"{candidate.backend} chosen: {_merit(plan, candidate)}"))
    if doubtful:
        backend, doubt = doubtful[0]
        return Choice(backend, (*passed_over, f"{backend} chosen for want of another, though {doubt}"))
    if only := _only_to_set_up(plan, candidates):
        raise errors.NotAvailable(
            f"no sandbox works here yet, but {only.backend} will: {only.setup}",
            fix=f"belljar setup {only.backend}",
            context={"reasons": passed_over},
        )
    fixes = [f"{candidate.backend}: {fix}" for candidate in candidates if (fix := _fix(plan, candidate))]
    # There is a sandbox, but none as strict or as able as asked; a language that is not installed is another matter.
    refused = any(candidate.available and not _lacks_toolchain(plan, candidate) for candidate in candidates)
    raise (errors.PolicyDenied if refused else errors.NotAvailable)(
        "no sandbox here can run this: " + ("; ".join(passed_over) or "no backend is configured"),
        fix="; ".join(fixes) or "ask for less, or run `belljar doctor`",
        context={"reasons": passed_over},
    )


def _only_to_set_up(plan: Plan, candidates: Sequence[Capabilities]) -> Capabilities | None:
    """The backend that could take the plan if it were set up, where no other works at all."""
    if any(candidate.available for candidate in candidates):
        return None
    return next((one for one in candidates if one.setup and _could_take(plan, one)), None)


def _could_take(plan: Plan, candidate: Capabilities) -> bool:
    spoken = candidate.languages is None or plan.language is None or plan.language in candidate.languages
    named = (plan.command and not candidate.commands) or (plan.image and not candidate.images)
    return spoken and not named and plan.egress.mode in candidate.egress and not _without_packages(plan, candidate)


def _without_packages(plan: Plan, candidate: Capabilities) -> bool:
    """Whether it cannot have the packages that are asked for."""
    return bool(plan.packages and not candidate.packages and any(_lacks_packages(plan.packages, candidate)))


def _merit(plan: Plan, candidate: Capabilities) -> str:
    """Why it was taken: it has what others may not, or it simply was the first."""
    if plan.needs.soft and (own := _own_packages(plan, candidate)):
        return f"it has {', '.join(own)}, though the code {', '.join(plan.needs.soft)}"
    return "first that can do what was asked"


def _own_packages(plan: Plan, candidate: Capabilities) -> list[str]:
    """The packages that the code imports and this backend has built in, unless the guest is given others."""
    if candidate.modules is None or plan.packages or plan.image:
        return []
    return sorted((plan.needs.modules & candidate.modules) - sys.stdlib_module_names)[:_MODULES_SHOWN]


def _lacks_toolchain(plan: Plan, candidate: Capabilities) -> bool:
    return plan.language in candidate.not_installed


def _fix(plan: Plan, candidate: Capabilities) -> str:
    return candidate.not_installed.get(plan.language or "", "") if candidate.available else candidate.fix


def suits(plan: Plan, candidate: Capabilities) -> bool:
    """Tells whether `choose` would look no further than this candidate, so that nobody needs to probe the rest."""
    return not _objection(plan, candidate) and not _doubt(plan, candidate)


def able(plan: Plan, candidate: Capabilities) -> bool:
    """Tells whether the candidate could take the plan, whatever its code seems to need."""
    return not _objection(plan, candidate)


def promise(plan: Plan, candidate: Capabilities) -> Guarantees | None:
    """Returns what is guaranteed to this plan: by the runtime it names, else by the first that is strict enough."""
    if plan.runtime:
        return candidate.runtimes.get(plan.runtime)
    known = (candidate.guarantees, *candidate.runtimes.values())
    return next((held for held in known if held and held.isolation.rank >= plan.isolation.rank), candidate.guarantees)


def _runtime(plan: Plan, candidate: Capabilities) -> str:
    """The container runtime that the plan would get; empty: the backend has none to choose from."""
    held = promise(plan, candidate)
    return plan.runtime or next((name for name, one in candidate.runtimes.items() if one is held), "")


def _named(plan: Plan, candidates: Sequence[Capabilities]) -> Choice:
    candidate = next((candidate for candidate in candidates if candidate.backend == plan.backend), None)
    if candidate is None:
        known = ", ".join(candidate.backend for candidate in candidates) or "none"
        raise errors.InvalidRequest(f"backend: there is no backend {plan.backend!r}", fix=f"choose from: auto, {known}")
    if objection := _objection(plan, candidate):
        kind = errors.PolicyDenied if candidate.available else errors.NotAvailable
        fix = candidate.fix or (_NO_IMAGES if plan.image and not candidate.images else _LESS)
        if candidate.available and _without_packages(plan, candidate):
            fix = _NO_PACKAGES if candidate.images else _NATIVE_PACKAGES
        raise kind(f"{candidate.backend}: {objection}", fix=fix, context={"backend": candidate.backend})
    return Choice(candidate.backend, (f"{candidate.backend} chosen: asked for by name",))


def _objection(plan: Plan, candidate: Capabilities) -> str:
    """Why this backend cannot take the plan; empty if it can."""
    if not candidate.available:
        return candidate.why_not or "not available here"
    if candidate.guarantees is None:
        return "it proved no guarantee"
    if plan.runtime and plan.runtime not in candidate.runtimes:
        known = ", ".join(sorted(candidate.runtimes)) or "none to choose from"
        return f"it has no runtime {plan.runtime!r}, only: {known}"
    if (held := promise(plan, candidate)) is None or held.isolation.rank < plan.isolation.rank:
        return f"isolation {candidate.guarantees.isolation} is weaker than {plan.isolation}"
    return next(_lacks(plan, candidate), "")


def _lacks(plan: Plan, candidate: Capabilities) -> Iterator[str]:
    """What the plan asks for by name, and this backend has not."""
    assert candidate.guarantees is not None
    if plan.image and not candidate.images:
        yield f"it runs in no image, and {plan.image} is asked for"
    if plan.egress.mode not in candidate.egress:
        what = "the hosts " + ", ".join(sorted(plan.egress.hosts)) if plan.egress.hosts else "an open network"
        yield f"it has no network to offer, so {what} cannot be reached"
    if plan.command and not candidate.commands:
        yield "it runs code, not commands"
    if plan.living:
        yield from _lacks_life(plan, candidate)
    yield from _lacks_language(plan, candidate)
    throttled, held = plan.limits.io_bps or plan.limits.io_iops, promise(plan, candidate) or candidate.guarantees
    if throttled and held.limits.get("io", "not limited") == "not limited":
        yield "it cannot limit block I/O here"
    if plan.seccomp_profile and not candidate.runtimes:
        yield f"it cannot take the seccomp profile that {plan.language} must have here"
    if plan.workspace and not candidate.workspace:
        yield "it cannot be granted a folder of the host"
    if (plan.deterministic or plan.must_count_fuel) and not candidate.fuel:
        yield "it cannot count fuel or fix clock and seed"
    if plan.limits.memory < candidate.least_memory:
        yield f"its interpreter alone takes {format_size(candidate.least_memory)} of memory"
    if plan.profile and plan.profile not in candidate.profiles:
        yield f"it has no profile {plan.profile!r}, only: {', '.join(sorted(candidate.profiles)) or 'none'}"
    if plan.packages and not candidate.packages:
        yield from _lacks_packages(plan.packages, candidate)


def _lacks_packages(packages: str | tuple[str, ...], candidate: Capabilities) -> Iterator[str]:
    if isinstance(packages, str):
        yield "it cannot be granted a Python environment of the host"
    elif candidate.distributions is None:
        yield f"nothing can be installed in it for a run, and {few(packages)} is asked for"
    elif missing := lacking(packages, candidate.distributions):
        yield f"it has no {few(missing)}, and nothing can be installed in it"


def _lacks_life(plan: Plan, candidate: Capabilities) -> Iterator[str]:
    if candidate.living is None:
        yield "it has no living sandboxes"
        return
    runtime = _runtime(plan, candidate)
    if runtime in candidate.lifeless:
        yield f"it has no living sandboxes on {runtime}: {candidate.lifeless[runtime]}"
    for feature in sorted(plan.features - candidate.living):
        yield f"its living sandboxes {LACKS[feature]}"


def _lacks_language(plan: Plan, candidate: Capabilities) -> Iterator[str]:
    if plan.language and candidate.languages is not None and plan.language not in candidate.languages:
        yield f"it does not speak {plan.language}"
    if _lacks_toolchain(plan, candidate):
        yield f"{plan.language} cannot be run by {candidate.backend} here"
    if plan.session and (plan.language or "python") not in candidate.sessions:
        yield f"it has no sessions of {plan.language or 'python'}"


def _doubt(plan: Plan, candidate: Capabilities) -> str:
    """Why the code may fail here, though the backend can take it; empty if nothing speaks against it."""
    return "; ".join(_doubts(plan, candidate))


def _doubts(plan: Plan, candidate: Capabilities) -> Iterator[str]:
    nothing_known = plan.language is None and not plan.command and not plan.session
    if nothing_known and not (candidate.commands and candidate.processes and candidate.languages is None):
        yield "nothing is known yet of what will be run, and it cannot run everything"
    if plan.language and plan.language in candidate.partly:
        yield f"its {plan.language} is {candidate.partly[plan.language]}"
    if candidate.modules is not None and (missing := sorted(plan.needs.modules - candidate.modules)):
        more = f" and {len(missing) - _MODULES_SHOWN} more" if len(missing) > _MODULES_SHOWN else ""
        yield f"the code imports {', '.join(missing[:_MODULES_SHOWN])}{more}, which {candidate.backend} lacks"
    if not candidate.processes and plan.needs.system:
        yield f"the code {', '.join(plan.needs.system)}, and {candidate.backend} is no operating system"
    elif not candidate.processes and plan.needs.soft and not _own_packages(plan, candidate):
        yield f"the code {', '.join(plan.needs.soft)}, and the stack of {candidate.backend} is small"
    if candidate.memory is not None and plan.limits.memory > candidate.memory:
        yield f"its guests never have more than {format_size(candidate.memory)} of memory"
