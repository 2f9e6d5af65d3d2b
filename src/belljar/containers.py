"""What works here (`detect`), containers and images, and `execute_code` for agents. Each has an async twin."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack, runtime_checkable

from belljar.backends.base import Backend
from belljar.control.callbacks import Cancel, Listener, OutputCallback, control_for, listening
from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.options import ContainerOptions, RunOptions, StrPath, request
from belljar.core.policy import OTHER_BACKENDS
from belljar.core.result import ErrorType, Failure, Result, SandboxHealth, Status
from belljar.core.settings import CONTAINER_ENGINES as CONTAINERS
from belljar.core.values import parse_size
from belljar.engine.engine import Engine
from belljar.host import portal
from belljar.sandbox import arun, default_engine

if TYPE_CHECKING:
    from belljar.images.build_log import BuildReport


class Detected(NamedTuple):
    """One backend, and whether it works here.

    Attributes:
        backend: its name.
        available: whether it works.
        reason: why not; or, if it works, what it is.
        fix: how to make it work.
        isolation: what stands between its guests and the host's kernel, if it works.
    """

    backend: str
    available: bool
    reason: str
    fix: str = ""
    isolation: Isolation | None = None


class Detection(NamedTuple):
    """All backends in the order in which `auto` prefers them.

    Attributes:
        backend: the first that works, or "none".
        order: every backend.
    """

    backend: str
    order: tuple[Detected, ...]


async def adetect(*, engine: Engine | None = None) -> Detection:
    """Tells which backends work here, in order, and why the rest does not. It never raises."""
    engine = engine or default_engine()
    order = tuple([await _ask(engine, name) for name in engine.known])
    return Detection(next((one.backend for one in order if one.available), "none"), order)


def detect(*, engine: Engine | None = None) -> Detection:
    """Tells which backends work here, in order, and why the rest does not. It never raises."""
    return portal.call(lambda: adetect(engine=engine))


async def _ask(engine: Engine, name: str) -> Detected:
    try:
        offer = await engine.capabilities(name)
    except Exception as error:  # a backend of a third party may break its promise; we keep ours
        return Detected(name, False, f"its probe failed: {error!r}"[:300], "tell its authors")
    held = offer.guarantees.isolation if offer.guarantees else None
    reason = offer.version or "it works" if offer.available else offer.why_not or "not available here"
    return Detected(name, offer.available, reason, offer.fix, held)


# --- containers ---


async def _container_backend(engine: Engine, wanted: str, *, ready: bool = True) -> str:
    """The first container engine that works here, or the one that was asked for.

    Args:
        engine: Belljar's.
        wanted: "auto", or the name of one.
        ready: One counts that only lacks an image, which the run itself brings.
    """
    wanted = OTHER_BACKENDS.get(wanted, wanted)
    if wanted not in ("auto", *CONTAINERS):
        raise errors.InvalidRequest(
            f"backend: {wanted!r} has no containers", fix=f"choose from: auto, {', '.join(CONTAINERS)}"
        )
    names = [name for name in engine.known if name in CONTAINERS] if wanted == "auto" else [wanted]
    found = [await _ask(engine, name) for name in names]
    for one in found:
        if one.available or (ready and await _can_be_made_ready(engine, one.backend)):
            return one.backend
    raise errors.NotAvailable(
        "no container engine works here: " + "; ".join(f"{one.backend}: {one.reason}" for one in found),
        fix="; ".join(f"{one.backend}: {one.fix}" for one in found if one.fix),
    )


async def _can_be_made_ready(engine: Engine, name: str) -> bool:
    try:
        return bool((await engine.capabilities(name)).setup)
    except Exception:  # as in `_ask`
        return False


async def ais_container_available(*, backend: str = "auto", engine: Engine | None = None) -> bool:
    """Says whether Docker, Podman or Apple's container (or the one named) can run something here now."""
    try:
        await _container_backend(engine or default_engine(), backend, ready=False)
    except errors.NotAvailable:
        return False
    return True


def is_container_available(*, backend: str = "auto", engine: Engine | None = None) -> bool:
    """Says whether Docker, Podman or Apple's container (or the one named) can run something here now."""
    return portal.call(lambda: ais_container_available(backend=backend, engine=engine))


