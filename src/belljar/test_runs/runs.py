"""Runs the command of a project's tests in a living sandbox, follows it, and makes its report."""

from __future__ import annotations

import inspect
import shlex
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol, Unpack

import anyio

from belljar.control.callbacks import Cancel, Listener
from belljar.core import errors
from belljar.core.options import CommandOptions
from belljar.core.result import Event, Result
from belljar.core.test_results.asked import TestOptions
from belljar.core.test_results.frameworks import (
    MARKERS,
    MAX_MARKER_BYTES,
    FoundFramework,
    Project,
    detect,
    framework_of,
    test_files_of_python,
)
from belljar.core.test_results.model import TestCase, TestReport, with_report
from belljar.core.test_results.parsed import FoundTest, ParsedReport
from belljar.core.test_results.verdict import Asked, combined, report_of
from belljar.core.values import WORKSPACE
from belljar.host.loops import lone_errors
from belljar.living.files import AsyncFiles
from belljar.test_runs import reporters
from belljar.test_runs.reading import matching, read_reports, so_far

_LOOK_SECONDS = 0.4  # between two looks at what the reporters have written
_LOOKS = 20  # as long as this many looks took, nobody looks again
_MAX_NAMES = 2000
_GO_COVERAGE = {"BELLJAR_GO_COVERAGE": "1"}
_VENV = '[ -x .venv/bin/python ] && PATH=$PWD/.venv/bin:$PATH && export PATH; exec "$0" "$@"'
TestListener = Callable[[TestCase], Awaitable[None] | None]


class ProjectBox(Protocol):
    """A living sandbox, here or on a server, with a project in its /workspace."""

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        ...

    async def exec(
        self, command: str | Iterable[str], *, on_event: Listener | None = None, cancel: Cancel | None = None,
        **options: Unpack[CommandOptions],
    ) -> Result:  # fmt: skip
        """Runs a command to its end."""
        ...


async def read_project(files: AsyncFiles) -> Project:
    """Reads what tells how the tests of the project in a sandbox are run."""
    entries = (await files.list(WORKSPACE, 2))[:_MAX_NAMES]
    names = frozenset(one.path.removeprefix(f"{WORKSPACE}/") for one in entries if one.kind in ("file", "link"))
    texts = {}
    for name in (*MARKERS, *test_files_of_python(names)):
        if name in names:
            texts[name] = await _start_of(files, f"{WORKSPACE}/{name}")
    return Project(names, texts)


async def _start_of(files: AsyncFiles, name: str) -> str:
    parts, room = [], MAX_MARKER_BYTES
    with suppress(OSError):
        async with files.open(name) as pieces:
            async for piece in pieces:
                parts.append(piece[:room])
                room -= len(piece)
                if room <= 0:
                    break
    return b"".join(parts).decode("utf-8", "replace")


async def run_tests(
    box: ProjectBox, options: TestOptions, *, on_event: Listener | None = None, on_test: TestListener | None = None,
    cancel: Cancel | None = None, found: FoundFramework | None = None,
) -> tuple[TestReport, Result]:  # fmt: skip
    """Runs the tests of the project in a sandbox's /workspace.

    Args:
        box: the sandbox.
        options: what is asked for.
        on_event: hears what the command prints, and each test as an event of kind "display".
        on_test: hears each test when it has ended, as far as that is told while they run.
        cancel: stops it.
        found: how its tests are run, where that was found before.

    Returns:
        The report, and the result of the (last) command, with the report among its results.

    Raises:
        InvalidRequest: no command was given, and none was found.
    """
    asked, words = await _asked(box, options, found)
    _check_choice(options, asked.framework)
    reports, result = [], None
    for _ in range(options.repeat):
        once = _TestRun(box, options, asked, words, on_event, on_test)
        report, result = await once.run(cancel)
        reports.append(report)
        if report.status not in ("passed", "failed"):
            break
    assert result is not None
    report = combined(reports)
    return report, with_report(result, report)


async def _asked(box: ProjectBox, options: TestOptions, found: FoundFramework | None) -> tuple[Asked, list[str]]:
    command = options.command
    reasons: tuple[str, ...] = ()
    if command is None:
        found = found or detect(await read_project(box.files))
        command, reasons = found.command, (f"{found.name or 'command'}: {found.reason}",)
    line = command if isinstance(command, str) else shlex.join(command)
    words = ["sh", "-c", command] if isinstance(command, str) else list(command)
    return Asked(line, found.name if found else framework_of(line), reasons), words


