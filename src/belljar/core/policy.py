"""Validates a request and returns a Plan, or raises PolicyDenied. Pure: no I/O."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from pydantic import ValidationError

from belljar.core import errors, hints
from belljar.core.capabilities import Capabilities
from belljar.core.languages import Language
from belljar.core.model import ours
from belljar.core.net_entries import covered
from belljar.core.package_names import refused
from belljar.core.plan import Needs, Plan
from belljar.core.process import Feature
from belljar.core.request import MAX_TIMEOUT_SECONDS, MOST_CONNECTIONS, Egress, Life, Limits, RunRequest, Workspace
from belljar.core.settings import EXECUTION, Caps, ContainerSettings, ContainerType, Settings
from belljar.core.values import few, format_size

# Granting one of these, or a folder that holds it, would hand the host to the guest; of the first few, also
# what is below them.
_CLOSED = ("/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/var/run")
_NEVER_GRANTED = (*_CLOSED, "/var/lib", "/root", "/usr")
_DRAWING = frozenset({"matplotlib", "pylab", "seaborn"})  # modules whose figures come back as results

NO_SANDBOX = "none"  # the name of a backend that some callers ask for, and nobody gets


OTHER_BACKENDS = {"macos-container": "apple"}  # names that other tools have for ours
_SEATBELT = "seatbelt"  # macOS's sandbox-exec, which some projects name


def backend_called(name: str) -> str:
    """Returns the backend of ours that a name stands for.

    Raises:
        PolicyDenied: no sandbox is asked for, or one that Belljar does not have.
    """
    if name == NO_SANDBOX:
        raise no_sandbox()
    if name == _SEATBELT:
        raise errors.PolicyDenied(
            "seatbelt: Belljar has no backend for macOS's sandbox-exec, which Apple deprecated",
            fix="ask for backend=macos-container (Apple's `container`), docker or wasm, or for auto",
            context={"backend": name},
        )
    return OTHER_BACKENDS.get(name, name)


def no_sandbox() -> errors.PolicyDenied:
    """Returns what is said to whoever asks to run code without a sandbox."""
    return errors.PolicyDenied(
        "none: no sandbox was asked for",
        fix="choose a backend (`belljar doctor` shows which work here): there is no execution without a sandbox",
    )


def decide(
    request: RunRequest, settings: Settings, *, keep_files: bool = False, session: bool = False,
    language: Language | None = None,
) -> Plan:  # fmt: skip
    """Validates a request and returns the Plan that a backend carries out.

    Args:
        request: what was asked, with the workspace by its real path and the language by its own name.
        settings: defaults and caps in force.
        keep_files: whether the sandbox's files will be asked for after a run.
        session: whether one Python interpreter is to be kept.
        language: the language of the code, as the administrators have it; None for a command.

    Returns:
        The plan, with every limit resolved.

    Raises:
        PolicyDenied: it is over a cap, or asks for what nobody may have here.
        InvalidRequest: it makes no sense.
    """
    if settings.switched_off:  # which never means: run it without a sandbox
        raise errors.PolicyDenied(
            f"this project switched Belljar off ({settings.switched_off}: sandbox.enabled is false)",
            fix="set it to true, or work in another folder; nothing is ever run without a sandbox",
        )
    backend = backend_called(settings.backend if request.backend == "auto" else request.backend)
    image, notes = _image(request, settings, language)
    if image:
        from belljar.core import image_name  # few requests name one

        image_name.parse(image)
    if language:
        check_network(language, request.egress)
    check_reach(request.egress, settings)
    limits = run_limits(request, settings, language)
    direct = request.egress.mode == "open" and settings.container.network_mode != "none"
    if direct and (limits.net_bandwidth or limits.net_bytes or limits.net_connections < MOST_CONNECTIONS):
        raise errors.PolicyDenied(
            "net_bandwidth, net_connections, net_bytes: an open network of a container engine cannot be limited",
            fix='list the hosts: net=["example.org"], or leave out these limits',
            context={"field": "egress"},
        )
    needs = ours(Needs)() if request.code is None else hints.analyse(request.code, request.language, request.files)
    life = request.living
    return ours(Plan)(
        living=life is not None,
        **({"home": life.home, "user": life.user, "features": _features(life)} if life else {}),
        limits=limits,
        egress=request.egress,
        files=request.files,
        workspace=_workspace(request.workspace, settings),
        packages=request.packages,
        keep_files=keep_files or bool(request.collect),
        isolation=request.isolation,
        image=image,
        notes=notes,
        runtime=request.runtime,
        auto_remove=settings.auto_remove if request.auto_remove is None else request.auto_remove,
        type=request.type,
        seccomp_profile=language.seccomp_profile if language else "",
        backend=backend,
        command=request.command is not None,
        session=session,
        language=request.language if request.code is not None else None,
        deterministic=request.deterministic is not None,
        fuel_by_default="fuel" not in request.limits.named(),
        profile=request.profile,
        needs=needs,
        figures=not needs.modules.isdisjoint(_DRAWING),
    )


def _image(request: RunRequest, settings: Settings, language: Language | None) -> tuple[str | None, tuple[str, ...]]:
    """The image that a run must have, and what is to be said of it.

    The project's counts like one that the request names, so that no backend without images drops it silently; but what
    the language file, the environment or the request says goes first.
    """
    project, options = settings.project_image, settings.container
    if request.image or not project:
        return request.image, ()
    kind = request.type or options.type_of(language.name if language else None) or EXECUTION
    usual = (language.image or options.images.get(language.name, "") if language else "") or options.image_of(kind)
    if usual != project:
        return None, (f"the project's image {project} is not used: {usual or 'another'} is set for this kind of run",)
    return project, (f"image {project}: the project's file names it",)


def run_limits(request: RunRequest, settings: Settings, language: Language | None = None) -> Limits:
    """Returns the limits that a run in a sandbox of its own gets, or raises PolicyDenied or InvalidRequest.

    Args:
        request: What is asked for.
        settings: The administrator's defaults, types and caps.
        language: What the administrators say of the code's language, where there is code.
    """
    if request.living is not None:
        return _living_limits(request, settings)
    defaults = _defaults(request.type, settings.defaults, settings.container, language)
    return limits(request.limits, defaults, settings.caps)


def _living_limits(request: RunRequest, settings: Settings) -> Limits:
    """A living sandbox' limits: its own defaults, and no end of time but what is named."""
    usual = settings.defaults.model_copy(update={"memory": settings.living.memory, "pids": settings.living.pids})
    defaults = _over(usual, _type(request.type, settings.container)) if request.type else usual
    return _unhurried(limits(request.limits, defaults, settings.caps), request)