async def arun_in_container(
    command: Iterable[str], *, backend: str = "auto", engine: Engine | None = None, auto_remove: bool | None = None,
    on_event: Listener | None = None, on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
    cancel: Cancel | None = None, **options: Unpack[ContainerOptions],
) -> Result:  # fmt: skip
    """Runs a command in a container of its own: `arun(command=...)`, but never on a backend without containers.

    Args:
        command: the program with its arguments.
        backend: "auto" for the first container engine that works, or the name of one.
        engine: an engine with settings of its own.
        auto_remove: False: the container is kept for inspection, and `warnings` say how to remove it. None: as the
            settings say, which is to remove it. Files of the guest are in memory, and gone with it: name those that you
            want by `collect`.
        on_event: called with each event, in order.
        on_stdout: called with each piece of standard output.
        on_stderr: called with each piece of standard error.
        cancel: a handle that stops the run.
        **options: see `ContainerOptions`; `image` is the language's unless given.

    Raises:
        NotAvailable: no container engine works here.
    """
    engine = engine or default_engine()
    name = await _container_backend(engine, backend)
    asked = request(backend=name, command=command, auto_remove=auto_remove, **options)
    listener = listening(on_event, on_stdout, on_stderr)
    return await engine.run(asked, listener=listener, control=control_for(cancel))


def run_in_container(
    command: Iterable[str], *, backend: str = "auto", engine: Engine | None = None, auto_remove: bool | None = None,
    on_event: Listener | None = None, on_stdout: OutputCallback | None = None, on_stderr: OutputCallback | None = None,
    cancel: Cancel | None = None, **options: Unpack[ContainerOptions],
) -> Result:  # fmt: skip
    """Runs a command in a container of its own, and returns when it has ended: see `arun_in_container`."""
    return portal.call(
        lambda: arun_in_container(
            command, backend=backend, engine=engine, auto_remove=auto_remove, on_event=on_event, on_stdout=on_stdout,
            on_stderr=on_stderr, cancel=cancel, **options,
        )
    )  # fmt: skip


@runtime_checkable
class _Builds(Protocol):
    """A backend that builds images by itself."""

    async def build(
        self, context_dir: str, tag: str, *, file: str, memory: int | None, cpus: float | None,
        told: Callable[[str], object],
    ) -> BuildReport: ...  # fmt: skip


async def abuild_image(
    context_dir: str | os.PathLike[str], tag: str, *, file: str = "Dockerfile", memory: str | int | None = None,
    cpus: float | None = None, backend: str = "auto", engine: Engine | None = None,
    on_progress: Callable[[str], object] = lambda line: None,
) -> BuildReport:  # fmt: skip
    """Builds an image from a folder. A step that fails is told in the report; only our own failures are raised.

    Args:
        context_dir: the folder with the Dockerfile and what it copies.
        tag: the name of the new image.
        file: the Dockerfile, below the folder.
        memory: of the build: bytes, or text such as "2G".
        cpus: of the build.
        backend: "auto" for the first container engine that works, or the name of one.
        engine: an engine with settings of its own.
        on_progress: called with each line that the build tells.
    """
    engine = engine or default_engine()
    name = await _container_backend(engine, backend)
    folder = os.fspath(context_dir)
    chosen = engine.backend(name)
    if isinstance(chosen, _Builds):
        try:
            size = None if memory is None else int(str(parse_size(memory)))
        except ValueError as error:
            raise errors.InvalidRequest(f"memory: {error}") from None
        return await chosen.build(folder, tag, file=file, memory=size, cpus=cpus, told=on_progress)
    from belljar.host.engine_address import engine_address
    from belljar.images.images import Images  # it brings the engine's API with it

    images = Images(engine.settings, engine_address(name, engine.settings))
    return await images.build(folder, tag, file, memory, cpus, listener=lambda progress: on_progress(progress.step))


def build_image(
    context_dir: str | os.PathLike[str], tag: str, *, file: str = "Dockerfile", memory: str | int | None = None,
    cpus: float | None = None, backend: str = "auto", engine: Engine | None = None,
    on_progress: Callable[[str], object] = lambda line: None,
) -> BuildReport:  # fmt: skip
    """Builds an image from a folder, and returns when that has ended: see `abuild_image`."""
    return portal.call(
        lambda: abuild_image(
            context_dir, tag, file=file, memory=memory, cpus=cpus, backend=backend, engine=engine,
            on_progress=on_progress,
        )
    )  # fmt: skip


