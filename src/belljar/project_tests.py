"""Tests of a folder of this machine: `test`, with its async twin `atest`.

The folder is copied into a living sandbox of type `test-runner`, its tests are run there, and all of it is thrown away.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import anyio.to_thread

from belljar.backends.base import Backend
from belljar.control.callbacks import Cancel, Listener
from belljar.core import errors
from belljar.core.options import ProjectOptions, StrPath
from belljar.core.result import Result
from belljar.core.settings import CONTAINER_ENGINES, LANGUAGE_IMAGES, Settings
from belljar.core.test_results.asked import TEST_SECONDS, TestOptions, test_options
from belljar.core.test_results.dependencies import Dependencies, dependencies
from belljar.core.test_results.frameworks import (
    MARKERS,
    MAX_MARKER_BYTES,
    FoundFramework,
    Project,
    detect,
    framework_of,
    test_files_of_python,
)
from belljar.core.test_results.model import TestReport, with_report
from belljar.core.values import WORKSPACE
from belljar.engine.engine import Engine
from belljar.host import portal
from belljar.sandbox import AsyncSandbox, default_engine
from belljar.test_runs.runs import TestListener, run_tests

TEST_RUNNER = "test-runner"
_MAX_NAMES = 2000


async def atest(
    path: StrPath, command: str | Iterable[str] | None = None, *, environment: Mapping[str, str] | None = None,
    timeout: float | None = None, coverage: bool = False, only: Iterable[str] | None = None,
    shard: str | tuple[int, int] | None = None, repeat: int = 1, reports: Iterable[str] | None = None,
    keep: bool = False, install: bool = False, on_event: Listener | None = None, on_test: TestListener | None = None,
    cancel: Cancel | None = None, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
    **options: Unpack[ProjectOptions],
) -> TestReport:  # fmt: skip
    """Runs the tests of a folder in a sandbox of its own. `test` is the same for blocking code.

    Args:
        path: the project. It is copied, links as links, and nothing that the tests do to it comes back.
        command: a line of shell, or a program with its arguments; found by the project's files unless given.
        environment: variables that the tests find.
        timeout: seconds that each run of the command may take; 300 unless given.
        coverage: whether to measure how much code the tests run, where the framework's tool is there.
        only: ids of the tests to run, such as those of the failures of an earlier report.
        shard: one part of the tests, such as "1/4".
        repeat: how often to run them, to find those that do not end alike each time.
        reports: patterns of files to which the command writes JUnit XML or TAP.
        keep: whether to keep the files as the tests left them, as a snapshot.
        install: whether to install beforehand the packages that the project's files list.
        on_event: called with each event; what is printed, and each test as one of kind "display".
        on_test: called with each test when it has ended.
        cancel: a handle that stops it.
        backend: "auto", a backend's name, or a backend object.
        engine: an engine with settings of its own.
        id: the name under which it is recorded.
        **options: of the sandbox: packages, net, image, memory and more, see `ProjectOptions`.

    Returns:
        What came of it. Tests that fail are a report like any other; look at `report.ok` and `report.status`.

    Raises:
        InvalidRequest: what was asked for makes no sense, or no test framework was found.
        PolicyDenied: it is not allowed.
        BackendError: Belljar or a backend failed, not the tests.
    """
    settings = (engine or default_engine()).settings
    asked = test_options(
        command=command, environment=environment, timeout=usual_seconds(settings) if timeout is None else timeout,
        coverage=coverage, only=only and tuple(only), shard=shard, repeat=repeat, reports=reports and tuple(reports),
    )  # fmt: skip
    report, _ = await test_folder(
        path, asked, keep=keep, install=install, on_event=on_event, on_test=on_test, cancel=cancel,
        backend=backend, engine=engine, id=id, options=dict(options),
    )  # fmt: skip
    return report


def test(
    path: StrPath, command: str | Iterable[str] | None = None, *, environment: Mapping[str, str] | None = None,
    timeout: float | None = None, coverage: bool = False, only: Iterable[str] | None = None,
    shard: str | tuple[int, int] | None = None, repeat: int = 1, reports: Iterable[str] | None = None,
    keep: bool = False, install: bool = False, on_event: Listener | None = None, on_test: TestListener | None = None,
    cancel: Cancel | None = None, backend: str | Backend = "auto", engine: Engine | None = None, id: str = "",
    **options: Unpack[ProjectOptions],
) -> TestReport:  # fmt: skip
    """Runs the tests of a folder in a sandbox of its own, and returns their report: see `atest`.

    Callbacks are called from another thread, one at a time.
    """
    return portal.call(
        lambda: atest(
            path, command, environment=environment, timeout=timeout, coverage=coverage, only=only, shard=shard,
            repeat=repeat, reports=reports, keep=keep, install=install, on_event=on_event, on_test=on_test,
            cancel=cancel, backend=backend, engine=engine, id=id, **options,
        )
    )  # fmt: skip


test.__test__ = False  # type: ignore[attr-defined]  # pytest takes a function of this name for a test


def usual_seconds(settings: Settings) -> float:
    """Returns the seconds that tests get which ask for none."""
    kind = settings.container.types.get(TEST_RUNNER)
    return min((kind.timeout if kind else None) or TEST_SECONDS, settings.caps.timeout)


async def test_folder(
    path: StrPath, asked: TestOptions, *, keep: bool = False, install: bool = False, on_event: Listener | None = None,
    on_test: TestListener | None = None, cancel: Cancel | None = None, backend: str | Backend = "auto",
    engine: Engine | None = None, id: str = "", owner: str = "", options: Mapping[str, Any],
) -> tuple[TestReport, Result]:  # fmt: skip
    """Runs the tests of a folder: see `atest`. Returns the result of the command, too."""
    engine, folder = engine or default_engine(), os.fspath(path)
    if not await anyio.to_thread.run_sync(os.path.isdir, folder):
        raise errors.InvalidRequest(f"path: {folder[:200]!r} is no folder", fix="name the project's folder")
    if asked.timeout > engine.settings.caps.timeout:  # before anything is copied
        raise errors.PolicyDenied(
            f"timeout: {asked.timeout:g} s is over the cap of {engine.settings.caps.timeout:g} s",
            fix="ask for less, or have the administrator raise the cap", context={"field": "timeout"},
        )  # fmt: skip
    try:
        project = await anyio.to_thread.run_sync(_project, folder)
    except OSError as error:
        raise errors.InvalidRequest(f"path: {folder[:200]!r} cannot be read: {error.strerror}") from None
    found = detect(project) if asked.command is None else None
    given = {"type": TEST_RUNNER, **{name: value for name, value in options.items() if value is not None}}
    if given.get("workspace") is not None:
        raise errors.InvalidRequest("workspace: the project is copied there", fix="leave it out")
    extra = _extra(project, asked, found, given) if install else None
    if image := _image(engine.settings, backend, given, asked, found):
        given["image"] = image
    async with AsyncSandbox(living=True, backend=backend, engine=engine, id=id, **given) as box:
        await _copy(box, folder)
        report, result = await run_tests(box, asked, on_event=on_event, on_test=on_test, cancel=cancel, found=found)
        if extra is not None:
            names = ", ".join(extra.names) or "nothing"
            more = {"reasons": (*report.reasons, f"installed beforehand: {names}")}
            report = report.model_copy(update=more | {"warnings": (*extra.left_out, *report.warnings)})
            result = with_report(result, report)
        if keep:
            kept = (await box.snapshot(labels={"belljar.tests": report.status}, owner=owner)).id
            report = report.model_copy(update={"kept": kept})
            result = with_report(result, report)
    return report, result


async def _copy(box: AsyncSandbox, folder: str) -> None:
    try:
        await box.files.upload(folder, WORKSPACE)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.InvalidRequest(
                "path: the project does not fit into the sandbox", fix="raise `disk`, and `memory` on native"
            ) from None
        raise errors.InvalidRequest(f"path: the project cannot be copied: {error}") from None


test_folder.__test__ = False  # type: ignore[attr-defined]


def _extra(
    project: Project, asked: TestOptions, found: FoundFramework | None, given: dict[str, Any]
) -> Dependencies:  # fmt: skip
    """Adds the packages that the project's files list to those that are asked for by name."""
    packages = given.get("packages") or ()
    if isinstance(packages, str | os.PathLike):
        raise errors.InvalidRequest(
            "install: goes with no Python environment of the host", fix="leave out one of the two"
        )
    line = asked.command if isinstance(asked.command, str) else " ".join(asked.command or ())
    framework = found.name if found else framework_of(line)
    extra = dependencies(project, framework, coverage=asked.coverage)
    given["packages"] = tuple(dict.fromkeys((*packages, *extra.names))) or None
    return extra