def _unhurried(found: Limits, request: RunRequest) -> Limits:
    """The same without a timeout, unless the request names one: its sandbox' life bounds a command."""
    return found if "timeout" in request.limits.named() else found.model_copy(update={"timeout": MAX_TIMEOUT_SECONDS})


def _features(life: Life) -> frozenset[Feature]:
    """What a living sandbox must be able to do for what is asked of it."""
    wanted: dict[Feature, bool] = {
        "root": life.user == "root", "pause": life.on_expire == "pause", "snapshot": bool(life.snapshot)
    }  # fmt: skip
    return frozenset(name for name, needed in wanted.items() if needed)


def command_limits(request: RunRequest, plan: Plan, settings: Settings, language: Language | None = None) -> Limits:
    """Returns the limits of one command in an open box: the box's, but for what the command's type or language says."""
    defaults = plan.limits
    if plan.living:
        return _unhurried(limits(request.limits, defaults, settings.caps), request)
    if request.type and request.type != plan.type:
        defaults = _over(defaults, _type(request.type, settings.container))
    elif language and language.memory and not plan.type and plan.language != language.name:
        defaults = defaults.model_copy(update={"memory": language.memory})
    return limits(request.limits, defaults, settings.caps)


def check_language(language: Language, egress: Egress, capabilities: Capabilities) -> None:
    """Raises PolicyDenied where code may not run in an open box, by what the administrators say of its language."""
    check_network(language, egress)
    if (
        language.seccomp_profile and not capabilities.runtimes
    ):  # the profile's format is that of the runtimes of containers
        raise errors.PolicyDenied(
            f"{capabilities.backend} cannot take the seccomp profile that {language.name} must have here",
            fix="ask for backend=docker or backend=podman",
            context={"language": language.name, "backend": capabilities.backend},
        )


def check_packages(plan: Plan, settings: Settings) -> None:
    """Raises PolicyDenied where packages would be installed that the administrators do not allow."""
    names = plan.packages if isinstance(plan.packages, tuple) else ()
    if over := refused(names, settings.packages.names):
        raise errors.PolicyDenied(
            f"packages: {few(over)} may not be installed here",
            fix="have the administrator list them in packages.names (of a server, in service.packages, too), or "
            "grant an environment that has them",
            context={"field": "packages", "packages": over},
        )