# --- in an agent's words ---


async def aexecute_code(
    code: str, project_path: StrPath | None = None, require_libraries: bool | Iterable[str] = False, *,
    context_files: Mapping[str, bytes | str] | Iterable[str] | None = None,
    backend: str = "auto", engine: Engine | None = None, **options: Unpack[ContainerOptions],
) -> Result:  # fmt: skip
    """Runs code for a caller that wants no exceptions: whatever happens is a result.

    It runs in WebAssembly unless the code needs what that has not: other packages, threads, another language.

    Args:
        code: the snippet to run.
        project_path: a folder that the code finds at /workspace, read-only unless `write=True` is given.
        require_libraries: names that must import, or True for all that the code imports: a backend that has them is
            found, or the answer says which are missing.
        context_files: name to content, or a list of files below `project_path`.
        backend: "auto", or a backend's name.
        engine: an engine with settings of its own.
        **options: language, stdin, env, limits and more: see `ContainerOptions`.

    Returns:
        What happened: `success`, `error`, `timeout` (exit code 124) and the other statuses of a run; or
        `system_failure` (exit code -1), when Belljar failed or refused to run it.
    """
    given: dict[str, Any] = {"workspace": project_path, "files": context_files} | dict(options)
    try:
        return await arun(code, backend=backend, engine=engine, require_libraries=require_libraries, **given)
    except errors.BelljarError as error:
        return _system_failure(error)


def execute_code(
    code: str, project_path: StrPath | None = None, require_libraries: bool | Iterable[str] = False, *,
    context_files: Mapping[str, bytes | str] | Iterable[str] | None = None,
    backend: str = "auto", engine: Engine | None = None, **options: Unpack[ContainerOptions],
) -> Result:  # fmt: skip
    """Runs code for a caller that wants no exceptions, and returns when it has ended: see `aexecute_code`."""
    return portal.call(
        lambda: aexecute_code(
            code, project_path, require_libraries, context_files=context_files, backend=backend,
            engine=engine, **options,
        )
    )  # fmt: skip


def _system_failure(error: errors.BelljarError) -> Result:
    """A failure or refusal of ours as a result, whose error says which of them it was."""
    failure = Failure(
        error_type=ErrorType.SYSTEM_FAILURE, message=error.message,
        suggestion=error.fix or "run `belljar doctor`", context={"kind": error.kind, **error.context},
    )  # fmt: skip
    return Result(
        status=Status.SYSTEM_FAILURE, exit_code=errors.SYSTEM_FAILURE_EXIT_CODE, stderr=f"{error}\n", error=failure
    )


async def aexecute_file(
    path: StrPath, *, backend: str | Backend = "auto", engine: Engine | None = None, **options: Unpack[RunOptions]
) -> Result:
    """Runs a file, whose extension tells the language: `arun(path=...)` under the name that agents look for."""
    return await arun(path=path, backend=backend, engine=engine, **options)


def execute_file(
    path: StrPath, *, backend: str | Backend = "auto", engine: Engine | None = None, **options: Unpack[RunOptions]
) -> Result:
    """Runs a file, whose extension tells the language: `run(path=...)` under the name that agents look for."""
    return portal.call(lambda: aexecute_file(path, backend=backend, engine=engine, **options))


async def acheck_sandbox_health(*, backend: str = "auto", engine: Engine | None = None) -> SandboxHealth:
    """Runs a real snippet and tells whether it came to what it should. It never raises.

    Args:
        backend: "auto", or the name of the one to ask.
        engine: an engine with settings of its own.
    """
    start = time.perf_counter()
    result = await aexecute_code("print(6 * 7)", backend=backend, engine=engine, timeout=10)
    spent = round((time.perf_counter() - start) * 1000, 1)
    healthy = result.ok and result.stdout.strip() == "42"
    failure = result.error
    problem = "" if healthy else failure.message if failure else f"a tiny run came to {result.status}"
    return SandboxHealth(
        healthy=healthy, backend=result.backend, duration_ms=spent, problem=problem,
        fix=failure.suggestion if failure else "",
    )  # fmt: skip


def check_sandbox_health(*, backend: str = "auto", engine: Engine | None = None) -> SandboxHealth:
    """Runs a real snippet and tells whether it came to what it should: see `acheck_sandbox_health`."""
    return portal.call(lambda: acheck_sandbox_health(backend=backend, engine=engine))