def _image(
    settings: Settings, backend: str | Backend, given: Mapping[str, Any], asked: TestOptions,
    found: FoundFramework | None,
) -> str:  # fmt: skip
    """The image of the project's language, where containers are asked for and nobody names an image."""
    if backend not in CONTAINER_ENGINES or given.get("image") or settings.container.image_of(str(given["type"])):
        return ""
    line = asked.command if isinstance(asked.command, str) else " ".join(asked.command or ())
    named = {"go": "go", "cargo": "rust", "pytest": "python", "unittest": "python", "": ""}
    language = found.language if found else named.get(framework_of(line), "javascript")
    if language in LANGUAGE_IMAGES:
        return settings.container.images.get(language, "") or LANGUAGE_IMAGES[language]
    return settings.container.image_of(settings.container.type_of(language or None))


def _project(folder: str) -> Project:
    """Reads what tells how the tests of a folder are run; links are not followed out of it, devices not opened."""
    root = Path(folder)
    names: list[str] = []
    for one in sorted(os.scandir(root), key=lambda one: one.name):
        if one.is_file():
            names.append(one.name)
        elif one.is_dir(follow_symlinks=False) and one.name != "node_modules":
            names += [f"{one.name}/{below.name}" for below in os.scandir(one.path) if below.is_file()]
        if len(names) > _MAX_NAMES:
            break
    kept = frozenset(names)
    wanted = (name for name in (*MARKERS, *test_files_of_python(kept)) if name in kept)
    return Project(kept, {name: _start(root, name) for name in wanted})


def _start(root: Path, name: str) -> str:
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        return ""
    with open(path, "rb") as file:
        return file.read(MAX_MARKER_BYTES).decode("utf-8", "replace")