def check_network(language: Language, egress: Egress) -> None:
    """Raises PolicyDenied where the administrators let a language have no network, and some is asked for."""
    if egress.mode != "none" and language.allow_network is False:
        raise errors.PolicyDenied(
            f"egress: {language.name} may have no network here (allow_network is false)",
            fix="ask for none, or have the administrator change the language file",
            context={"field": "egress", "language": language.name},
        )


def check_reach(egress: Egress, settings: Settings) -> None:
    """Raises PolicyDenied where more of the network is asked for than the administrators allow anybody."""
    if egress.mode == "open" and not settings.egress.open:
        raise errors.PolicyDenied(
            "egress: an open network is not allowed here (egress.open is false)",
            fix='list the hosts: net=["example.org"]',
            context={"field": "egress"},
        )
    most = settings.egress.hosts
    over = [] if most is None else [one for one in egress.entries if not covered(one, most)]
    if over:
        raise errors.PolicyDenied(
            f"net: {few(over)} may not be reached from here: the administrator allows {few(most or ()) or 'no host'}",
            fix="do without, or have the administrator list it in egress.hosts",
            context={"field": "net", "hosts": over},
        )


def _defaults(kind: str | None, base: Limits, options: ContainerSettings, language: Language | None) -> Limits:
    """The settings' own < the language's usual type < the language's memory < the type that was named."""
    if kind:
        named = _type(kind, options)
        memory = named.memory or (language.memory if language else None)
        return _over(base, ours(ContainerType)(memory=memory, timeout=named.timeout))
    usual = options.types.get(options.type_of(language.name if language else None) or EXECUTION, ours(ContainerType)())
    return _over(_over(base, usual), ours(ContainerType)(memory=language.memory if language else None))


def _type(name: str, options: ContainerSettings) -> ContainerType:
    if name not in options.types:
        known = ", ".join(options.types)
        raise errors.InvalidRequest(f"type: there is no container type {name!r}", fix=f"choose from: {known}")
    return options.types[name]


def _over(base: Limits, kind: ContainerType) -> Limits:
    changes = {"memory": kind.memory, "timeout": kind.timeout}
    changes = {name: value for name, value in changes.items() if value is not None}
    return base.model_copy(update=changes) if changes else base


def limits(asked: Limits, defaults: Limits, caps: Caps) -> Limits:
    """The defaults, cut to the caps, with what the request names laid over; over a cap is a refusal."""
    named = asked.named()
    if not named and all(getattr(defaults, name) <= cap for name, cap in caps):
        return defaults
    values: dict[str, Any] = defaults.model_dump() | named
    for name, cap in caps:
        if values[name] <= cap:
            continue
        if name in named:
            given, most = (_show(name, values[name]), _show(name, cap))
            raise errors.PolicyDenied(
                f"limits.{name}: {given} is over the cap of {most}",
                fix=f"ask for at most {most}, or have the administrator raise the cap",
                context={"field": name, "asked": values[name], "cap": cap},
            )
        values[name] = cap
    try:
        return Limits.model_validate(values)
    except ValidationError as error:
        raise errors.from_validation(error, "limits") from None


def _show(name: str, value: float) -> str:
    if name in ("memory", "disk", "output"):
        return format_size(int(value))
    return f"{value:g} s" if name in ("timeout", "grace") else f"{value:g}"


def _workspace(asked: Workspace | None, settings: Settings) -> Workspace | None:
    if asked is None:
        return None
    path = posixpath.normpath(re.sub("/+", "/", asked.path))  # normpath keeps two leading slashes
    if not posixpath.isabs(path):
        raise errors.InvalidRequest(f"workspace.path: {asked.path!r} is relative", fix="give an absolute path")
    for guarded in (*_NEVER_GRANTED, posixpath.normpath(settings.home)):
        inside = path == guarded or guarded.startswith(path.rstrip("/") + "/")
        if inside or (guarded in _CLOSED and path.startswith(guarded + "/")):
            raise errors.PolicyDenied(
                f"workspace.path: {path} would expose {guarded} of the host",
                fix="grant a project folder instead",
                context={"field": "workspace.path"},
            )
    return asked.model_copy(update={"path": path})
