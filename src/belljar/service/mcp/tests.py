"""The tool that runs a project's tests: of the folder that the user granted, or of a sandbox's /workspace."""

from __future__ import annotations

from typing import Annotated

from mcp.types import CallToolResult, TextContent
from pydantic import Field

from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.spelling import respell
from belljar.core.test_results.asked import test_options
from belljar.core.test_results.model import TestFailure, TestReport
from belljar.protocol.requests import RunTests
from belljar.protocol.responses import Tested
from belljar.service.mcp.boxes import Boxes
from belljar.service.mcp.calls import Backend, Calls, CommandLine, Ctx, Net
from belljar.service.mcp.content import cut
from belljar.service.tests import report_of_run, submit_tests, submit_tests_in

_MOST_FAILURES = 25  # of one answer
_TEXT = 3000  # characters of a failure's traceback, and of what it printed
_OUTPUT = 4000  # of what the command printed

MaybeCommand = Annotated[
    CommandLine | None, Field(description="a line of shell, or a program with its arguments; found if left out")
]
MaybeBox = Annotated[
    str | None,
    Field(
        description='a session of kind "sandbox", whose /workspace is tested; left out: a copy of the user\'s folder'
    ),
]
Seconds = Annotated[float | None, Field(description="that they may take; 300 unless configured otherwise", gt=0)]
Only = Annotated[list[str] | None, Field(description="ids of tests to run, as an earlier answer has them")]
Coverage = Annotated[bool, Field(description="measure how much code the tests run")]
Ran = Annotated[CallToolResult, Tested]


class TestTools:
    """Each public method is a tool; its docstring is what models are told."""

    __test__ = False

    def __init__(self, calls: Calls, boxes: Boxes) -> None:
        self._calls = calls
        self._boxes = boxes

    async def run_tests(
        self, ctx: Ctx, command: MaybeCommand = None, session_id: MaybeBox = None, timeout: Seconds = None,
        only: Only = None, coverage: Coverage = False, net: Net = None, backend: Backend = "auto",
    ) -> Ran:  # fmt: skip
        """Run a project's tests in a sandbox and return which failed and why, with file, line and traceback. The
        framework (pytest, unittest, …) is found by the project's files. status "passed" and "failed" are verdicts; any
        other says why there is none. Pass the ids of failures as `only` to run just these again."""
        if session_id is not None:
            if net or backend != "auto":
                raise errors.InvalidRequest("net, backend: are a session's own", fix="leave them out")
            return await self._in_box(ctx, session_id, command, timeout, only, coverage)
        folder = self._calls.folders.get("workspace")
        if folder is None:
            raise errors.InvalidRequest(
                "session_id: no folder was granted to this server, so there is no project but that of a sandbox",
                fix='session_open(kind="sandbox"), write the project there, and name its session_id',
            )
        caller = await self._calls.caller(ctx, "run")
        body = RunTests(
            project_path=str(folder), test_command=tuple(command) if isinstance(command, list) else command,
            timeout_seconds=timeout, only=tuple(only or ()), coverage=coverage, net=tuple(self._calls.net(net)),
            backend=backend, packages=self._calls.folders.get("packages"),
        )  # fmt: skip
        run, _ = await self._calls.carry_out(ctx, lambda: submit_tests(self._calls.service, body, caller))
        return of_tests(await report_of_run(run), run.id)

    async def _in_box(
        self, ctx: Ctx, id: str, command: str | list[str] | None, timeout: float | None, only: list[str] | None,
        coverage: bool,
    ) -> CallToolResult:  # fmt: skip
        caller = await self._calls.caller(ctx, "sessions")
        asked = test_options(command=command, timeout=timeout, only=only, coverage=coverage)
        held = self._boxes.living(id, caller)
        run, _ = await self._calls.carry_out(ctx, lambda: submit_tests_in(self._calls.service, held, asked, caller))
        return of_tests(await report_of_run(run), run.id)


def of_tests(report: TestReport, id: str) -> CallToolResult:
    """Returns a report as a model reads it: what failed, and of the output only as much as is needed."""
    coverage = report.coverage and report.coverage.model_copy(update={"files": report.coverage.files[:200]})
    told = report.model_copy(
        update={
            "tests": (), "failures": tuple(map(_short, report.failures[:_MOST_FAILURES])), "coverage": coverage,
            "truncated": report.truncated or bool(report.tests) or len(report.failures) > _MOST_FAILURES,
            "output": cut(report.output, _OUTPUT), "reasons": report.reasons[:8], "flaky": report.flaky[:50],
            "warnings": tuple(cut(one, 500) for one in report.warnings[:8]),
            "denied": tuple(cut(one, 300) for one in report.denied[:8]),
        }
    )  # fmt: skip
    text = neutralise(_prose(told, len(report.failures)))
    data = {**told.model_dump(mode="json"), "id": id}
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=data)


def _short(failure: TestFailure) -> TestFailure:
    return failure.model_copy(
        update={
            "traceback": cut(failure.traceback, _TEXT), "output": cut(failure.output, _TEXT),
            "message": cut(failure.message, 1000), "name": cut(failure.name, 300), "id": cut(failure.id, 1000),
        }
    )  # fmt: skip


def _prose(report: TestReport, failed: int) -> str:
    counted = f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped"
    parts = [f"[{report.status}] {counted} ({report.framework or 'unknown framework'}: {cut(report.command, 300)})"]
    for one in report.failures:
        place = f" at {one.file}:{one.line}" if one.file and one.line else ""
        parts.append(f"{one.kind}: {one.id}{place}\n{one.traceback or one.message}")
        if one.output.strip():
            parts.append(f"[it printed]\n{one.output.strip()}")
    if failed > len(report.failures):
        parts.append(f"[{failed - len(report.failures)} more failures are left out]")
    if report.error:
        parts.append(f"{report.error.message}\nSuggestion: {respell(report.error.suggestion, 'mcp')}")
        parts.append(f"[the command printed]\n{report.output}")
    if report.coverage:
        parts.append(f"coverage: {report.coverage.percent:g} %")
    return cut("\n".join(parts), 60_000)
