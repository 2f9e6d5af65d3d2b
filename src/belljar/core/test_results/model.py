"""The report of a test run: counts, failures, coverage, and how it ended."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from belljar.core.capabilities import Guarantees
from belljar.core.model import Model
from belljar.core.result import Failure, Result

TESTS_MIME = "application/vnd.belljar.tests+json"  # the report among the results of the run that made it
MAX_FAILURES = 1000
MAX_CASES = 20_000
Outcome = Literal["passed", "failed", "error", "skipped"]
RunStatus = Literal[
    "passed", "failed", "no_tests", "crashed", "inconsistent", "no_report", "timeout", "oom_killed", "output_limit",
    "disk_limit", "killed", "aborted",
]  # fmt: skip


class _NoTest(Model):
    __test__: ClassVar[bool] = False  # pytest takes every class for one whose name begins with Test


class TestCase(_NoTest):
    """One test, and how it ended."""

    id: str
    """By which it can be run again."""
    name: str
    """What people call it."""
    file: str = ""
    """The file that it is in, relative to the project."""
    line: int | None = None
    """The line of that file."""
    outcome: Outcome = "passed"
    """How it ended; "error" is a failure outside of the test itself: while it was set up, or collected."""
    duration_ms: float | None = None
    """How long it took; None where that is not known."""
    message: str = ""
    """Why it failed or was skipped, in a sentence."""


class TestFailure(_NoTest):
    """One test that failed."""

    id: str
    """By which it can be run again."""
    name: str
    """What people call it."""
    kind: Literal["failed", "error"] = "failed"
    """Whether the test failed, or what is around it."""
    file: str = ""
    """The file that it is in, relative to the project."""
    line: int | None = None
    """The line where it failed, or where the test begins."""
    message: str = ""
    """What went wrong, in a sentence."""
    traceback: str = ""
    """Where it came from, as the test runner tells it."""
    output: str = ""
    """What it printed meanwhile, as far as the runner caught it."""
    duration_ms: float | None = None
    """How long it took; None where that is not known."""


class FlakyTest(_NoTest):
    """A test that did not end alike each time that it was run."""

    id: str
    """By which it can be run again."""
    passed: int
    """How often it passed."""
    failed: int
    """How often it failed."""


class FileCoverage(_NoTest):
    """How much of one file was run."""

    path: str
    """The file, relative to the project."""
    percent: float
    """Of its lines, or statements."""
    covered: int = 0
    """How many of them were run."""
    total: int = 0
    """How many it has."""


class Coverage(_NoTest):
    """How much of the project's code the tests have run."""

    percent: float
    """Of all lines, or statements, that were measured."""
    files: tuple[FileCoverage, ...] = ()
    """File by file."""
    source: str = ""
    """The tool that measured it."""


class TestReport(_NoTest):
    """What came of a run of a project's tests.

    `failed` counts errors, too. Only `passed` and `failed` are verdicts of tests: every other status says that there is
    none, and the counts are of what was reported until then.
    """

    status: RunStatus
    """How it ended: "passed", "failed", or why there is no verdict."""
    passed: int = 0
    """Tests that passed."""
    failed: int = 0
    """Tests that failed, errors included."""
    skipped: int = 0
    """Tests that were left out, or were expected to fail and did."""
    output: str = ""
    """What the command printed: both streams, head and tail if `truncated`."""
    failures: tuple[TestFailure, ...] = ()
    """What failed, and why; the first thousand."""
    coverage: Coverage | None = None
    """How much code was run, where that was asked for and could be measured."""
    error: Failure | None = None
    """Why there is no verdict, and what to do; None if there is one."""
    framework: str = ""
    """The test framework, as its report says, or as it was detected."""
    command: str = ""
    """The command that was run."""
    source: Literal["report", "printed", ""] = ""
    """Where the counts are from: a structured report, or what was printed (TAP); empty: there are none."""
    exit_code: int | None = None
    """The exit code of the command."""
    duration_ms: float = 0.0
    """How long the command ran."""
    tests: tuple[TestCase, ...] = ()
    """Each test; the first twenty thousand."""
    flaky: tuple[FlakyTest, ...] = ()
    """Those that did not end alike each time, where they were run more than once."""
    runs: int = 1
    """How often the command was run."""
    truncated: bool = False
    """Whether output, failures or tests are missing here."""
    kept: str = ""
    """The id of the snapshot of the files as the tests left them, where that was asked for."""
    backend: str = ""
    """The backend that ran it."""
    container_id: str = ""
    """The id of its sandbox."""
    guarantees: Guarantees | None = None
    """What isolated and limited it."""
    reasons: tuple[str, ...] = Field((), description="how framework, command and backend were found")
    denied: tuple[str, ...] = Field((), description="network connections that were refused, and why")
    warnings: tuple[str, ...] = Field((), description="what went wrong without ending the run")

    @property
    def ok(self) -> bool:
        """Whether all tests passed, and nothing contradicts that."""
        return self.status == "passed"

    def __str__(self) -> str:
        told = f"{self.status}: {self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return "\n".join([told, *(f"{one.file}:{one.line or '?'} {one.name}: {one.message}" for one in self.failures)])


def with_report(result: Result, report: TestReport) -> Result:
    """Returns the result of a test run's command with its report in it, and without saying anything twice."""
    counted = f"{report.status}: {report.passed} passed, {report.failed} failed, {report.skipped} skipped"
    told = report.model_dump(mode="json", exclude={"output", "guarantees"})
    return result.model_copy(update={"results": ({"text/plain": counted, TESTS_MIME: told},)})


def report_in(result: Result) -> TestReport | None:
    """Returns the report that the result of a test run has in it; None: it has none."""
    for bundle in result.results:
        if isinstance(told := bundle.get(TESTS_MIME), dict):
            report = TestReport.model_validate(told, extra="ignore")
            return report.model_copy(update={"output": result.stdout + result.stderr, "guarantees": result.guarantees})
    return None