def _check_choice(options: TestOptions, framework: str) -> None:
    """Refuses a choice of tests that the framework's reporter cannot make: to run all of them would be a lie."""
    for name, able in (("only", _CAN_CHOOSE), ("shard", _CAN_SHARD)):
        if getattr(options, name) and framework not in able:
            raise errors.InvalidRequest(
                f"{name}: cannot be done for {framework or 'this command'}",
                fix=f"it goes with {', '.join(sorted(able))}; or choose the tests in the command itself",
            )


_CAN_CHOOSE = frozenset(("pytest", "unittest", "jest", "vitest", "mocha"))
_CAN_SHARD = frozenset(("pytest", "unittest", "jest", "vitest", "node"))


class _TestRun:
    """One run of the command."""

    def __init__(
        self, box: ProjectBox, options: TestOptions, asked: Asked, words: list[str], on_event: Listener | None,
        on_test: TestListener | None,
    ) -> None:  # fmt: skip
        self._box = box
        self._options = options
        self._asked = asked
        self._words = words
        self._on_event = on_event
        self._on_test = on_test
        self._folder = reporters.new_folder()
        self._told: set[str] = set()
        self._numbered = 0

    async def run(self, cancel: Cancel | None) -> tuple[TestReport, Result]:
        files, out = self._box.files, f"{self._folder}/out"
        for stale in await matching(files, self._options.reports):  # a report of another day proves nothing
            await files.remove(stale)
        await files.unpack(self._folder, reporters.pieces(self._options))
        try:
            result = await self._followed(cancel)
            reported, coverage = await read_reports(files, out, self._options.reports, result, self._asked.framework)
            if reported.report is not None:
                await self._tell(reported.report)
        finally:
            with anyio.move_on_after(10, shield=True), suppress(OSError, errors.BelljarError):
                await files.remove(self._folder)
        report = report_of(self._asked, result, reported, coverage)
        if self._options.coverage and coverage is None and not any("coverage" in one for one in report.warnings):
            told = f"coverage was not measured: nothing does that for {report.framework or 'this command'} here"
            report = report.model_copy(update={"warnings": (*report.warnings, told)})
        return report, result

    async def _followed(self, cancel: Cancel | None) -> Result:
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                if self._on_test or self._on_event:
                    tasks.start_soon(self._follow)
                command = ["sh", f"{self._folder}/launch.sh", self._folder, "sh", "-c", _VENV, *self._words]
                result = await self._box.exec(
                    command, on_event=self._on_event, cancel=cancel, timeout=self._options.timeout,
                    env={"CI": "1", **_GO_COVERAGE, **self._options.environment} if self._options.coverage
                    else {"CI": "1", **self._options.environment},
                )  # fmt: skip
                tasks.cancel_scope.cancel()
        return result

    async def _follow(self) -> None:
        while True:
            began = time.monotonic()
            with suppress(OSError, errors.BelljarError):
                if report := await so_far(self._box.files, f"{self._folder}/out"):
                    await self._tell(report)
            await anyio.sleep(max(_LOOK_SECONDS, _LOOKS * (time.monotonic() - began)))

    async def _tell(self, report: ParsedReport) -> None:
        """Tells of the tests that were not told of before."""
        for test in report.tests:
            if test.id not in self._told:
                self._told.add(test.id)
                await self._tell_one(test, report.collected)

    async def _tell_one(self, test: FoundTest, collected: int | None) -> None:
        self._numbered += 1
        case = TestCase(
            id=test.id, name=test.name, file=test.file, line=test.line, outcome=test.outcome,
            message=test.message[:300],
            duration_ms=None if test.seconds is None else round(test.seconds * 1000, 3),
        )  # fmt: skip
        if self._on_test and inspect.isawaitable(answer := self._on_test(case)):
            await answer
        if self._on_event:
            event = Event(
                run=self._folder.rpartition("-")[2], seq=self._numbered, kind="display",
                text=f"[{self._numbered}/{collected or '?'}] {case.outcome} {case.id}",
                data={"application/vnd.belljar.test+json": case.model_dump(mode="json")},
            )  # fmt: skip
            if inspect.isawaitable(told := self._on_event(event)):
                await told
